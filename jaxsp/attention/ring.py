"""Ring: queries stay, keys and values go round, and every device attends to those that are with it.

Rows lie in zigzag (core/layout.py), so that in each turn of the ring every device has two rectangles of chunks to do: its last
chunk sees the first one of whoever's keys are there, and besides either its first chunk sees that too, or its last chunk sees
their last one as well. With 4 devices, chunks 0 to 7, what device 1 (chunks 1 and 6) does:

    keys of   0 (0, 7)    1 (1, 6)                 2 (2, 5)    3 (3, 4)
    queries   6x0, 1x0    6x1, 1x1 and 6x6 causal  6x2, 6x5    6x3, 6x4

Source: Liu et al. 2023, arXiv:2310.01889. The balanced order is Megatron-LM's and zhuzilin/ring-flash-attention's. Differs:
packed pieces, of which but one reaches from chunk to chunk; the gradients of k and v go round in float32.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from jaxsp.attention import zigzag
from jaxsp.attention.kernels import checkpoint_names, segments
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.zigzag import ChunkKernel, LocalSegments, PartialAttention, ZigzagGroup


def sent_bytes(
    *,
    degree: int,
    num_rows: int,
    tokens_per_device: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    remat: str,
) -> dict[str, int]:
    """Bytes that one device sends to the next for a layer in a turn, forward and backward.

    Args:
        rows: that a group holds together.
        share_tokens: tokens of a row that one device holds.
        itemsize: bytes of an element of k and v; their gradients go round in float32.
        remat: what a layer's backward pass keeps: none, attention or full.
    """
    held = num_rows * tokens_per_device * 2 * num_kv_heads * head_dim
    hops = 2 * (degree - 1)
    if remat == "full" and degree > 3:
        # forward again, but for the first hop, which is the backward pass's too; of three devices, whose loop of one turn XLA
        # unrolls, so are all
        hops += degree - 2
    # the gradients go all the way round, home as they are wanted there
    return {"collective-permute": held * ((hops + 1) * itemsize + (degree - 1) * 4)}


def attend(
    q_BlHK: Float[Array, "B l H K"],
    k_BlGK: Float[Array, "B l G K"],
    v_BlGK: Float[Array, "B l G K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    kernel: ChunkKernel,
    group: ZigzagGroup,
) -> Float[Array, "B l H K"]:
    """Attention when each device holds two chunks of whole rows, and keeps its queries.

    Shapes: inside shard_map over `seq`; shares are of the layout zigzag(ring.degree).
    Moves:  k and v go round all devices but one, backward again, and there their gradients go round all: see `cost`.
    """
    return _attend(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, kernel, group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    kernel: ChunkKernel,
    group: ZigzagGroup,
) -> Array:
    return _attend_fwd(q, k, v, starts_BM, lengths_BM, kernel, group)[0]


def _attend_fwd(
    q: Array,
    k: Array,
    v: Array,
    starts_BM: Array,
    lengths_BM: Array,
    kernel: ChunkKernel,
    group: ZigzagGroup,
) -> tuple[Array, tuple[Array, ...]]:
    B, l, H, _ = q.shape
    q_B2CHK, *kv = (zigzag.split_chunks(x) for x in (q, k, v))
    pieces_of = _LocalWork(group, starts_BM, lengths_BM, l // 2)

    def visit(sums: _ChunkResults, kv: list[Array], turn: Array | int) -> _ChunkResults:
        """The sums, with what the two chunks get of keys that have come so many devices far."""
        at = pieces_of.ring_step(turn)
        found = zigzag.off_diagonal_forward(
            kernel, at.blocks, at.take_queries(q_B2CHK), *(at.take_keys(x) for x in kv)
        )
        of_last, of_either = (
            PartialAttention(*(x.reshape(B, 2, *x.shape[1:])[:, number] for x in found))
            for number in (0, 1)
        )
        first = zigzag.merge(sums.first, zigzag.mask_partial(of_either, at.is_earlier))
        return _ChunkResults(
            first,
            zigzag.merge(
                zigzag.merge(sums.last, of_last), zigzag.mask_partial(of_either, ~at.is_earlier)
            ),
        )

    def next_turn(
        carry: tuple[_ChunkResults, list[Array]], turn: Array
    ) -> tuple[tuple[_ChunkResults, list[Array]], None]:
        sums, kv = carry
        return (visit(sums, kv, turn), group.shift(kv)), None

    own = zigzag.diagonal_forward(
        kernel, pieces_of.local_segments, *(zigzag.flatten_chunks(x) for x in (q_B2CHK, *kv))
    )
    first, last = (
        PartialAttention(*(x.reshape(B, 2, *x.shape[1:])[:, number] for x in own))
        for number in (0, 1)
    )
    between = zigzag.off_diagonal_forward(
        kernel, pieces_of.inner_block, q_B2CHK[:, 1], *(x[:, 0] for x in kv)
    )
    sums = _ChunkResults(first, zigzag.merge(last, between))
    if group.degree > 1:
        (sums, kv), _ = jax.lax.scan(
            next_turn, (sums, group.shift(kv)), jnp.arange(1, group.degree - 1)
        )
        sums = visit(sums, kv, group.degree - 1)
    out = jnp.stack([part.out_BCHK for part in sums], axis=1).reshape(q.shape).astype(q.dtype)
    lse = jnp.stack([part.lse_BHC for part in sums], axis=2).reshape(B, H, l)
    out, lse = (
        checkpoint_name(out, checkpoint_names.OUT),
        checkpoint_name(lse, checkpoint_names.LSE),
    )
    return out, (q, k, v, starts_BM, lengths_BM, out, lse)


def _attend_bwd(
    kernel: ChunkKernel, group: ZigzagGroup, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, starts_BM, lengths_BM, out, lse = saved
    B, l, H, _ = q.shape
    q_B2CHK, k_B2CGK, v_B2CGK, out_B2CHK, dout_B2CHK = (
        zigzag.split_chunks(x) for x in (q, k, v, out, dout)
    )
    lse_B2HC = lse.reshape(B, H, 2, l // 2).swapaxes(1, 2)
    pieces_of = _LocalWork(group, starts_BM, lengths_BM, l // 2)
    done = (out_B2CHK, lse_B2HC, dout_B2CHK)

    def visit(
        dq: Array, dkv: list[Array], kv: list[Array], turn: Array | int
    ) -> tuple[Array, list[Array]]:
        """dq of the two chunks, and dk and dv of keys that have come so many devices far, with what they are to each other."""
        at = pieces_of.ring_step(turn)
        inputs = (
            at.take_queries(q_B2CHK),
            *(at.take_keys(x) for x in kv),
            *(at.take_queries(x) for x in done),
        )
        dq_more, *dkv_more = zigzag.off_diagonal_backward(kernel, at.blocks, *inputs)
        return dq + at.sum_queries(dq_more), [
            x + at.sum_keys(more) for x, more in zip(dkv, dkv_more, strict=True)
        ]

    def next_turn(carry: tuple[Array, list[Array], list[Array]], turn: Array) -> tuple[tuple, None]:
        dq, dkv, kv = carry
        come = group.shift([*dkv, *kv])
        dq, dkv = visit(dq, come[:2], kv, turn)
        return (dq, dkv, come[2:]), None

    kv = [k_B2CGK, v_B2CGK]
    own = zigzag.diagonal_backward(
        kernel, pieces_of.local_segments, *(zigzag.flatten_chunks(x) for x in (q_B2CHK, *kv, *done))
    )
    dq, *dkv = (x.reshape(B, 2, *x.shape[1:]) for x in own)
    of_chunks = q_B2CHK[:, 1], *(x[:, 0] for x in kv), *(x[:, 1] for x in done)
    dq_last, *dkv_first = zigzag.off_diagonal_backward(kernel, pieces_of.inner_block, *of_chunks)
    dq = dq.at[:, 1].add(dq_last)
    dkv = [x.at[:, 0].add(more) for x, more in zip(dkv, dkv_first, strict=True)]
    # gradients follow their keys, a turn behind, so that they travel while the next turn is computed
    if group.degree > 1:
        turns = jnp.arange(1, group.degree - 1)
        (dq, dkv, kv), _ = jax.lax.scan(next_turn, (dq, dkv, group.shift(kv)), turns)
        dq, dkv = visit(dq, group.shift(dkv), kv, group.degree - 1)
        dkv = group.shift([x.astype(k.dtype) for x in dkv])  # home
    dk, dv = dkv
    return (
        dq.reshape(q.shape).astype(q.dtype),
        dk.reshape(k.shape).astype(k.dtype),
        dv.reshape(v.shape).astype(v.dtype),
        None,
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)


class _ChunkResults(NamedTuple):
    """What the two chunks have got so far."""

    first: PartialAttention
    last: PartialAttention


@dataclasses.dataclass(frozen=True)
class _RingStep:
    """What there is to do when another device's keys are here, its two rectangles one after the other as rows.

    One is of the last chunk's queries and the first chunk's keys; the other of the first chunk of both, if the keys are of an
    earlier device, else of the last chunk of both.
    """

    is_earlier: Array
    blocks: OffDiagonalBlock

    def take_queries(self, x_B2: Array) -> Array:
        return zigzag.flatten_chunks(
            jnp.stack([x_B2[:, 1], jnp.where(self.is_earlier, x_B2[:, 0], x_B2[:, 1])], axis=1)
        )

    def take_keys(self, x_B2: Array) -> Array:
        return zigzag.flatten_chunks(
            jnp.stack([x_B2[:, 0], jnp.where(self.is_earlier, x_B2[:, 0], x_B2[:, 1])], axis=1)
        )

    def sum_queries(self, x_R: Array) -> Array:
        """Sums for both chunks, of values for the rectangles' queries."""
        of_last, of_either = x_R[0::2], x_R[1::2]
        return jnp.stack(
            [
                jnp.where(self.is_earlier, of_either, 0),
                of_last + jnp.where(self.is_earlier, 0, of_either),
            ],
            axis=1,
        )

    def sum_keys(self, x_R: Array) -> Array:
        """The same for their keys."""
        of_first, of_either = x_R[0::2], x_R[1::2]
        return jnp.stack(
            [
                of_first + jnp.where(self.is_earlier, of_either, 0),
                jnp.where(self.is_earlier, 0, of_either),
            ],
            axis=1,
        )


@dataclasses.dataclass(frozen=True)
class _LocalWork:
    """What the pieces leave to do on this device."""

    group: ZigzagGroup
    starts_BM: Array
    lengths_BM: Array
    chunk_tokens: int

    @property
    def local_segments(self) -> LocalSegments:
        return zigzag.find_local_segments(
            self.group, self.starts_BM, self.lengths_BM, chunk_tokens=self.chunk_tokens
        )

    @property
    def inner_block(self) -> OffDiagonalBlock:
        """This device's last chunk, and its first chunk's keys."""
        first, last = self.group.chunk_numbers(self.group.index)
        return self._block(last, first)

    def ring_step(self, hop: Array | int) -> _RingStep:
        """The keys of the device so many before this one are here."""
        here = self.group.index
        there = (here - hop) % self.group.degree
        earlier = there < here
        (first, last), (their_first, their_last) = (
            self.group.chunk_numbers(here),
            self.group.chunk_numbers(there),
        )
        both = (
            self._block(last, their_first),
            self._block(
                jnp.where(earlier, first, last), jnp.where(earlier, their_first, their_last)
            ),
        )
        return _RingStep(
            earlier,
            OffDiagonalBlock(
                *(zigzag.flatten_chunks(jnp.stack(x, axis=1)) for x in zip(*both, strict=True))
            ),
        )

    def _block(self, queries: Array, keys: Array) -> OffDiagonalBlock:
        """Of two chunks by their numbers."""
        size = self.chunk_tokens
        return segments.find_off_diagonal_block(
            self.starts_BM,
            self.lengths_BM,
            first_query=queries * size,
            num_queries=size,
            first_key=keys * size,
            num_keys=size,
        )
