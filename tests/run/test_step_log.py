"""Times of steps and of waits for checkpoints; progress on a terminal and in a log."""

import io
import re
import time

import pytest
import rich.console

from jaxsp.run import console as output
from jaxsp.run import step_log
from jaxsp.run.console import Progress
from jaxsp.run.step_log import DispatchedStep
from jaxsp.system import distributed
from tests import messages


class Result:
    def __init__(self, is_ready=True, wait_s=0.0):
        self.is_ready = lambda: is_ready
        self.wait_s = wait_s

    def block_until_ready(self):
        time.sleep(self.wait_s)
        return self


def test_a_step_ends_when_all_its_results_are_ready_not_when_they_are_read():
    began = time.perf_counter()
    step = DispatchedStep(Result(wait_s=0.05), None, began, began)
    time.sleep(0.3)
    assert 0.05 <= step.wait_for_end() - began < 0.25
    for flags in ([True, True], [True, False]):
        step = DispatchedStep([*map(Result, flags)], None, 0.0, 0.0)
        assert step.is_over == all(flags)


@pytest.mark.parametrize(
    ("ended", "next_ended", "split"),
    [
        (104.0, 108.0, 104.0),
        (106.0, 107.0, 106.0),
        # A thread that was late, and then both threads
        (108.0, 108.000001, 104.0),
        (108.3, 108.0, 104.15),
        (100.0, 100.0, 100.0),
    ],
)
def test_two_steps_whose_ends_are_seen_together_share_the_time(ended, next_ended, split):
    """The second had 1e-6 s and 127 million tokens/s."""
    assert step_log.split_time(100.0, ended, next_ended=next_ended) == pytest.approx(split)


def metrics_line(step, **fields):
    """Returns the fields of a line of metrics.jsonl that progress shows."""
    shown = {
        "loss": 6.26143,
        "learning_rate": 1.2e-5,
        "grad_norm": 0.844,
        "tokens_per_s": 3222.4,
        "device_peak_gib": None,
    }
    return shown | fields | {"step": step}


def show_steps(
    monkeypatch,
    *lines,
    terminal=False,
    seconds_per_step=30.0,
    width=120,
    num_steps=400,
    first_step=17,
):
    """Returns the output for finished steps of a run that resumed after `first_step`."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "perf_counter", lambda: now[0])
    file = io.StringIO()
    console = rich.console.Console(
        file=file, force_terminal=terminal, width=width, color_system=None, markup=False
    )
    progress = Progress(console, first_step=first_step, num_steps=num_steps)
    with progress:
        for line in lines:
            now[0] += seconds_per_step
            progress.show_step(line)
    return file.getvalue()


def test_log_line_has_the_time_and_the_numbers_of_its_step(monkeypatch):
    first = metrics_line(18, loss=None, grad_norm=None)
    printed = show_steps(monkeypatch, first, metrics_line(19)).splitlines()
    assert len(printed) == 2
    assert re.search(messages.containing("none", "1.2e-05", "none"), printed[0])
    assert "left" not in printed[0], "the first step takes longer than the others"
    numbers = ("19/400", "6.2614", "1.2e-05", "0.844", "3,222", "1 min 0 s", "3 h 10 min")
    assert re.match(r"\d\d:\d\d:\d\d.*" + messages.containing(*numbers), printed[1])
    assert len(printed[1]) <= 120


def test_log_lines_are_at_least_ten_seconds_apart_except_for_the_first_and_last(monkeypatch):
    lines = [metrics_line(step) for step in range(18, 31)]
    printed = show_steps(monkeypatch, *lines, seconds_per_step=4.0, num_steps=30)
    assert re.findall(r"(\d+)/30", printed) == ["18", "21", "24", "27", "30"]


@pytest.mark.parametrize("width", [90, 130])
def test_bar_shows_memory_learning_rate_and_the_time_left(monkeypatch, width):
    line = metrics_line(18, device_peak_gib=61.53)
    lines = [metrics_line(17), line]  # the first step does not count for the time left
    printed = show_steps(monkeypatch, *lines, terminal=True, width=width, first_step=16)
    drawn = re.findall(r"18/400 [^\r\n\x1b]*", printed)[-1].rstrip()
    numbers = ("6.2614", "1.2e-05", "3,222", "61.5 GiB", "left 3 h 11 min")
    assert re.search(messages.containing(*numbers), drawn)
    assert len(drawn) <= width


def test_message_on_a_terminal_replaces_the_line_of_the_bar(monkeypatch):
    written = []
    monkeypatch.setattr(distributed.os, "write", lambda _, data: written.append(data))
    for is_terminal in (True, False):
        monkeypatch.setattr(
            distributed.os, "isatty", lambda _, is_terminal=is_terminal: is_terminal
        )
        distributed.log("stopping")
    assert written == [b"\r\x1b[2Kstopping\n", b"stopping\n"]
