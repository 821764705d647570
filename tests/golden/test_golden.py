"""Losses, gradient norms and trained weights of short runs are those that were recorded.

`python -m tests.golden COMMIT` compares them bit for bit with another commit.
"""

import json

import jax
import pytest

from tests.golden import __main__ as golden
from tests.golden import cases

RECORDED_JAX = "0.10.1"

TOLERANCE = 1e-6
"""Relative. On one machine the values are equal."""

OTHER_PROCESSOR_TOLERANCE = 5e-4
ROUNDED_CASES = ("FP8", "replicas, muon")
ROUNDED_TOLERANCE = 5e-3
"""The same for processors with other instructions, which add in another order, and for cases that
round to few bits, where a sum that differs in the last bit may be rounded to the next number. Seen
between three processors: 1.9e-3 for the gradient norm of FP8, 7e-4 for Muon's, 2.5e-5 for others.
"""

NAMES = [name for name in cases.CASES if name not in cases.NEEDS_JAX]


def read_recorded() -> golden.Results:
    return json.loads(golden.VALUES.read_text(encoding="utf-8"))["cases"]


def choose_tolerance(name: str) -> float:
    """Args: name: of the case."""
    processor = json.loads(golden.VALUES.read_text(encoding="utf-8"))["processor"]
    if golden.describe_processor() == processor:
        return TOLERANCE
    return ROUNDED_TOLERANCE if name in ROUNDED_CASES else OTHER_PROCESSOR_TOLERANCE


@pytest.fixture(scope="module")
def numbers() -> golden.Results:
    """Numbers of all cases, computed in a process without checks of shapes."""
    return golden.run_checkout(golden.REPO, ["cases.py", *NAMES])


@pytest.mark.e2e
@pytest.mark.skipif(jax.__version__ != RECORDED_JAX, reason=f"recorded with jax {RECORDED_JAX}")
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_that_were_recorded(name, numbers):
    for kind, before in read_recorded()[name].items():
        after = numbers[name][kind]
        if kind == "weights":
            assert list(after) == list(before)
            before, after = [*before.values()], [*after.values()]
        assert golden.max_difference(before, after) <= choose_tolerance(name), kind


def test_a_changed_number_is_a_difference():
    recorded = read_recorded()
    changed = {**recorded, "dense": {**recorded["dense"], "loss": [1.0, 1.0, 1.0]}}
    assert [*golden.compare(recorded, recorded)] == []
    [difference] = golden.compare(recorded, changed)
    assert difference.startswith("dense: loss differs by")
