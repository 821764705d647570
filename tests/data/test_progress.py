"""Tests of progress bars: shown on a terminal, and never in a log."""

import sys

import datasets
import pytest

from jaxsp.data import sources


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bars_are_hidden_without_a_terminal(monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    datasets.enable_progress_bars()
    with sources.hide_progress_without_terminal():
        assert datasets.are_progress_bars_disabled() == (not is_terminal)
    assert not datasets.are_progress_bars_disabled()


def test_progress_bars_that_the_user_disabled_stay_disabled(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    datasets.disable_progress_bars()
    try:
        with sources.hide_progress_without_terminal():
            assert datasets.are_progress_bars_disabled()
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()
