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
    ("schedule", "options", "after_warmup"),
    [
        ("constant", {}, [8, 8, 8, 8, 8]),
        ("linear", {}, [8, 6, 4, 2, 0]),
        ("linear", {"min_learning_rate_fraction": 0.1}, [8, 6.2, 4.4, 2.6, 0.8]),
        ("cosine", {}, [8, 4 + 2 * 2**0.5, 4, 4 - 2 * 2**0.5, 0]),
        (
            "cosine",
            {"min_learning_rate_fraction": 0.1},
            [0.8 + 7.2 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)],
        ),
        (
            "wsd",
            {"min_learning_rate_fraction": 0.1, "decay_steps": 2},
            [8, 8, 8, 8 - 7.2 * 0.5**0.5, 0.8],
        ),
        ("wsd", {"decay_steps": 4}, [8 * (1 - math.sqrt(step / 4)) for step in range(5)]),
        ("wsd", {"decay_steps": 4, "decay_shape": "linear"}, [8, 6, 4, 2, 0]),
        ("wsd", {"decay_steps": 2, "decay_shape": "cosine"}, [8, 8, 8, 4, 0]),
    ],
)
def test_learning_rates(schedule, options, after_warmup):
    assert rates(4, schedule, **options) == pytest.approx(after_warmup, abs=1e-5)
    with_warmup = [2, 4, 6, 8, *after_warmup]
    for fields in ({"warmup_steps": 4}, {"warmup_fraction": 0.5}):
        assert rates(8, schedule, **fields, **options) == pytest.approx(with_warmup, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "num_steps", "num_decay_steps"),
    [
        ({}, 100, 20),
        ({"decay_fraction": 0.07}, 100, 7),
        ({"decay_fraction": 0.1}, 101, 11),
        ({"decay_steps": 30}, 100, 30),
        ({"decay_steps": 30, "warmup_steps": 4}, 10, 6),
        ({"decay_fraction": 1.0, "warmup_fraction": 0.5}, 10, 5),
        ({"warmup_steps": 10}, 5, 1),
    ],
    ids=str,
)
def test_number_of_decay_steps(options, num_steps, num_decay_steps):
    """A decay that does not fit begins at the end of the warmup."""
    own = {name: value for name, value in options.items() if name.startswith("decay")}
    warmup = {name: value for name, value in options.items() if name not in own}
    config = batches.make_config(schedule={"type": "wsd", **own}, **warmup).optimizer
    num_warmup_steps = config.num_warmup_steps(num_steps)
    assert config.schedule.num_decay_steps(num_steps, num_warmup_steps) == num_decay_steps
    assert min(rates(num_steps, schedule="wsd", **options)) >= 0


def test_inverse_sqrt_falls_from_the_end_of_the_warmup():
    """Equation 3 of arXiv:1706.03762, with the peak as its scale."""
    actual = rates(40, schedule="inverse_sqrt", warmup_steps=4)
    expected = [8 * 2 * min(step**-0.5, step * 4**-1.5) for step in range(1, 42)]
    assert actual == pytest.approx(expected, rel=1e-5)
    assert actual[3] == max(actual) == 8


@pytest.mark.parametrize(
    ("fraction", "num_steps", "num_warmup_steps"),
    [(0, 100, 0), (0.03, 100, 3), (0.03, 101, 4), (0.07, 100, 7), (0.5, 1, 1), (1e-9, 10**6, 1)],
)
def test_number_of_warmup_steps(fraction, num_steps, num_warmup_steps):
    config = batches.make_config(warmup_fraction=fraction).optimizer
    assert config.num_warmup_steps(num_steps) == num_warmup_steps
