"""Losses, gradient norms and trained weights of short runs are those that were recorded.

`python -m tests.golden COMMIT` compares them bit for bit with another commit.
"""

import json
import pathlib

import jax
import pytest

from tests.golden import __main__ as golden
from tests.golden import cases

RECORDED_JAX = "0.10.1"

TOLERANCE = 1e-6
"""Relative. Processors differ in the order of sums; on one machine the values are equal."""


@pytest.fixture(scope="module")
def recorded():
    return json.loads(golden.VALUES.read_text(encoding="utf-8"))


@pytest.mark.skipif(jax.__version__ != RECORDED_JAX, reason=f"recorded with jax {RECORDED_JAX}")
@pytest.mark.parametrize("name", [name for name in cases.CASES if name not in cases.NEEDS_JAX])
def test_numbers_are_those_that_were_recorded(name, recorded, tmp_path: pathlib.Path):
    numbers = cases.run_case(name, tmp_path)
    for kind in ("loss", "grad_norm", "weights"):
        before = recorded[name][kind]
        values = numbers[kind]
        if kind == "weights":
            assert list(values) == list(before)
            before, values = [*before.values()], [*values.values()]
        assert golden.max_difference(before, values) <= TOLERANCE, kind


def test_a_changed_number_is_a_difference(recorded):
    changed = {**recorded, "dense": {**recorded["dense"], "loss": [1.0, 1.0, 1.0]}}
    assert [*golden.compare(recorded, recorded)] == []
    [difference] = golden.compare(recorded, changed)
    assert difference.startswith("dense: loss differs by")
