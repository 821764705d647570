"""Foreign text takes limited time and memory."""

import gc
import re
import sys
import threading
import time

import pytest

from jaxsp.core import limits
from jaxsp.core.limits import LimitError


def loop():
    while True:
        pass


def loop_again():
    """Like Jinja, which catches errors of constants."""
    try:
        loop()
    except LimitError:
        loop()


@pytest.mark.parametrize(
    "compute",
    [loop, loop_again, lambda: re.fullmatch("([a-z.]+)*X", "layers.self.attn.q.proj.name")],
)
def test_python_and_patterns_are_interrupted_and_the_timer_ends(compute):
    with pytest.raises(LimitError, match="takes more than"), limits.limit_time(0.05):
        compute()
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass


class Finalized:
    def __del__(self):
        loop()


def collect_garbage():
    """Like jax, whose callback of the garbage collector may be where the time ends."""

    def wait(phase, _):
        loop() if phase == "stop" else None

    gc.callbacks.append(wait)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(wait)


@pytest.mark.parametrize("spend", [Finalized, collect_garbage])
def test_an_error_that_python_ignores_is_raised_again_without_a_warning(spend):
    def compute():
        spend()
        loop()

    with pytest.raises(LimitError), limits.limit_time(0.05):
        compute()


def test_other_errors_of_finalizers_are_reported(monkeypatch):
    class Broken:
        def __del__(self):
            raise ValueError("broken finalizer")

    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reports.append(str(lost.exc_value)))
    with limits.limit_time(10.0):
        Broken()
    assert reports == ["broken finalizer"]


def test_time_counts_this_thread_and_other_threads_have_no_limit():
    results = []

    def compute():
        with limits.limit_time(0.01):
            end = time.thread_time() + 0.1
            while time.thread_time() < end:
                pass
            results.append("done")

    thread = threading.Thread(target=compute)
    with limits.limit_time(0.1):
        thread.start()
        thread.join()
    assert results == ["done"]


def test_memory_is_limited_inside_the_block_only():
    with pytest.raises(MemoryError), limits.limit_memory(2**28):
        bytearray(2**29)
    assert len(bytearray(2**29)) == 2**29


class PanicException(BaseException):
    """Like that of Rust libraries, whose class is not public."""


def test_a_panic_becomes_an_exception_and_other_errors_stay():
    with pytest.raises(RuntimeError, match="retry"), limits.convert_panics():
        raise PanicException("retry limit")
    with pytest.raises(KeyboardInterrupt), limits.convert_panics():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "unit"), [(0.05, 2**40, "s"), (100.0, 2**24, "GiB")]
)
def test_native_code_ends_the_process(seconds, num_bytes, unit):
    reasons = []
    with limits.watch_native(seconds=seconds, num_bytes=num_bytes, end_process=reasons.append):
        kept = []
        while not reasons:
            kept.append(bytearray(b"x") * 2**12)
    (reason,) = reasons
    assert unit in reason.split()
