"""Runs one command in each process of this node, and ends all processes when one fails."""

import ctypes
import functools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxsp.core import exit_codes
from jaxsp.processes import stop_signals
from jaxsp.processes.cluster import Process
from jaxsp.processes.stderr_mux import PEER_LINE_DELAY_S, StderrMultiplexer

_POLL_INTERVAL_S = 0.1
_PR_SET_PDEATHSIG = 1


class SignalForwarder:
    """Context in which the first SIGTERM, SIGINT or SIGHUP is forwarded to the child processes.

    The processes decide when to end. After a second signal, `run_processes` kills them.
    """

    def __init__(self) -> None:
        self.children: dict[int, subprocess.Popen] = {}
        """Running processes, by their index in the job."""
        self.first: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self._first_time_s = 0.0

    def __enter__(self) -> "SignalForwarder":
        self._old_handlers = stop_signals.install(self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        stop_signals.restore(self._old_handlers)

    def _handle_signal(self, number: int, _: Any) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
            self._first_time_s = time.monotonic()
            self.send(self.first)
        elif stop_signals.is_second(number, first_time_s=self._first_time_s):
            self.second = signal.Signals(number)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all child processes; those that have ended ignore it."""
        for child in self.children.values():
            child.send_signal(number)

    def poll_exit_codes(self) -> dict[int, int | None]:
        """Exit codes by process index; None for a process that is running.

        0 for a process killed by the first signal: it had no handler yet, so no work was lost.
        """
        codes = {index: child.poll() for index, child in self.children.items()}
        if self.first is not None:
            codes = {index: 0 if code == -self.first else code for index, code in codes.items()}
        return codes


def run_processes(
    command: Sequence[str], processes: Sequence[Process], signals: SignalForwarder
) -> bool:
    """Runs a command in each process of this node until all are done, or one has failed.

    Returns: True if a process hung, so that the command should be started again.
    Raises: SystemExit if one failed in another way.
    """
    signals.children = {process.index: _start(command, process) for process in processes}
    stderr = StderrMultiplexer(signals.children)
    if signals.first is not None:  # received while the processes were starting
        signals.send(signals.first)
    failed = _wait(signals, stderr)
    codes = {*signals.poll_exit_codes().values()}
    # The others wait for the failed process in a collective, where they cannot handle a SIGTERM
    signals.send(signal.SIGKILL)
    for child in signals.children.values():
        child.wait()
    stderr.close(failed=failed)
    if signals.second is not None:
        print(f"killed by a second {signals.second.name}", file=sys.stderr)
        sys.exit(128 + signals.second)
    if failed is None:
        return False
    code = signals.children[failed].returncode
    name = f"process {failed} of {processes[0].num_processes}"
    if len(processes) > 1 and codes == {code}:
        name = f"all {len(processes)} processes here"
    reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    others = ", and the others were ended" if None in codes else ""
    print(f"{name} failed: {reason}{others}", file=sys.stderr)
    if signals.first is None and exit_codes.HUNG in codes:
        return True
    sys.exit(code if code > 0 else 128 - code)


def _start(command: Sequence[str], process: Process) -> subprocess.Popen:
    """Starts a process with the variables that torchrun sets, which cluster.detect_process reads.

    Only process 0 reads from and prints to the terminal.
    """
    host, _, port = process.coordinator.rpartition(":")
    variables = {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(process.num_processes),
        "RANK": str(process.index),
        "LOCAL_RANK": str(process.local_index),
        "LOCAL_WORLD_SIZE": str(process.num_local_processes),
    }
    terminal = None if process.index == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        preexec_fn=functools.partial(_die_with_parent, os.getpid(), ctypes.CDLL(None).prctl),
    )


def _die_with_parent(launcher: int, prctl: Any) -> None:
    """Asks the kernel, in a child, to kill it when the launcher ends for any reason."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher ended before the call
        os._exit(exit_codes.INTERNAL_ERROR)


def _wait(signals: SignalForwarder, stderr: StderrMultiplexer) -> int | None:
    """Waits until all processes are done, one has failed, or they must be killed.

    After a failure, the others have PEER_LINE_DELAY_S to find the same error and to end.

    Returns: the index of the process that failed; None if none did.
    """
    failed: list[int] = []
    deadline_s = math.inf
    while True:
        codes = signals.poll_exit_codes()
        new = [index for index, code in codes.items() if code and index not in failed]
        if new and not failed:
            deadline_s = time.monotonic() + PEER_LINE_DELAY_S
        failed += new
        if signals.second is not None:
            return None
        if None not in codes.values() or time.monotonic() > deadline_s:
            break
        if not failed:
            stderr.print_lines(min_age_s=PEER_LINE_DELAY_S)
        time.sleep(_POLL_INTERVAL_S)
    # JAX aborts a process when another one is gone, sometimes before both are noticed here
    causes = [index for index in failed if codes[index] != -signal.SIGABRT]
    return next(iter([*causes, *failed]), None)
