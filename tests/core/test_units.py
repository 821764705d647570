"""Bytes and durations as text."""

from datetime import timedelta

import pytest

from jaxsp.core import units
from jaxsp.core.units import GIB, MIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (100_000, "97.7 KiB"),
        (8.7 * MIB, "8.7 MiB"),
        (0.1 * GIB, "0.1 GiB"),
        (1200 * GIB, "1,200 GiB"),
    ],
)
def test_bytes_have_the_unit_in_which_they_are_short(num_bytes, text):
    assert format_bytes(num_bytes) == text


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
    assert units.format_seconds(seconds) == words


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("25s", timedelta(seconds=25)),
        ("0.6s", timedelta(milliseconds=600)),
        ("110m", timedelta(minutes=110)),
        ("1.5h", timedelta(minutes=90)),
        ("12h", timedelta(hours=12)),
        ("0s", timedelta()),
    ],
)
def test_a_duration_is_a_number_with_a_unit(text, duration):
    assert units.parse_duration(text) == duration
    assert units.parse_duration(duration) == duration


@pytest.mark.parametrize(
    "value", [25, 2.5, None, "", "25", "s", "25 s", "-1s", "1d", "1e3s", ".5h", "1234567890s", "٣s"]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"unit.*25s"):
        units.parse_duration(value)


@pytest.mark.parametrize("text", ["0s", "0.6s", "0.001s", "25s", "110m", "2h", "36h", "1234567s"])
def test_the_text_of_a_duration_uses_the_largest_whole_unit(text):
    assert units.format_duration(units.parse_duration(text)) == text
