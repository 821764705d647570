"""Sizes of tiles, and gradients of functions that are applied to tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.model import tiling
from tests.unsharded import UnshardedGather


@pytest.mark.parametrize(
    ("num_tokens", "max_tile", "expected"),
    [
        (100, 8192, 8192),
        (16384, 8192, 8192),
        (28672, 8192, 7168),
        (609280, 8192, 7168),  # 8,192 would be padded, and 7,616 is not a multiple of 128
        (8320, 8192, 4160),  # 65 x 128; 1,664 is below half of 8,192
        (12000, 8192, 6000),  # no multiple of 128 divides it
        (8209, 8192, 8192),  # a prime is padded
    ],
)
def test_a_tile_divides_the_tokens_if_a_size_from_half_the_maximum_does(
    num_tokens, max_tile, expected
):
    tile = tiling.choose_dividing_tile(num_tokens, max_tile)
    assert tile == expected
    assert num_tokens <= max_tile or num_tokens % tile == 0 or num_tokens == 8209


@pytest.mark.parametrize(("max_bytes", "tile"), [(2 * 2**30, 7168), (2**29, 2048), (1, 1)])
def test_the_activations_of_a_tile_take_at_most_max_bytes(max_bytes, tile):
    """Llama-3.1-8B takes 253,952 bytes per token."""
    assert tiling.choose_tile(28672, bytes_per_token=253_952, max_bytes=max_bytes) == tile
    assert tile == 1 or 253_952 * tile <= max_bytes


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "max_bytes", "tile"),
    [
        (100, 128_256, 2**28, 100),
        (100_000, 128_256, 2**28, 500),  # 523 would fit; 500 divides them
        (100_000, 128_256, 2**30, 2000),  # 2,093 would fit
        (32, 128_256, 2**30, 32),
        (9, 10**9, 2**28, 1),
    ],
)
def test_the_logits_of_a_tile_take_at_most_max_bytes(num_tokens, vocab_size, max_bytes, tile):
    chosen = tiling.choose_tile(num_tokens, bytes_per_token=4 * vocab_size, max_bytes=max_bytes)
    assert min(num_tokens, chosen) == tile
    assert tile == 1 or 4 * tile * vocab_size <= max_bytes


@pytest.mark.parametrize("tile_tokens", [3, 5])
def test_gradients_of_equal_shapes_do_not_overwrite_each_other(tile_tokens):
    """Two inputs have the shape of the result, whose gradient only one of theirs can replace."""
    rng = np.random.default_rng(0)
    weight, a, b, dresult = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in [(4, 4), (2, 10, 4), (2, 10, 4), (2, 10, 4)]
    )

    def differentiate(tile_tokens):
        def run(weight, a, b):
            return tiling.apply_in_tiles(
                lambda weights: lambda a, b: jnp.tanh(a @ weights["w"]) * b**2 + a,
                {"w": Parameter(shape=(4, 4), hf_name="weight")},
                {"w": weight},
                (a, b),
                gather=UnshardedGather(),
                tile_tokens=tile_tokens,
            )

        result, pull = jax.vjp(run, weight, a, b)
        return result, pull(dresult)

    expected = jax.tree.leaves(differentiate(20))
    for actual, right in zip(jax.tree.leaves(differentiate(tile_tokens)), expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)
