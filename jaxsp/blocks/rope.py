"""Rotary position embedding (RoPE) of queries and keys.

Source: Su et al. 2021, arXiv:2104.09864.
"""

import collections
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.blocks.config import ModelConfig, QueryScale, Rope
from jaxsp.core.batch import POSITION_LIMIT
from jaxsp.core.units import format_count


@dataclasses.dataclass(frozen=True)
class RopeAngles:
    """Cosine and sine of each token's angles, one angle for each rotated pair of elements."""

    cos: Float32[Array, "B l pairs"]
    sin: Float32[Array, "B l pairs"]


TABLE_STRIDE = 4096
"""Stride of the coarse table: position = stride * a + b, with one table for a and one for b."""


def compute_angles(
    positions_Bl: Int32[Array, "B l"],
    ropes: tuple[Rope, ...],
    index: Int32[Array, ""] | int = 0,
) -> RopeAngles:
    """Angles of one of several ropes, accurate to 1e-6 at any position below POSITION_LIMIT.

    A float32 product position * frequency is off by 0.06 rad at position 1,000,000 and by 0.31 at
    5,000,000. So both tables are computed in float64 and combined by the angle-sum formula.

    Args:
        index: number of the rope among `ropes`. All rotate the same number of pairs.
    """
    if isinstance(index, int):
        tables = [jnp.asarray(table[index]) for table in _make_tables(ropes)]
    else:
        tables = [jnp.asarray(table)[index] for table in _make_tables(ropes)]
    coarse, fine = jnp.divmod(positions_Bl, jnp.int32(TABLE_STRIDE))
    indices = (coarse, coarse, fine, fine)
    cos_a, sin_a, cos_b, sin_b = (
        table[index] for table, index in zip(tables, indices, strict=True)
    )
    return RopeAngles(cos=cos_a * cos_b - sin_a * sin_b, sin=sin_a * cos_b + cos_a * sin_b)


@functools.lru_cache(maxsize=4)
def _make_tables(ropes: tuple[Rope, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cosines and sines of the coarse tables, times each rope's scale, and those of the fine ones,
    [ropes, entries, pairs]."""
    num_pairs = {len(rope.frequencies) for rope in ropes}
    assert len(num_pairs) == 1, f"layers rotate {num_pairs} pairs: must be the same in all layers"
    frequencies = np.array([rope.frequencies for rope in ropes], np.float64)[:, None]
    scales = np.array([rope.scale for rope in ropes])[:, None, None]
    coarse_positions = np.arange(POSITION_LIMIT // TABLE_STRIDE)[:, None] * TABLE_STRIDE
    coarse = coarse_positions * frequencies
    fine = np.arange(TABLE_STRIDE)[:, None] * frequencies
    cos_a, sin_a, cos_b, sin_b = (
        (function(angles) * factor).astype(np.float32)
        for angles, factor in ((coarse, scales), (fine, 1.0))
        for function in (np.cos, np.sin)
    )
    return cos_a, sin_a, cos_b, sin_b


def rotate(
    x_BlHK: Float[Array, "B l heads K"], angles: RopeAngles, *, is_interleaved: bool
) -> Float[Array, "B l heads K"]:
    """Rotates the first elements of each head, as many as there are angles, in float32.

    Args:
        is_interleaved: rotate the pairs (2i, 2i + 1) instead of (i, i + half).
    """
    cos = angles.cos[:, :, None]
    sin = angles.sin[:, :, None]
    num_rotated = 2 * cos.shape[-1]
    if num_rotated == 0:
        return x_BlHK
    x32 = x_BlHK[..., :num_rotated].astype(jnp.float32)
    if is_interleaved:
        a = x32[..., ::2]
        b = x32[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x32.shape)
    else:
        a, b = jnp.split(x32, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    rotated = rotated.astype(x_BlHK.dtype)
    if num_rotated == x_BlHK.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BlHK[..., num_rotated:]], axis=-1)


def scale_queries(
    q_BlHK: Float[Array, "B l H K"], positions_Bl: Int32[Array, "B l"], query_scale: QueryScale
) -> Float[Array, "B l H K"]:
    """Queries times a factor that grows with their position in the segment, in float32."""
    periods = positions_Bl // query_scale.original_max_position_embeddings
    factor_Bl = 1 + query_scale.beta * jnp.log(1 + periods.astype(jnp.float32))
    return (q_BlHK.astype(jnp.float32) * factor_Bl[..., None, None]).astype(q_BlHK.dtype)


def describe(model: ModelConfig, *, is_changed: bool) -> str:
    """Describes the embeddings of all layers; empty if they are the model's own, whatever the row
    length.

    Args: is_changed: True if the config changes them.
    """
    ropes = collections.Counter(
        layer.rope.description for layer in model.layers if layer.rope is not None
    )
    has_choice = any(description.startswith("longrope") for description in ropes)
    if not is_changed and not has_choice:
        return ""
    if list(ropes.values()) == [model.num_layers]:
        return next(iter(ropes))
    return "; ".join(
        f"{description} in {format_count(count, 'layer')}" for description, count in ropes.items()
    )
