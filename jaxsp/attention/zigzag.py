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
from jaxsp.core import axes

_NEVER = -1e30
"""The log-sum-exp of no keys: finite, so that differences are never NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel's way to compute parts: see `kernels.blockwise`, which has all four functions."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    rectangle_forward: Callable[..., tuple[Array, Array]]
    rectangle_backward: Callable[..., tuple[Array, Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices of a group that hold a row's chunks: those of the axis `seq` with the same number within their neighbours."""

    degree: int
    """How many they are,"""
    inner: int = 1
    """and how many neighbours hold the same chunks."""

    @property
    def here(self) -> Array:
        """The number of this device among them."""
        return jax.lax.axis_index(axes.SEQ) // self.inner if self.degree > 1 else jnp.int32(0)

    @property
    def groups(self) -> list[list[int]]:
        """All such groups, by the devices' numbers along `seq`."""
        return [[outer * self.inner + inner for outer in range(self.degree)] for inner in range(self.inner)]

    def passed_on(self, arrays: list[Array]) -> list[Array]:
        """The arrays of the device before this one.

        They come in one message, because XLA lets one alone travel while something is computed (jax 0.12).
        """
        pairs = [(a, b) for group in self.groups for a, b in zip(group, [*group[1:], group[0]], strict=True)]
        dtypes = {x.dtype for x in arrays}
        as_one = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
        words = [jax.lax.bitcast_convert_type(x, as_one) for x in arrays]
        ends = np.cumsum([x.size for x in words]).tolist()[:-1]
        come = jnp.split(jax.lax.ppermute(jnp.concatenate([x.ravel() for x in words]), axes.SEQ, pairs), ends)
        return [
            jax.lax.bitcast_convert_type(flat.reshape(word.shape), x.dtype)
            for flat, word, x in zip(come, words, arrays, strict=True)
        ]

    def chunks(self, device: Array) -> tuple[Array, Array]:
        """The numbers of a device's two chunks."""
        return device, 2 * self.degree - 1 - device


class Part(NamedTuple):
    """What some queries get of a part of their keys."""

    out_BCHK: Float32[Array, "B C H K"]
    lse_BHC: Float32[Array, "B H C"]


class Own(NamedTuple):
    """The pieces of this device's two chunks; chunks count as rows, both of a row one after the other."""

    starts_RM: Int32[Array, "R M"]
    lengths_RM: Int32[Array, "R M"]
    inside_RC: Bool[Array, "R C"]
    """Whether a token belongs to a piece."""


def in_chunks(x_BlXK: Array) -> Array:
    """A device's share of each row as its two chunks, [B, 2, C, X, K]."""
    B, l = x_BlXK.shape[:2]
    return x_BlXK.reshape(B, 2, l // 2, *x_BlXK.shape[2:])


def as_rows(x_B2: Array) -> Array:
    """Both chunks of each row as rows: [B, 2, ...] to [R, ...]."""
    return x_B2.reshape(-1, *x_B2.shape[2:])


def own(ring: Ring, starts_BM: Array, lengths_BM: Array, *, chunk_tokens: int) -> Own:
    """The pieces of this device's chunks."""
    found = [
        segments.of_chunk(starts_BM, lengths_BM, first=chunk * chunk_tokens, num_tokens=chunk_tokens)
        for chunk in ring.chunks(ring.here)
    ]
    starts_RM, lengths_RM = (as_rows(jnp.stack(x, axis=1)) for x in zip(*found, strict=True))
    return Own(starts_RM, lengths_RM, segments.in_a_piece(starts_RM, lengths_RM, chunk_tokens))


def in_a_piece(starts_BM: Array, lengths_BM: Array, num_tokens: int, *, ring: Ring) -> Bool[Array, "B l"]:
    """Whether each of this device's tokens belongs to a piece."""
    inside_RC = own(ring, starts_BM, lengths_BM, chunk_tokens=num_tokens // 2).inside_RC
    return inside_RC.reshape(len(starts_BM), num_tokens)


def own_forward(kernel: Kernel, mine: Own, q_RCHK: Array, k_RCGK: Array, v_RCGK: Array) -> Part:
    """What chunks get of themselves."""
    out, lse = kernel.forward(q_RCHK, k_RCGK, v_RCGK, mine.starts_RM, mine.lengths_RM)
    return _part(out, lse, mine.inside_RC)


def own_backward(
    kernel: Kernel, mine: Own, q_RCHK: Array, k_RCGK: Array, v_RCGK: Array, out_RCHK: Array, lse_RHC: Array, dout_RCHK: Array
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of what chunks see of themselves, float32."""
    inputs = q_RCHK, k_RCGK, v_RCGK, out_RCHK, lse_RHC, dout_RCHK
    found = kernel.backward(*inputs, mine.starts_RM, mine.lengths_RM)
    dq, dk, dv = (_inside(x, mine.inside_RC) for x in found)
    return dq, dk, dv


def rectangle_forward(kernel: Kernel, where: segments.Rectangle, q_RCHK: Array, k_RDGK: Array, v_RDGK: Array) -> Part:
    """What chunks get of keys before them; nothing is computed where no piece reaches from one to the other."""

    out, lse = _if_any(where, kernel.rectangle_forward, q_RCHK, k_RDGK, v_RDGK)
    return _part(out, lse, where.queries(q_RCHK.shape[1]))


def rectangle_backward(
    kernel: Kernel,
    where: segments.Rectangle,
    q_RCHK: Array,
    k_RDGK: Array,
    v_RDGK: Array,
    out_RCHK: Array,
    lse_RHC: Array,
    dout_RCHK: Array,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of what chunks see of keys before them, float32."""
    inputs = q_RCHK, k_RDGK, v_RDGK, out_RCHK, lse_RHC, dout_RCHK
    dq, dk, dv = _if_any(where, kernel.rectangle_backward, *inputs)
    of_q, of_k = where.queries(q_RCHK.shape[1]), where.keys(k_RDGK.shape[1])
    return _inside(dq, of_q), _inside(dk, of_k), _inside(dv, of_k)


def _if_any(where: segments.Rectangle, compute: Callable[..., tuple[Array, ...]], *inputs: Array) -> tuple[Array, ...]:
    """What the kernel gives, as it gives it, or zeros where no row has anything to do.

    What leaves a conditional is written to memory: in float32 it would be twice as much (ring of 8, a million tokens: 3 GiB).
    """
    given = jax.eval_shape(compute, *inputs, where)
    nothing = lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in given)
    return jax.lax.cond(where.some(), lambda: tuple(compute(*inputs, where)), nothing)


def merged(one: Part, other: Part) -> Part:
    """What queries get of the keys of two parts together."""
    lse_BHC = jnp.logaddexp(one.lse_BHC, other.lse_BHC)
    weights = (jnp.exp(x.lse_BHC - lse_BHC).swapaxes(1, 2)[..., None] for x in (one, other))
    out_BCHK = sum(x.out_BCHK * weight for x, weight in zip((one, other), weights, strict=True))
    return Part(jnp.asarray(out_BCHK), lse_BHC)


def only_where(part: Part, seen: Array) -> Part:
    """A part that counts only where `seen`, a scalar, is true."""
    return Part(jnp.where(seen, part.out_BCHK, 0.0), jnp.where(seen, part.lse_BHC, _NEVER))


def _part(out_RCHK: Array, lse_RHC: Array, inside_RC: Array) -> Part:
    return Part(_inside(out_RCHK, inside_RC), jnp.where(inside_RC[:, None], lse_RHC, _NEVER))


def _inside(x_RCXK: Array, inside_RC: Array) -> Float[Array, "R C X K"]:
    """float32 values, 0 where a token is not inside, whatever the kernel has left there."""
    return jnp.where(inside_RC[..., None, None], x_RCXK.astype(jnp.float32), 0.0)
