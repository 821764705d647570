"""Signals that ask a run to stop."""

import signal
import time

import pytest

from jaxsp.processes import stop_signals


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", stop_signals.SIGNALS)
def test_signals_that_nohup_or_a_shell_ignores_stay_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        handlers = stop_signals.install(lambda *_: None)
        assert {*handlers} == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} - {number}
        assert signal.getsignal(number) is signal.SIG_IGN
        stop_signals.restore(handlers)
        assert [signal.getsignal(other) for other in handlers] == [*handlers.values()]
    finally:
        signal.signal(number, before)


def test_a_second_signal_ends_immediately_unless_a_terminal_closes():
    now = time.monotonic()
    assert stop_signals.is_second(signal.SIGTERM, first_time_s=now - 2)
    assert not stop_signals.is_second(signal.SIGTERM, first_time_s=now)
    assert not stop_signals.is_second(signal.SIGHUP, first_time_s=now - 2)
