"""The count of results, and the time left."""

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


def counted(progress_, clock, *seconds):
    """The progress text after each result, for durations in seconds."""
    words = []
    for each in seconds:
        clock.now += each
        words.append(progress_.advance())
    return words


def test_the_time_left_is_the_mean_time_of_a_result_times_those_that_are_missing(clock):
    words = counted(Progress(4, clock=clock), clock, 60.0, 20.0, 40.0, 40.0)
    assert words == [
        "1 of 4, about 3 min 0 s left",
        "2 of 4, about 1 min 20 s left",
        "3 of 4, about 40 s left",
        "4 of 4",
    ]


def test_results_that_are_refused_at_once_do_not_make_the_others_look_quick(clock):
    words = counted(Progress(5, clock=clock), clock, 0.01, 30.0, 0.01, 30.0)
    assert words == [
        "1 of 5",
        "2 of 5, about 1 min 30 s left",
        "3 of 5, about 1 min 0 s left",
        "4 of 5, about 30 s left",
    ]


def test_a_search_that_takes_longer_than_usual_is_not_said_to_be_over(clock):
    words = counted(Progress(2, is_exact=False, clock=clock), clock, 10.0, 10.0, 10.0)
    assert [word.partition(",")[0] for word in words] == [
        "1 of about 2",
        "2 of about 3",
        "3 of about 4",
    ]
    assert all(word.endswith("about 10 s left") for word in words)
