"""Signals that ask a run to stop."""

import signal
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A process gets SIGHUP when its terminal or ssh session closes."""

SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: a terminal sends one to mpirun or torchrun and to their
processes, and they forward it."""


def install(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Sets the handler of all stop signals. Returns: the handlers before.

    Ignored signals stay ignored: shells start background jobs with SIGINT ignored, and nohup starts
    commands with SIGHUP ignored.
    """
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def restore(handlers: dict[signal.Signals, Any]) -> None:
    """Sets the handlers that `install` has replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def is_second(number: int, *, first_time_s: float) -> bool:
    """True if a signal, after a first one (time.monotonic), asks to end immediately.

    SIGHUP does not: a terminal that closes may send several.
    """
    return number != signal.SIGHUP and time.monotonic() - first_time_s > SAME_SIGNAL_S
