"""CPU time and memory limits for untrusted input: chat templates, patterns and tokenizers.

Time is CPU time, so that a busy or suspended machine changes no result.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxsp.core.units import GIB

_REPEAT_S = 0.1
"""CPU time after which LimitError is raised again: Jinja catches errors of constants, and Python
those of finalizers and garbage collection callbacks."""

_POLL_INTERVAL_S = 0.2


class LimitError(Exception):
    """Untrusted input exceeded its time limit."""


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raises LimitError in a block that computes longer. Has no effect outside the main thread.

    Interrupts Python and regular expressions, but no other library.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()
    is_active = True

    def check(*_: object) -> None:
        # the timer counts all threads
        if is_active and time.thread_time() - start > seconds:
            raise LimitError(f"takes more than {seconds:.0f} s")

    def report_lost(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, LimitError):
            old_hook(lost)

    old_hook = sys.unraisablehook
    sys.unraisablehook = report_lost
    old_handler = signal.signal(signal.SIGVTALRM, check)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
            yield
        finally:
            is_active = False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old_handler)
        sys.unraisablehook = old_hook


@contextlib.contextmanager
def limit_memory(num_bytes: int) -> Iterator[None]:
    """Raises MemoryError in a block that allocates more; no other thread may need more meanwhile.

    Without it, the system kills the process, or another one. Libraries that abort when memory
    runs out need `watch_native`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _read_memory(0)
    if used:
        limits = [used + num_bytes, *(x for x in (soft, hard) if x != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def watch_native(
    *, seconds: float, num_bytes: int, end_process: Callable[[str], None]
) -> Iterator[None]:
    """Limits a block of native code, which no exception can interrupt.

    Args:
        seconds: CPU time of all threads of this process.
        num_bytes: memory in addition to that at the start.
        end_process: called from another thread, with the limit that the block exceeds.
    """
    is_done = threading.Event()
    start_time = time.process_time()
    start_memory = _read_memory(1)

    def watch() -> None:
        while not is_done.wait(_POLL_INTERVAL_S):
            if time.process_time() - start_time > seconds:
                return end_process(f"takes more than {seconds:,.0f} s")
            if _read_memory(1) - start_memory > num_bytes:
                return end_process(f"takes more than {num_bytes / GIB:.1f} GiB of memory")

    thread = threading.Thread(target=watch, name="limits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextlib.contextmanager
def convert_panics() -> Iterator[None]:
    """Raises RuntimeError for a panic of a Rust library, which `except Exception` would not catch.

    Its class is not public.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None


def _read_memory(column: int) -> int:
    """Bytes of this process; 0 where there is no /proc (macOS), so that memory has no limit.

    Args: column: 0: address space, 1: resident.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
