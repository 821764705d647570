"""Durations in output."""

import pytest

from jaxsp.core import durations


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.7264, "0.726 s"),
        (39.22, "39.2 s"),
        (59.7, "1 min 0 s"),
        (119.4, "1 min 59 s"),
        (250.2, "4 min 10 s"),
        (3599.7, "1 h 0 min"),
        (4320.0, "1 h 12 min"),
        (36_000_000.0, "10,000 h 0 min"),
    ],
)
def test_durations_are_in_units_that_people_read(seconds, words):
    assert durations.describe(seconds) == words
