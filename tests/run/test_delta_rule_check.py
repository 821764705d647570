"""The self-check of delta nets passes a correct rule and refuses wrong ones."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxsp.blocks.block_config import DeltaNetConfig
from jaxsp.blocks.config import DELTA_NET, LayerConfig
from jaxsp.core.errors import UserError
from jaxsp.delta_rule import chunk, delta_rule, stitching
from jaxsp.run import selfcheck
from jaxsp.run.delta_rule_check import TOLERANCES, DeltaRuleCheck
from tests import batches, messages
from tests.training import runs

SIZES = DeltaNetConfig(num_key_heads=4, num_heads=8, key_size=16, value_size=8, filter_size=4)
MODEL = dataclasses.replace(
    batches.model(),
    layers=2 * (LayerConfig(rope=None, mixer=DELTA_NET),),
    delta_net=SIZES,
)


@pytest.mark.parametrize("strength_scale", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_correct_rule_has_at_most_half_the_tolerated_error(dtype, strength_scale):
    sizes = dataclasses.replace(SIZES, strength_scale=strength_scale)
    check = DeltaRuleCheck.of_model(sizes, jnp.dtype(dtype))
    actual = check.measure_errors(jax.devices()[0])
    assert max(actual.values()) < check.tolerance / 2


def carry_states_over(monkeypatch):
    """The first token of a segment finds the state of the segment before."""
    expected = chunk.compute_decays
    monkeypatch.setattr(
        chunk,
        "compute_decays",
        lambda tokens: expected(tokens._replace(is_first=jnp.zeros_like(tokens.is_first))),
    )


def lose_states_between_sections(monkeypatch):
    monkeypatch.setattr(
        stitching, "stitch", lambda maps, spans, is_reversed=False: jnp.zeros_like(maps.u)
    )


def use_other_key_heads(monkeypatch):
    expected = delta_rule.compute
    monkeypatch.setattr(
        delta_rule, "compute", lambda q, k, *x, **spans: expected(q, k[:, :, ::-1], *x, **spans)
    )


def drop_gradients_of_decays(monkeypatch):
    expected = delta_rule.compute
    monkeypatch.setattr(
        delta_rule,
        "compute",
        lambda q, k, v, g, *x, **spans: expected(q, k, v, jax.lax.stop_gradient(g), *x, **spans),
    )


def return_nan(monkeypatch):
    expected = delta_rule.compute
    monkeypatch.setattr(
        delta_rule, "compute", lambda *x, **spans: expected(*x, **spans).at[0, 2, 0, 0].set(jnp.nan)
    )


DEFAULT = (carry_states_over, drop_gradients_of_decays)


@pytest.mark.parametrize(
    ("wrong", "results"),
    [
        pytest.param(wrong, results, marks=[] if wrong in DEFAULT else [pytest.mark.slow])
        for wrong, results in {
            carry_states_over: {"out", "dq", "dk", "dv", "dg", "dbeta"},
            lose_states_between_sections: {"out", "dq", "dk", "dv", "dg", "dbeta"},
            use_other_key_heads: {"out", "dq", "dk", "dv", "dg", "dbeta"},
            drop_gradients_of_decays: {"dg"},
            return_nan: {"out"},
        }.items()
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_rule_is_refused(monkeypatch, wrong, results):
    wrong(monkeypatch)
    spec = runs.make_spec({}, model=MODEL, sizes=(1, 1, 1), compute_dtype="bfloat16")
    with pytest.raises(UserError, match=r"^delta net: ") as caught:
        selfcheck.check_delta_nets(spec, jax.devices()[0])
    (problem,) = caught.value.problems
    words = problem.partition("relative error of ")[2].partition(";")[0].split(", ")
    errors = {word.split()[0]: float(word.split()[1]) for word in words}
    assert results <= errors.keys()
    assert min(errors[name] for name in results) > 5 * TOLERANCES["bfloat16"]
    messages.assert_names(problem, jax.__version__, "model.compute_dtype=float32")
