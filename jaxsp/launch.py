"""python -m jaxsp.launch [--processes N] CONFIG.yaml [key.path=value ...]: trains with one process per GPU of this node.

A job that hangs is started again; one that fails, or loses a process, is left to whoever started it. SIGTERM and SIGINT are
passed on once, and the processes stop as they see fit; a second one kills them.
"""

import argparse
import ctypes
import functools
import math
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxsp import cli
from jaxsp.config import schema
from jaxsp.core import errors
from jaxsp.runtime import cluster, distributed

HOLD_S = 2.0
"""Others than process 0 are heard so much later: what it says too is then left out. When a process has failed, the others have
so long to say the same and end by themselves."""

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_MISSED = ("from coordination service", "detected fatal errors")
"""In what JAX says before it aborts a process because another is gone; one of them is in the first line."""

_ONE_S = 1.0
"""Signals so close together are one: srun sends it to a launcher and to its processes."""


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError before anything is started; SystemExit with the code of the first process that failed."""
    parser = cli.parser("launch", "Trains as python -m jaxsp.train does, with one process for each GPU of this node.")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("changes", metavar="key.path=value", nargs="*", default=[], help="changes a field of the config")
    parser.add_argument(
        "--processes", metavar="N", type=int, help="on this node; where there is no GPU, of virtual CPU devices"
    )
    several = parser.add_argument_group("several nodes", "one launch on each, with the same N")
    several.add_argument("--nodes", metavar="NODES", type=int, default=1)
    several.add_argument("--node", metavar="I", type=int, default=0, help="which of them this is, from 0")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="node 0 and a free port there")
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=3,
        help="starts a job that hangs again up to so many times without a new checkpoint; default: 3",
    )
    given = parser.parse_intermixed_args(arguments)
    settings = schema.load(given.config, given.changes)  # a mistake there is said once
    with _Orders() as orders:
        _train(given, settings.run, orders)


def _train(given: argparse.Namespace, settings: schema.Run, orders: "_Orders") -> None:
    """Trains, and starts again what hangs. Raises: SystemExit, where it fails otherwise, or hangs again and again."""
    command = [sys.executable, "-m", "jaxsp.train", given.config, *given.changes]
    left, reached = given.restarts, _newest_step(settings)
    # a new port each time, where there is but one node
    while run(command, _job(given), orders):
        newest = _newest_step(settings)
        if newest > reached:
            left, reached = given.restarts, newest
        if not left:
            print(f"not started again: {given.restarts} restarts in a row brought no new checkpoint", file=sys.stderr)
            sys.exit(distributed.AGAIN)
        left -= 1
        where = f"from the checkpoint of step {newest}" if newest else "from the beginning"
        print(f"all processes start again, {where}", file=sys.stderr, flush=True)
        if settings.resume == "never":
            command = [*command[:4], *given.changes, "run.resume=auto"]


def _newest_step(settings: schema.Run) -> int:
    """Of the checkpoints in the run's directory; 0 where there is none."""
    found = pathlib.Path(settings.directory, "checkpoints").glob("*")  # importing checkpoint/reader.py would begin threads
    return max((int(path.name) for path in found if path.name.isdecimal()), default=0)


def _job(given: argparse.Namespace) -> list[cluster.Process]:
    """The processes of this node. Raises: UserError for numbers that do not fit."""
    problems = []
    num_gpus = cluster.num_gpus(os.environ)
    num_local = num_gpus if given.processes is None else given.processes
    if given.processes is None and not num_gpus:
        problems.append("--processes: missing, and there is no NVIDIA GPU here. On virtual CPU devices: --processes 2.")
    elif num_local < 1 or 0 < num_gpus < num_local:
        most = f" to {num_gpus}, the GPUs of this node" if num_gpus else ""
        problems.append(f"--processes = {num_local}: must be 1{most or ' or more'}. Leave it out for one on each GPU.")
    if not 0 <= given.node < given.nodes:
        problems.append(f"--node = {given.node}: must be from 0 to {given.nodes - 1}, with --nodes {given.nodes}.")
    if given.nodes > 1 and given.coordinator is None:
        problems.append(
            f"--nodes = {given.nodes}: --coordinator is missing. The same on all nodes: --coordinator node-0:29500."
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        if given.nodes == 1 and os.environ.get(name, "1") != "1":
            problems.append(
                f"{name} = {os.environ[name]}: so many launches were started, and each would be a job of its own. Start "
                "jaxsp.train in their place, or one launch per node with --nodes, --node and --coordinator."
            )
    if problems:
        raise errors.UserError(problems)
    coordinator = f"127.0.0.1:{_free_port()}"
    if given.coordinator is not None:
        coordinator = cluster.address("--coordinator", given.coordinator)
    first, count = given.node * num_local, given.nodes * num_local
    return [
        cluster.Process(
            index=first + local, num_processes=count, coordinator=coordinator, local_index=local, num_local=num_local
        )
        for local in range(num_local)
    ]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class _Orders:
    """SIGTERM and SIGINT, from when it is entered until it is left: the first is passed on to the processes."""

    def __init__(self) -> None:
        self.children: dict[int, subprocess.Popen] = {}
        self.first: int | None = None
        self.second: int | None = None
        self._at = 0.0

    def __enter__(self) -> "_Orders":
        both = (signal.SIGTERM, signal.SIGINT)
        # as nohup's commands are deaf to Ctrl-C, so they stay
        heard = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: Any) -> None:
        if self.first is None:
            self.first, self._at = number, time.monotonic()
            _signal(self.children, signal.Signals(number))
        elif time.monotonic() - self._at > _ONE_S:
            self.second = number

    def code(self, child: subprocess.Popen) -> int | None:
        """The exit code of a process; where the first signal itself ended it, it was not ready yet, and had begun nothing."""
        code = child.poll()
        return cli.DONE if self.first is not None and code == -self.first else code


def run(command: Sequence[str], job: Sequence[cluster.Process], orders: _Orders) -> bool:
    """Runs a command in each process of this node until all are done, or one has failed.

    Returns: whether to start it again: it hung.
    Raises:  SystemExit, where it failed otherwise.
    """
    die_with_us = functools.partial(_die_with, os.getpid(), ctypes.CDLL(None).prctl)
    children = orders.children
    children.clear()
    for process in job:
        # the terminal is process 0's; what others print there is not for the user
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL} if process.index else {}
        children[process.index] = subprocess.Popen(
            command, env=os.environ | _variables(process), stderr=subprocess.PIPE, preexec_fn=die_with_us, **quiet
        )
    voices = Voices(children)
    if orders.first is not None:  # while they were being started
        _signal(children, signal.Signals(orders.first))
    failed = _watch(children, voices, orders)
    codes = {orders.code(child) for child in children.values()}
    # without asking: those that are left wait for the one that failed, deep in a collective, and would not hear it
    _kill(children)
    voices.close(failed=failed)
    if orders.second is not None:
        print(f"killed by a second {signal.Signals(orders.second).name}", file=sys.stderr)
        sys.exit(128 + orders.second)
    if failed is None:
        return False
    code = children[failed].returncode
    alike = len(job) > 1 and codes == {code}
    who = f"all {len(job)} processes here" if alike else f"process {failed} of {job[0].num_processes}"
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    print(f"{who} failed: {how}{', and the others were ended' if None in codes else ''}", file=sys.stderr)
    if orders.first is None and distributed.AGAIN in codes:
        return True
    sys.exit(code if code > 0 else 128 - code)


def _variables(process: cluster.Process) -> dict[str, str]:
    """What torchrun would set, for jobs.find."""
    host, _, port = process.coordinator.rpartition(":")
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(process.num_processes),
        "RANK": str(process.index),
        "LOCAL_RANK": str(process.local_index),
        "LOCAL_WORLD_SIZE": str(process.num_local),
    }


def _die_with(launcher: int, prctl: Any) -> None:
    """In a child: when the launcher is gone, however it went, the kernel ends this process."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # gone before we asked
        os._exit(cli.OURS)


def _watch(children: dict[int, subprocess.Popen], voices: "Voices", orders: _Orders) -> int | None:
    """The process that failed, or None when all are done, or are to be killed."""
    while True:
        if orders.second is not None:
            return None
        codes = {index: orders.code(child) for index, child in children.items()}
        if any(codes.values()):
            break
        if None not in codes.values():
            return None
        voices.say(older_than=HOLD_S)
        time.sleep(_POLL_S)
    _ended(children, HOLD_S)
    failed = [index for index, code in codes.items() if code]
    # JAX aborts a process when another one is gone, and sometimes both are found at once
    failed += [index for index, child in children.items() if orders.code(child) and index not in failed]
    return next((index for index in failed if children[index].returncode != -signal.SIGABRT), failed[0])


def _kill(children: dict[int, subprocess.Popen]) -> None:
    _signal(children, signal.SIGKILL)
    for child in children.values():
        child.wait()


def _ended(children: dict[int, subprocess.Popen], seconds: float) -> bool:
    """Whether all end within so many seconds."""
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children.values()):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _signal(children: dict[int, subprocess.Popen], number: signal.Signals) -> None:
    for child in children.values():
        child.send_signal(number)  # does nothing where the child has ended


class Voices:
    """What the processes say on stderr: that of process 0 at once and untouched, lines of the others under their number.

    A mistake that all of them find is so said once, and one that only one of them finds is not lost.
    """

    def __init__(self, children: dict[int, subprocess.Popen]):
        self._lines: queue.SimpleQueue[tuple[float, int, str]] = queue.SimpleQueue()
        self._first: dict[str, int] = {}
        """Who said a line first."""
        self._held: list[tuple[float, int, str]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(index, child.stderr.fileno()), daemon=True)
            for index, child in children.items()
            if child.stderr is not None
        ]
        for reader in self._readers:
            reader.start()

    def say(self, *, older_than: float) -> None:
        """Says what the others said so many seconds ago and nobody said before."""
        while not self._lines.empty():
            self._held.append(self._lines.get())
        now = time.monotonic()
        while self._held and now - self._held[0][0] >= older_than:
            _, index, line = self._held.pop(0)
            if self._first.setdefault(line, index) == index:
                with distributed.though_deaf():
                    print(f"{distributed.prefix(index)}{line}", file=sys.stderr, flush=True)

    def close(self, *, failed: int | None) -> None:
        """Says what is left after all have ended, but of the others than `failed` not, in 30 lines, that JAX missed one."""
        for reader in self._readers:
            reader.join(HOLD_S)  # what they started may still hold the other end
        self.say(older_than=math.inf)
        heard, self._held, missed = self._held, [], set[int]()
        for line in heard:
            if failed not in (None, line[1]) and _is_missed(line[2]):
                missed.add(line[1])
            if line[1] not in missed:
                self._held.append(line)
        self.say(older_than=0)

    def _read(self, index: int, stderr: int) -> None:
        rest = b""
        while data := os.read(stderr, 2**16):
            if index == 0:
                with distributed.though_deaf():
                    sys.stderr.buffer.write(data)
                    sys.stderr.flush()
            *lines, rest = (rest + data).split(b"\n")
            self._heard(index, lines)
        self._heard(index, [rest] if rest else [])

    def _heard(self, index: int, lines: list[bytes]) -> None:
        for line in lines:
            # of a progress bar, how it ended
            text = line.rpartition(b"\r")[2].decode(errors="replace").removeprefix(distributed.prefix(index))
            if index == 0:
                self._first[text] = 0
            else:
                self._lines.put((time.monotonic(), index, text))


def _is_missed(line: str) -> bool:
    return any(words in line for words in _MISSED)


if __name__ == "__main__":
    cli.run(main)
