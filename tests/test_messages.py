"""messages.holding finds what a message must have, and nothing like it."""

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
    assert bool(re.search(messages.holding(*parts), text)) == is_found
