"""Ulysses: an all-to-all swaps shares of the row for shares of the heads, and back after attention."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.core import axes


def kv_repeats(*, num_kv_heads: int, seq: int) -> int:
    """How often each K/V head is repeated, so that `seq` devices get whole ones, those of their own query heads."""
    return math.lcm(num_kv_heads, seq) // num_kv_heads


PASSES_BY_REMAT = {"none": 2, "save_attention": 3, "full": 3}
"""How often a layer's arrays travel in a step, by what its backward pass keeps: forward, backward, and before that once more
where the layer is computed again. Keeping what the kernel made does not help: its q, k and v are wanted on this side of the
all-to-all and its output on the other."""


def sent_bytes(
    *,
    seq: int,
    num_rows: int,
    tokens_per_device: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    remat: str,
) -> int:
    """Bytes that one device sends to the others of its group for a layer in a turn, forward and backward.

    Args:
        rows: that a group holds together.
        share_tokens: tokens of a row that one device holds.
        itemsize: bytes of an element of q, k, v, the output and their gradients.
        remat: one of TRIPS.
    """
    kv_heads = num_kv_heads * kv_repeats(num_kv_heads=num_kv_heads, seq=seq)
    held = num_rows * tokens_per_device * 2 * (num_heads + kv_heads) * head_dim * itemsize
    return PASSES_BY_REMAT[remat] * (held - held // seq)


def attend(
    q_BlHK: Float[Array, "B l H K"],
    k_BlGK: Float[Array, "B l G K"],
    v_BlGK: Float[Array, "B l G K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    kernel: Callable[..., Float[Array, "B L h K"]],
    seq: int,
    axis_index_groups: list[list[int]] | None = None,
    **shared: Any,
) -> Float[Array, "B l H K"]:
    """Attention over whole rows when each of `seq` devices holds a share of them.

    Args:
        kernel: computes attention over whole rows.
        shared: keyword arguments of the kernel.
    Shapes: inside shard_map over `seq`; shares are contiguous and in the devices' order. G' is G repeated up to the
        least common multiple of G and seq, so that each device gets whole K/V heads, those of its own query heads.
    Moves:  2 all-to-alls forward (q, k and v travel in one), the same 2 transposed backward, and the first 2 again where the
        layer is computed again: see `cost`.
    Raises: heads that cannot be shared are `kinds.choose`'s to report; here they are an assertion.
    Source: Jacobs et al. 2023, arXiv:2309.14509, sec. 3. Differs: K/V heads are repeated when seq does not divide them.
    """
    B, l, H, K = q_BlHK.shape  # l is this device's share of L
    G = k_BlGK.shape[2]
    assert H % seq == 0, (H, seq)
    repeats = kv_repeats(num_kv_heads=G, seq=seq)
    k_BlGK, v_BlGK = jnp.repeat(k_BlGK, repeats, axis=2), jnp.repeat(v_BlGK, repeats, axis=2)
    h, g = H // seq, G * repeats // seq
    # for each destination its heads of q, of k and of v, side by side
    parts = [x.reshape(B, l, seq, -1, K) for x in (q_BlHK, k_BlGK, v_BlGK)]
    mixed_BlXK = jnp.concatenate(parts, axis=3).reshape(B, l, seq * (h + 2 * g), K)
    mixed_BLxK = jax.lax.all_to_all(
        mixed_BlXK,
        axes.SEQ,
        split_axis=2,
        concat_axis=1,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )
    q_BLhK, k_BLgK, v_BLgK = jnp.split(mixed_BLxK, [h, h + g], axis=2)
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, **shared)
    return jax.lax.all_to_all(
        out_BLhK,
        axes.SEQ,
        split_axis=1,
        concat_axis=2,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )
