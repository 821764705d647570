"""Experts in tiles equal a loop over all experts in float64, however tokens are distributed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.config import EXPERTS, ClampedGate, ExpertsConfig, LayerConfig
from jaxsp.blocks.experts import Experts
from jaxsp.experts import routing, tiled
from tests import batches

GPT_OSS = ExpertsConfig(
    num_experts=4, num_chosen=2, size=8, clamped_gate=ClampedGate(alpha=1.702, limit=7.0)
)

LAYERS = (LayerConfig(feed_forward=EXPERTS, rope=None),)

NUM_EXPERTS = 13
WIDTH = 24
SIZE = 16


def choose_experts(how: str, num_tokens: int, num_chosen: int) -> np.ndarray:
    """Numbers of different experts of each token."""
    rng = np.random.default_rng(0)
    odds = np.arange(1.0, NUM_EXPERTS + 1)
    if how == "some without tokens":
        odds[::3] = 0
    if how == "the same for all":
        return np.tile(np.arange(num_chosen), (num_tokens, 1))
    chances = odds / odds.sum()
    choose = lambda: rng.choice(NUM_EXPERTS, num_chosen, replace=False, p=chances)
    return np.stack([choose() for _ in range(num_tokens)])


def make_inputs(num_tokens: int, num_chosen: int) -> tuple[dict, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    weights = {
        "up": 0.3 * draw(NUM_EXPERTS, SIZE, WIDTH),
        "down": 0.3 * draw(NUM_EXPERTS, WIDTH, SIZE),
    }
    return weights, draw(num_tokens, WIDTH), rng.uniform(size=(num_tokens, num_chosen))


def run_block(x, weights):
    return weights["down"].multiply(jnp.tanh(weights["up"].multiply(x)))


def run_loop(weights, x, shares, experts):
    """Each expert on all tokens, in the dtype of the inputs."""
    out = jnp.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        share = jnp.sum(jnp.where(experts == expert, shares, 0), axis=1, keepdims=True)
        y = jnp.tanh(x @ weights["up"][expert].T) @ weights["down"][expert].T
        out += share * y
    return out


def differentiate(function, *inputs, experts):
    """Outputs, and gradients of their sum with different factors."""

    def total(weights, x, shares):
        out = function(weights, x, shares, experts)
        factors = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(out * factors), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return out, gradients


@pytest.mark.parametrize(
    ("how", "num_tokens", "num_chosen"),
    [
        ("more of the later ones", 203, 3),
        ("some without tokens", 203, 3),
        ("the same for all", 203, 3),
        ("more of the later ones", 1, 2),
        ("more of the later ones", 700, 1),
    ],
)
def test_values_and_gradients_equal_a_loop_in_float64(how, num_tokens, num_chosen):
    experts = jnp.asarray(choose_experts(how, num_tokens, num_chosen), jnp.int32)
    inputs = make_inputs(num_tokens, num_chosen)
    apply = lambda *inputs: tiled.apply(run_block, *inputs)
    to_dtype = lambda dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), inputs)
    actual = differentiate(apply, *to_dtype("float32"), experts=experts)
    again = differentiate(apply, *to_dtype("float32"), experts=experts)
    with jax.enable_x64(True):
        expected = differentiate(run_loop, *to_dtype("float64"), experts=experts)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert batches.relative_error(ours, theirs) < 1e-6
    for ours, others in zip(jax.tree.leaves(actual), jax.tree.leaves(again), strict=True):
        assert batches.is_bitwise_equal(ours, others)


@pytest.mark.parametrize("num_slots", [1, 16, 1000, 131072])
def test_tiles_suffice_for_every_distribution(num_slots):
    for num_experts in (1, 8, 128):
        tiles = tiled.choose_tiles(num_slots, num_experts)
        assert tiles.number % tiles.block == 0
        # As many experts as possible have a tile with one slot, and one expert has the others
        num_single = min(num_experts - 1, num_slots - 1)
        needed = num_single + -(-(num_slots - num_single) // tiles.size)
        assert tiles.number >= needed


def test_of_equal_probabilities_the_lowest_experts_are_chosen():
    shares, experts = routing.route(jnp.zeros((2, 5)), num_chosen=3, is_normalized=True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert np.allclose(shares, 1 / 3)


def test_gradients_are_whole_at_the_limit_of_gpt_oss():
    """Clamps of torch have whole gradients at the limit, those of jnp.clip half."""
    config = batches.model(experts=GPT_OSS, layers=LAYERS)
    module = Experts(config)
    limit = jnp.float32(GPT_OSS.clamped_gate.limit)
    for up in (limit, -limit):
        gate_gradient, up_gradient = jax.grad(module._join, argnums=(0, 1))(limit, up)
        assert up_gradient == limit * jax.nn.sigmoid(1.702 * limit)
        assert abs(gate_gradient - (up + 1)) < 1e-3
