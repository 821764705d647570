"""Learning rates of each schedule, against closed forms."""

import math

import jax
import jax.numpy as jnp
import pytest

from tests import batches


def rates(num_steps, schedule, warmup_steps=0, warmup_fraction=None, **options):
    """Learning rates of all steps, and of one after the last. The peak is 8."""
    fields = {"warmup_steps": warmup_steps, "warmup_fraction": warmup_fraction}
    fields["schedule"] = {"type": schedule, **options}
    rate = jax.jit(batches.make_config(learning_rate=8, **fields).optimizer.make_rate(num_steps))
    return [float(rate(jnp.int32(step))) for step in range(num_steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "after_warmup"),
    [
        ("constant", [8, 8, 8, 8, 8]),
        ("linear", [8, 6, 4, 2, 0]),
        ("cosine", [8, 4 + 2 * 2**0.5, 4, 4 - 2 * 2**0.5, 0]),
    ],
)
def test_learning_rates(schedule, after_warmup):
    expected = [2, 4, 6, 8, *after_warmup]
    assert rates(8, schedule=schedule, warmup_steps=4) == pytest.approx(expected, abs=1e-5)
    assert rates(4, schedule=schedule) == pytest.approx(after_warmup, abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        ("sqrt", lambda x: 1 - math.sqrt(x)),
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
    ],
)
def test_wsd_is_stable_and_decays_in_the_last_steps_of_the_run(shape, decay):
    """A longer run is stable for longer, and has the same rates until the shorter one decays."""
    options = {"schedule": "wsd", "decay_shape": shape, "warmup_steps": 2, "decay_steps": 4}
    for num_steps in (10, 20):
        actual = rates(num_steps, **options)
        expected = [4, *[8] * (num_steps - 5), *(8 * decay(x / 4) for x in range(5))]
        assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("fraction", "num_steps", "num_warmup_steps"),
    [(0, 100, 0), (0.03, 100, 3), (0.03, 101, 4), (0.07, 100, 7), (0.5, 1, 1), (1e-9, 10**6, 1)],
)
def test_warmup_as_a_fraction_equals_warmup_in_steps(fraction, num_steps, num_warmup_steps):
    as_fraction, as_steps = (
        batches.make_config(learning_rate=8, **{f"warmup_{name}": value}).optimizer.make_rate(
            num_steps
        )
        for name, value in [("fraction", fraction), ("steps", num_warmup_steps)]
    )
    steps = [jnp.int32(i) for i in (0, 1, num_warmup_steps, num_warmup_steps + 1)]
    assert [float(as_fraction(i)) for i in steps] == [float(as_steps(i)) for i in steps]
