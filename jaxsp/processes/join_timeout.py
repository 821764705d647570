"""Time limit for the processes of a job to find each other."""

import os
import sys
import threading

from jaxsp.processes.cluster import Process


def start(process: Process, joined: threading.Event, timeout_s: float) -> None:
    """Ends this process with exit code 1 if `joined` is not set in time.

    Needs a thread: JAX aborts the process at the end of its own time limit, and no exception can be
    caught.
    """
    arguments = (process, joined, timeout_s)
    threading.Thread(target=_limit_join_time, args=arguments, daemon=True).start()


def _limit_join_time(process: Process, joined: threading.Event, timeout_s: float) -> None:
    """Prints which processes are missing after an eighth of the time; ends this one after all."""
    name = f"process {process.index} of {process.num_processes}"
    missing = f"process 0 at {process.coordinator}"
    if process.index == 0:
        others = "process 1"
        if process.num_processes > 2:
            others = f"processes 1 to {process.num_processes - 1}"
        missing = f"{others} at {process.coordinator}"
    if joined.wait(timeout_s / 8):
        return
    print(f"{name}: waiting for {missing}, at most {timeout_s:g} s", file=sys.stderr, flush=True)
    if joined.wait(timeout_s * 7 / 8):
        return
    print(
        f"{name}: waited {timeout_s:g} s for {missing}. "
        f"All {process.num_processes} processes must start within that time, with the same "
        "coordinator, and every node must be able to reach its port.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
