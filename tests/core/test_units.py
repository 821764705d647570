"""Bytes as text."""

import pytest

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
