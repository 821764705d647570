"""Count of results, and the time left."""

import pytest

from jaxsp.planner.progress import Progress


@pytest.fixture
def clock():
    """A clock that a test sets, in seconds."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def count(progress, clock, *seconds):
    """The progress text after each result, for durations in seconds."""
    texts = []
    for duration in seconds:
        clock.now += duration
        texts.append(progress.advance())
    return texts


def test_the_time_left_is_the_mean_time_of_a_result_times_the_missing_ones(clock):
    texts = count(Progress(4, clock=clock), clock, 60.0, 20.0, 40.0, 40.0)
    assert texts == [
        "1 of 4, about 3 min 0 s left",
        "2 of 4, about 1 min 20 s left",
        "3 of 4, about 40 s left",
        "4 of 4",
    ]


def test_results_that_are_refused_at_once_do_not_shorten_the_time_left(clock):
    texts = count(Progress(5, clock=clock), clock, 0.01, 30.0, 0.01, 30.0)
    assert texts == [
        "1 of 5",
        "2 of 5, about 1 min 30 s left",
        "3 of 5, about 1 min 0 s left",
        "4 of 5, about 30 s left",
    ]
