"""messages.containing finds what a message must have, and nothing like it."""

import re

import pytest

from tests import messages


@pytest.mark.parametrize(
    ("parts", "text", "is_found"),
    [
        (["run.steps = 0", 1], "run.steps = 0: must be at least 1. Use 1.", True),
        (["run.steps = 0", 2], "run.steps = 0: must be at least 1. Use 1.", False),
        (["run.steps = 0"], "run.steps = 05", False),
        (["run_steps = 0"], "run.steps = 0", False),
        ([1, "run.steps"], "run.steps = 0: must be at least 1", False),
        ([4], "14, 40, 4.5, 0.4, 4,000 and 1,004", False),
        ([4, "0.5 s"], "of 4, in 0.5 s.", True),
        (["first", "second"], "first\nsecond", False),
    ],
)
def test_parts_are_found_in_their_order_and_whole(parts, text, is_found):
    assert bool(re.search(messages.containing(*parts), text)) == is_found


@pytest.mark.parametrize(
    ("parts", "start", "is_found"),
    [
        (["8", "2 or 4", "list"], "mesh.seq = 6: ", True),
        (["128"], "mesh.seq = 6: ", False),
        (["6"], "mesh.seq = 6: ", False),
        (["2"], "mesh.seq = ", True),
        (["lis"], "", False),
        (["USE"], "", True),
        ([], "mesh.data = 6: ", False),
    ],
)
def test_names_are_found_in_any_order_and_whole(parts, start, is_found):
    text = "mesh.seq = 6: must be in the list\nof divisors of 8 or 1,128. Use 2 or 4."
    if is_found:
        messages.assert_names(text, *parts, start=start)
    else:
        with pytest.raises(AssertionError):
            messages.assert_names(text, *parts, start=start)


def test_numbers_are_those_of_a_text_in_order():
    text = "data.train.1: 1,024 tokens, 55.00 % of 8 rows, float32, in 2."
    assert messages.numbers(text) == [1024, 55, 8, 2]
