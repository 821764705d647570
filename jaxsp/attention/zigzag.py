"""What ring and gather have in common: a device's two chunks of a row, and results of parts of the keys put together.

Queries stay where they are. A device's two chunks see themselves by the kernel's packed causal attention, and of any tokens
before a chunk they see one rectangle: the one piece that lies in both. Partial results are merged in float32 by their
log-sum-exps; the backward pass takes the whole log-sum-exp, so its parts only have to be added.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.core import axes

_EMPTY_LSE = -1e30
"""The log-sum-exp of no keys: finite, so that differences are never NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKernel:
    """A kernel's way to compute parts: see `kernels.blockwise`, which has all four functions."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    off_diagonal_forward: Callable[..., tuple[Array, Array]]
    off_diagonal_backward: Callable[..., tuple[Array, Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZigzagGroup:
    """The devices of a group that hold a row's chunks: those of the axis `seq` with the same number within their neighbours."""

    degree: int
    """How many they are,"""
    ulysses_degree: int = 1
    """and how many neighbours hold the same chunks."""

    @property
    def index(self) -> Array:
        """The number of this device among them."""
        return (
            jax.lax.axis_index(axes.SEQ) // self.ulysses_degree if self.degree > 1 else jnp.int32(0)
        )

    @property
    def axis_index_groups(self) -> list[list[int]]:
        """All such groups, by the devices' numbers along `seq`."""
        return [
            [outer * self.ulysses_degree + inner for outer in range(self.degree)]
            for inner in range(self.ulysses_degree)
        ]

    def shift(self, arrays: list[Array]) -> list[Array]:
        """The arrays of the device before this one.

        They come in one message, because XLA lets one alone travel while something is computed (jax 0.12).
        """
        pairs = [
            (a, b)
            for group in self.axis_index_groups
            for a, b in zip(group, [*group[1:], group[0]], strict=True)
        ]
        dtypes = {x.dtype for x in arrays}
        as_one = (
            dtypes.pop()
            if len(dtypes) == 1
            else jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
        )
        words = [jax.lax.bitcast_convert_type(x, as_one) for x in arrays]
        ends = np.cumsum([x.size for x in words]).tolist()[:-1]
        come = jnp.split(
            jax.lax.ppermute(jnp.concatenate([x.ravel() for x in words]), axes.SEQ, pairs), ends
        )
        return [
            jax.lax.bitcast_convert_type(flat.reshape(word.shape), x.dtype)
            for flat, word, x in zip(come, words, arrays, strict=True)
        ]

    def chunk_numbers(self, device: Array) -> tuple[Array, Array]:
        """The numbers of a device's two chunks."""
        return device, 2 * self.degree - 1 - device


class PartialAttention(NamedTuple):
    """What some queries get of a part of their keys."""

    out_BCHK: Float32[Array, "B C H K"]
    lse_BHC: Float32[Array, "B H C"]


class LocalSegments(NamedTuple):
    """The pieces of this device's two chunks; chunks count as rows, both of a row one after the other."""

    starts_RM: Int32[Array, "R M"]
    lengths_RM: Int32[Array, "R M"]
    mask_RC: Bool[Array, "R C"]
    """Whether a token belongs to a piece."""


def split_chunks(x_BlXK: Array) -> Array:
    """A device's share of each row as its two chunks, [B, 2, C, X, K]."""
    B, l = x_BlXK.shape[:2]
    return x_BlXK.reshape(B, 2, l // 2, *x_BlXK.shape[2:])


def flatten_chunks(x_B2: Array) -> Array:
    """Both chunks of each row as rows: [B, 2, ...] to [R, ...]."""
    return x_B2.reshape(-1, *x_B2.shape[2:])


def find_local_segments(
    group: ZigzagGroup, starts_BM: Array, lengths_BM: Array, *, chunk_tokens: int
) -> LocalSegments:
    """The pieces of this device's chunks."""
    found = [
        segments.clip_to_chunk(
            starts_BM, lengths_BM, first_token=chunk * chunk_tokens, num_tokens=chunk_tokens
        )
        for chunk in group.chunk_numbers(group.index)
    ]
    starts_RM, lengths_RM = (flatten_chunks(jnp.stack(x, axis=1)) for x in zip(*found, strict=True))
    return LocalSegments(
        starts_RM, lengths_RM, segments.segment_mask(starts_RM, lengths_RM, chunk_tokens)
    )


def segment_mask(
    starts_BM: Array, lengths_BM: Array, num_tokens: int, *, group: ZigzagGroup
) -> Bool[Array, "B l"]:
    """Whether each of this device's tokens belongs to a piece."""
    inside_RC = find_local_segments(
        group, starts_BM, lengths_BM, chunk_tokens=num_tokens // 2
    ).mask_RC
    return inside_RC.reshape(len(starts_BM), num_tokens)


def diagonal_forward(
    kernel: ChunkKernel, local_segments: LocalSegments, q_RCHK: Array, k_RCGK: Array, v_RCGK: Array
) -> PartialAttention:
    """What chunks get of themselves."""
    out, lse = kernel.forward(
        q_RCHK, k_RCGK, v_RCGK, local_segments.starts_RM, local_segments.lengths_RM
    )
    return _make_partial(out, lse, local_segments.mask_RC)


def diagonal_backward(
    kernel: ChunkKernel,
    local_segments: LocalSegments,
    q_RCHK: Array,
    k_RCGK: Array,
    v_RCGK: Array,
    out_RCHK: Array,
    lse_RHC: Array,
    dout_RCHK: Array,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of what chunks see of themselves, float32."""
    inputs = q_RCHK, k_RCGK, v_RCGK, out_RCHK, lse_RHC, dout_RCHK
    found = kernel.backward(*inputs, local_segments.starts_RM, local_segments.lengths_RM)
    dq, dk, dv = (_zero_outside(x, local_segments.mask_RC) for x in found)
    return dq, dk, dv


def off_diagonal_forward(
    kernel: ChunkKernel, block: OffDiagonalBlock, q_RCHK: Array, k_RDGK: Array, v_RDGK: Array
) -> PartialAttention:
    """What chunks get of keys before them; nothing is computed where no piece reaches from one to the other."""

    out, lse = _compute_if_any(block, kernel.off_diagonal_forward, q_RCHK, k_RDGK, v_RDGK)
    return _make_partial(out, lse, block.query_mask(q_RCHK.shape[1]))


def off_diagonal_backward(
    kernel: ChunkKernel,
    block: OffDiagonalBlock,
    q_RCHK: Array,
    k_RDGK: Array,
    v_RDGK: Array,
    out_RCHK: Array,
    lse_RHC: Array,
    dout_RCHK: Array,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of what chunks see of keys before them, float32."""
    inputs = q_RCHK, k_RDGK, v_RDGK, out_RCHK, lse_RHC, dout_RCHK
    dq, dk, dv = _compute_if_any(block, kernel.off_diagonal_backward, *inputs)
    of_q, of_k = block.query_mask(q_RCHK.shape[1]), block.key_mask(k_RDGK.shape[1])
    return _zero_outside(dq, of_q), _zero_outside(dk, of_k), _zero_outside(dv, of_k)


def _compute_if_any(
    block: OffDiagonalBlock, compute: Callable[..., tuple[Array, ...]], *inputs: Array
) -> tuple[Array, ...]:
    """What the kernel gives, as it gives it, or zeros where no row has anything to do.

    What leaves a conditional is written to memory: in float32 it would be twice as much (ring of 8, a million tokens: 3 GiB).
    """
    given = jax.eval_shape(compute, *inputs, block)
    nothing = lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in given)
    return jax.lax.cond(block.is_any(), lambda: tuple(compute(*inputs, block)), nothing)


def merge(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """What queries get of the keys of two parts together."""
    lse_BHC = jnp.logaddexp(one.lse_BHC, other.lse_BHC)
    weights = (jnp.exp(x.lse_BHC - lse_BHC).swapaxes(1, 2)[..., None] for x in (one, other))
    out_BCHK = sum(x.out_BCHK * weight for x, weight in zip((one, other), weights, strict=True))
    return PartialAttention(jnp.asarray(out_BCHK), lse_BHC)


def mask_partial(part: PartialAttention, is_seen: Array) -> PartialAttention:
    """A part that counts only where `seen`, a scalar, is true."""
    return PartialAttention(
        jnp.where(is_seen, part.out_BCHK, 0.0), jnp.where(is_seen, part.lse_BHC, _EMPTY_LSE)
    )


def _make_partial(out_RCHK: Array, lse_RHC: Array, inside_RC: Array) -> PartialAttention:
    return PartialAttention(
        _zero_outside(out_RCHK, inside_RC), jnp.where(inside_RC[:, None], lse_RHC, _EMPTY_LSE)
    )


def _zero_outside(x_RCXK: Array, inside_RC: Array) -> Float[Array, "R C X K"]:
    """float32 values, 0 where a token is not inside, whatever the kernel has left there."""
    return jnp.where(inside_RC[..., None, None], x_RCXK.astype(jnp.float32), 0.0)
