"""RoPE angles, compared with float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks import rope
from jaxsp.blocks.config import Rope
from jaxsp.core.batch import POSITION_LIMIT
from tests import batches, tolerances

POSITIONS = [0, 1, 4095, 4096, 4097, 131_071, 1_000_003, 5_242_879, POSITION_LIMIT - 1]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "model_rope",
    [
        batches.make_rope(128),
        batches.make_rope(128, rope_theta=5e5),
        batches.make_rope(128, rope_theta=5e5, **LLAMA3),
    ],
)
def test_angles_equal_those_of_float64_at_any_position(model_rope):
    @jax.jit
    def cos_and_sin(positions):
        angles = rope.compute_angles(positions, (model_rope,))
        return angles.cos, angles.sin

    actual = cos_and_sin(jnp.int32([POSITIONS]))
    angles = np.array(POSITIONS, np.float64)[:, None] * np.array(model_rope.frequencies)
    for table, expected in zip(actual, (np.cos(angles), np.sin(angles)), strict=True):
        assert table.dtype == jnp.float32
        assert np.abs(np.asarray(table[0], np.float64) - expected).max() < tolerances.ANGLES


def test_a_traced_index_selects_the_rope_of_a_layer():
    """The scale multiplies both cosine and sine; a rope of zeros leaves heads as they are."""
    none = Rope(frequencies=(0.0,) * 4, description="none")
    scaled = dataclasses.replace(batches.make_rope(8), scale=1.25)
    ropes = (batches.make_rope(8), scaled, none)
    positions = jnp.int32([[3, 5000]])
    angles = jax.jit(lambda index: rope.compute_angles(positions, ropes, index).__dict__)
    plain, larger, zero = (angles(index) for index in range(3))
    for name in ("cos", "sin"):
        np.testing.assert_allclose(larger[name], 1.25 * plain[name], rtol=1e-6)
    assert (zero["cos"] == 1).all()
    assert (zero["sin"] == 0).all()


def test_llama3_scales_low_frequencies_only():
    """Wavelengths up to 2048 tokens stay; those above 8192 become 8 times longer; others in
    between."""
    plain = np.array(batches.make_rope(128, rope_theta=5e5).frequencies)
    scaled = np.array(batches.make_rope(128, rope_theta=5e5, **LLAMA3).frequencies)
    wavelengths = 2 * np.pi / plain
    fast = wavelengths < 8192 / 4
    slow = wavelengths > 8192
    between = ~fast & ~slow
    assert fast.any()
    assert slow.any()
    assert between.any()
    assert (scaled[fast] == plain[fast]).all()
    assert scaled[slow] == pytest.approx(plain[slow] / 8, rel=1e-12)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_the_score_of_a_query_and_a_key_depends_on_their_distance_only():
    ropes = (batches.make_rope(64),)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 64), np.float32)) for _ in range(2))

    @jax.jit
    def score(position_q, position_k):
        rotated_q, rotated_k = (
            rope.rotate(x, rope.compute_angles(position, ropes), is_interleaved=False)
            for x, position in ((q, position_q), (k, position_k))
        )
        return jnp.vdot(rotated_q, rotated_k, precision="highest")

    near = float(score(jnp.int32([[37]]), jnp.int32([[20]])))
    far = float(score(jnp.int32([[5_000_037]]), jnp.int32([[5_000_020]])))
    closer = float(score(jnp.int32([[37]]), jnp.int32([[21]])))
    assert far == pytest.approx(near, rel=1e-4)
    assert closer != pytest.approx(near, rel=1e-2)
