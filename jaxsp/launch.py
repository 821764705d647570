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
from jaxsp.config.schema import RunConfig
from jaxsp.core.errors import UserError
from jaxsp.runtime import cluster, distributed, hardware
from jaxsp.runtime.cluster import Process

PEER_LINE_DELAY_S = 2.0
"""Others than process 0 are heard so much later: what it says too is then left out. When a process has failed, the others have
so long to say the same and end by themselves."""

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_LOST_PEER_PHRASES = ("from coordination service", "detected fatal errors")
"""In what JAX says before it aborts a process because another is gone; one of them is in the first line."""

_SAME_SIGNAL_S = 1.0
"""Signals so close together are one: srun sends it to a launcher and to its processes."""


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError before anything is started; SystemExit with the code of the first process that failed."""
    parser = cli.make_parser(
        "launch",
        "Trains as python -m jaxsp.train does, with one process for each GPU of this node.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument(
        "changes",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="changes a field of the config",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="on this node; where there is no GPU, of virtual CPU devices",
    )
    several = parser.add_argument_group("several nodes", "one launch on each, with the same N")
    several.add_argument("--nodes", metavar="NODES", type=int, default=1)
    several.add_argument(
        "--node", metavar="I", type=int, default=0, help="which of them this is, from 0"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="node 0 and a free port there")
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=3,
        help="starts a job that hangs again up to so many times without a new checkpoint; default: 3",
    )
    given = parser.parse_intermixed_args(arguments)
    config = schema.load(given.config, given.changes)  # a mistake there is said once
    with _SignalForwarder() as orders:
        _run_with_restarts(given, config.run, orders)


def _run_with_restarts(
    args: argparse.Namespace, config: RunConfig, orders: "_SignalForwarder"
) -> None:
    """Trains, and starts again what hangs. Raises: SystemExit, where it fails otherwise, or hangs again and again."""
    command = [sys.executable, "-m", "jaxsp.train", args.config, *args.changes]
    left, reached = args.restarts, _latest_step(config)
    # a new port each time, where there is but one node
    while run_processes(command, _plan_processes(args), orders):
        newest = _latest_step(config)
        if newest > reached:
            left, reached = args.restarts, newest
        if not left:
            print(
                f"not started again: {args.restarts} restarts in a row brought no new checkpoint",
                file=sys.stderr,
            )
            sys.exit(distributed.EXIT_HUNG)
        left -= 1
        where = f"from the checkpoint of step {newest}" if newest else "from the beginning"
        print(f"all processes start again, {where}", file=sys.stderr, flush=True)
        if config.resume == "never":
            command = [*command[:4], *args.changes, "run.resume=auto"]


def _latest_step(config: RunConfig) -> int:
    """Of the checkpoints in the run's directory; 0 where there is none."""
    found = pathlib.Path(config.directory, "checkpoints").glob(
        "*"
    )  # importing checkpoint/reader.py would begin threads
    return max((int(path.name) for path in found if path.name.isdecimal()), default=0)


def _plan_processes(args: argparse.Namespace) -> list[Process]:
    """The processes of this node. Raises: UserError for numbers that do not fit."""
    problems = []
    num_gpus = hardware.count_gpus(os.environ)
    num_local = num_gpus if args.processes is None else args.processes
    if args.processes is None and not num_gpus:
        problems.append(
            "--processes: missing, and there is no NVIDIA GPU here. On virtual CPU devices: --processes 2."
        )
    elif num_local < 1 or 0 < num_gpus < num_local:
        most = f" to {num_gpus}, the GPUs of this node" if num_gpus else ""
        problems.append(
            f"--processes = {num_local}: must be 1{most or ' or more'}. Leave it out for one on each GPU."
        )
    if not 0 <= args.node < args.nodes:
        problems.append(
            f"--node = {args.node}: must be from 0 to {args.nodes - 1}, with --nodes {args.nodes}."
        )
    if args.nodes > 1 and args.coordinator is None:
        problems.append(
            f"--nodes = {args.nodes}: --coordinator is missing. The same on all nodes: --coordinator node-0:29500."
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        if args.nodes == 1 and os.environ.get(name, "1") != "1":
            problems.append(
                f"{name} = {os.environ[name]}: so many launches were started, and each would be a job of its own. Start "
                "jaxsp.train in their place, or one launch per node with --nodes, --node and --coordinator."
            )
    if problems:
        raise UserError(problems)
    coordinator = f"127.0.0.1:{_free_port()}"
    if args.coordinator is not None:
        coordinator = cluster.check_address("--coordinator", args.coordinator)
    first, count = args.node * num_local, args.nodes * num_local
    return [
        Process(
            index=first + local,
            num_processes=count,
            coordinator=coordinator,
            local_index=local,
            num_local_processes=num_local,
        )
        for local in range(num_local)
    ]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class _SignalForwarder:
    """SIGTERM and SIGINT, from when it is entered until it is left: the first is passed on to the processes."""

    def __init__(self) -> None:
        self.children: dict[int, subprocess.Popen] = {}
        self.first_signal: int | None = None
        self.second_signal: int | None = None
        self._first_signal_s = 0.0

    def __enter__(self) -> "_SignalForwarder":
        both = (signal.SIGTERM, signal.SIGINT)
        # as nohup's commands are deaf to Ctrl-C, so they stay
        heard = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
        self._old_handlers = {
            number: signal.signal(number, self._handle_signal) for number in heard
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, _: Any) -> None:
        if self.first_signal is None:
            self.first_signal, self._first_signal_s = number, time.monotonic()
            _send_signal(self.children, signal.Signals(number))
        elif time.monotonic() - self._first_signal_s > _SAME_SIGNAL_S:
            self.second_signal = number

    def exit_code(self, child: subprocess.Popen) -> int | None:
        """The exit code of a process; where the first signal itself ended it, it was not ready yet, and had begun nothing."""
        code = child.poll()
        return cli.EXIT_OK if self.first_signal is not None and code == -self.first_signal else code


def run_processes(
    command: Sequence[str], local_processes: Sequence[Process], signals: _SignalForwarder
) -> bool:
    """Runs a command in each process of this node until all are done, or one has failed.

    Returns: whether to start it again: it hung.
    Raises:  SystemExit, where it failed otherwise.
    """
    die_with_us = functools.partial(_die_with_parent, os.getpid(), ctypes.CDLL(None).prctl)
    children = signals.children
    children.clear()
    for process in local_processes:
        # the terminal is process 0's; what others print there is not for the user
        quiet: dict[str, Any] = (
            {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL} if process.index else {}
        )
        children[process.index] = subprocess.Popen(
            command,
            env=os.environ | _torchrun_variables(process),
            stderr=subprocess.PIPE,
            preexec_fn=die_with_us,
            **quiet,
        )
    voices = StderrMultiplexer(children)
    if signals.first_signal is not None:  # while they were being started
        _send_signal(children, signal.Signals(signals.first_signal))
    failed = _wait_for_exit(children, voices, signals)
    codes = {signals.exit_code(child) for child in children.values()}
    # without asking: those that are left wait for the one that failed, deep in a collective, and would not hear it
    _kill_all(children)
    voices.close(failed=failed)
    if signals.second_signal is not None:
        print(f"killed by a second {signal.Signals(signals.second_signal).name}", file=sys.stderr)
        sys.exit(128 + signals.second_signal)
    if failed is None:
        return False
    code = children[failed].returncode
    alike = len(local_processes) > 1 and codes == {code}
    who = (
        f"all {len(local_processes)} processes here"
        if alike
        else f"process {failed} of {local_processes[0].num_processes}"
    )
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    print(
        f"{who} failed: {how}{', and the others were ended' if None in codes else ''}",
        file=sys.stderr,
    )
    if signals.first_signal is None and distributed.EXIT_HUNG in codes:
        return True
    sys.exit(code if code > 0 else 128 - code)


def _torchrun_variables(process: Process) -> dict[str, str]:
    """What torchrun would set, for jobs.find."""
    host, _, port = process.coordinator.rpartition(":")
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(process.num_processes),
        "RANK": str(process.index),
        "LOCAL_RANK": str(process.local_index),
        "LOCAL_WORLD_SIZE": str(process.num_local_processes),
    }


def _die_with_parent(launcher: int, prctl: Any) -> None:
    """In a child: when the launcher is gone, however it went, the kernel ends this process."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # gone before we asked
        os._exit(cli.EXIT_INTERNAL_ERROR)


def _wait_for_exit(
    children: dict[int, subprocess.Popen],
    stderr_mux: "StderrMultiplexer",
    signals: _SignalForwarder,
) -> int | None:
    """The process that failed, or None when all are done, or are to be killed."""
    while True:
        if signals.second_signal is not None:
            return None
        codes = {index: signals.exit_code(child) for index, child in children.items()}
        if any(codes.values()):
            break
        if None not in codes.values():
            return None
        stderr_mux.print_lines(min_age_s=PEER_LINE_DELAY_S)
        time.sleep(_POLL_S)
    _wait_for_all(children, PEER_LINE_DELAY_S)
    failed = [index for index, code in codes.items() if code]
    # JAX aborts a process when another one is gone, and sometimes both are found at once
    failed += [
        index
        for index, child in children.items()
        if signals.exit_code(child) and index not in failed
    ]
    return next(
        (index for index in failed if children[index].returncode != -signal.SIGABRT), failed[0]
    )


def _kill_all(children: dict[int, subprocess.Popen]) -> None:
    _send_signal(children, signal.SIGKILL)
    for child in children.values():
        child.wait()


def _wait_for_all(children: dict[int, subprocess.Popen], seconds: float) -> bool:
    """Whether all end within so many seconds."""
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children.values()):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _send_signal(children: dict[int, subprocess.Popen], number: signal.Signals) -> None:
    for child in children.values():
        child.send_signal(number)  # does nothing where the child has ended


class StderrMultiplexer:
    """What the processes say on stderr: that of process 0 at once and untouched, lines of the others under their number.

    A mistake that all of them find is so said once, and one that only one of them finds is not lost.
    """

    def __init__(self, children: dict[int, subprocess.Popen]):
        self._lines: queue.SimpleQueue[tuple[float, int, str]] = queue.SimpleQueue()
        self._first_printed_by: dict[str, int] = {}
        """Who said a line first."""
        self._pending: list[tuple[float, int, str]] = []
        self._readers = [
            threading.Thread(
                target=self._read_stderr, args=(index, child.stderr.fileno()), daemon=True
            )
            for index, child in children.items()
            if child.stderr is not None
        ]
        for reader in self._readers:
            reader.start()

    def print_lines(self, *, min_age_s: float) -> None:
        """Says what the others said so many seconds ago and nobody said before."""
        while not self._lines.empty():
            self._pending.append(self._lines.get())
        now = time.monotonic()
        while self._pending and now - self._pending[0][0] >= min_age_s:
            _, index, line = self._pending.pop(0)
            if self._first_printed_by.setdefault(line, index) == index:
                with distributed.ignore_broken_pipe():
                    print(f"{distributed.line_prefix(index)}{line}", file=sys.stderr, flush=True)

    def close(self, *, failed: int | None) -> None:
        """Says what is left after all have ended, but of the others than `failed` not, in 30 lines, that JAX missed one."""
        for reader in self._readers:
            reader.join(PEER_LINE_DELAY_S)  # what they started may still hold the other end
        self.print_lines(min_age_s=math.inf)
        heard, self._pending, missed = self._pending, [], set[int]()
        for line in heard:
            if failed not in (None, line[1]) and _reports_lost_peer(line[2]):
                missed.add(line[1])
            if line[1] not in missed:
                self._pending.append(line)
        self.print_lines(min_age_s=0)

    def _read_stderr(self, index: int, stderr: int) -> None:
        rest = b""
        while data := os.read(stderr, 2**16):
            if index == 0:
                with distributed.ignore_broken_pipe():
                    sys.stderr.buffer.write(data)
                    sys.stderr.flush()
            *lines, rest = (rest + data).split(b"\n")
            self._queue_lines(index, lines)
        self._queue_lines(index, [rest] if rest else [])

    def _queue_lines(self, index: int, lines: list[bytes]) -> None:
        for line in lines:
            # of a progress bar, how it ended
            text = (
                line.rpartition(b"\r")[2]
                .decode(errors="replace")
                .removeprefix(distributed.line_prefix(index))
            )
            if index == 0:
                self._first_printed_by[text] = 0
            else:
                self._lines.put((time.monotonic(), index, text))


def _reports_lost_peer(line: str) -> bool:
    return any(words in line for words in _LOST_PEER_PHRASES)


if __name__ == "__main__":
    cli.run_command(main)
