"""Angles of the rotations, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import POSITION_LIMIT
from jaxsp.model import layers
from jaxsp.model.config import Llama3Rope
from tests import batches, tolerances

POSITIONS = [0, 1, 4095, 4096, 4097, 131_071, 1_000_003, 5_242_879, POSITION_LIMIT - 1]

LLAMA3 = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


@pytest.mark.parametrize(("theta", "scaling"), [(1e4, None), (5e5, None), (5e5, LLAMA3)])
def test_angles_are_those_of_float64_at_any_position(theta, scaling):
    config = batches.model(head_dim=128, rope_theta=theta, rope_llama3=scaling)
    found = jax.jit(
        lambda positions: (lambda a: (a.cos, a.sin))(layers.rope_angles(positions, config))
    )(jnp.int32([POSITIONS]))
    angles = np.array(POSITIONS, np.float64)[:, None] * layers.rope_frequencies(config)
    for mine, right in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
        assert mine.dtype == jnp.float32
        assert np.abs(np.asarray(mine[0], np.float64) - right).max() < tolerances.ANGLES


def test_llama3_stretches_slow_rotations_only():
    """Wavelengths up to 2048 tokens stay, those above 8192 turn 8 times slower, between them it is a mixture."""
    plain = layers.rope_frequencies(batches.model(head_dim=128, rope_theta=5e5))
    scaled = layers.rope_frequencies(
        batches.model(head_dim=128, rope_theta=5e5, rope_llama3=LLAMA3)
    )
    wavelengths = 2 * np.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    between = ~fast & ~slow
    assert fast.any()
    assert slow.any()
    assert between.any()
    assert (scaled[fast] == plain[fast]).all()
    assert scaled[slow] == pytest.approx(plain[slow] / 8, rel=1e-12)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_the_score_of_a_query_and_a_key_depends_on_their_distance_only():
    config = batches.model(head_dim=64)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 64), np.float32)) for _ in range(2))

    @jax.jit
    def score(position_q, position_k):
        turned = [
            layers.apply_rope(x, layers.rope_angles(at, config))
            for x, at in ((q, position_q), (k, position_k))
        ]
        return jnp.vdot(*turned, precision="highest")

    near = score(jnp.int32([[37]]), jnp.int32([[20]]))
    assert float(score(jnp.int32([[5_000_037]]), jnp.int32([[5_000_020]]))) == pytest.approx(
        float(near), rel=1e-4
    )
    assert float(score(jnp.int32([[37]]), jnp.int32([[21]]))) != pytest.approx(
        float(near), rel=1e-2
    )
