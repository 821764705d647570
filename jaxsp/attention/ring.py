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
from jaxsp.attention.kernels import names, segments


def cost(
    *, degree: int, rows: int, share_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int, remat: str
) -> dict[str, int]:
    """Bytes that one device sends to the next for a layer in a turn, forward and backward.

    Args:
        rows: that a group holds together.
        share_tokens: tokens of a row that one device holds.
        itemsize: bytes of an element of k and v; their gradients go round in float32.
        remat: what a layer's backward pass keeps: none, attention or full.
    """
    held = rows * share_tokens * 2 * num_kv_heads * head_dim
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
    kernel: zigzag.Kernel,
    ring: zigzag.Ring,
) -> Float[Array, "B l H K"]:
    """Attention when each device holds two chunks of whole rows, and keeps its queries.

    Shapes: inside shard_map over `seq`; shares are of the layout zigzag(ring.degree).
    Moves:  k and v go round all devices but one, backward again, and there their gradients go round all: see `cost`.
    """
    return _attend(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, kernel, ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    q: Array, k: Array, v: Array, starts_BM: Array, lengths_BM: Array, kernel: zigzag.Kernel, ring: zigzag.Ring
) -> Array:
    return _attend_fwd(q, k, v, starts_BM, lengths_BM, kernel, ring)[0]


def _attend_fwd(
    q: Array, k: Array, v: Array, starts_BM: Array, lengths_BM: Array, kernel: zigzag.Kernel, ring: zigzag.Ring
) -> tuple[Array, tuple[Array, ...]]:
    B, l, H, _ = q.shape
    q_B2CHK, *kv = (zigzag.in_chunks(x) for x in (q, k, v))
    pieces_of = _Pieces(ring, starts_BM, lengths_BM, l // 2)

    def visit(sums: _Sums, kv: list[Array], turn: Array | int) -> _Sums:
        """The sums, with what the two chunks get of keys that have come so many devices far."""
        at = pieces_of.turn(turn)
        found = zigzag.rectangle_forward(kernel, at.where, at.queries(q_B2CHK), *(at.keys(x) for x in kv))
        of_last, of_either = (zigzag.Part(*(x.reshape(B, 2, *x.shape[1:])[:, number] for x in found)) for number in (0, 1))
        first = zigzag.merged(sums.first, zigzag.only_where(of_either, at.earlier))
        return _Sums(first, zigzag.merged(zigzag.merged(sums.last, of_last), zigzag.only_where(of_either, ~at.earlier)))

    def next_turn(carry: tuple[_Sums, list[Array]], turn: Array) -> tuple[tuple[_Sums, list[Array]], None]:
        sums, kv = carry
        return (visit(sums, kv, turn), ring.passed_on(kv)), None

    own = zigzag.own_forward(kernel, pieces_of.own, *(zigzag.as_rows(x) for x in (q_B2CHK, *kv)))
    first, last = (zigzag.Part(*(x.reshape(B, 2, *x.shape[1:])[:, number] for x in own)) for number in (0, 1))
    between = zigzag.rectangle_forward(kernel, pieces_of.between, q_B2CHK[:, 1], *(x[:, 0] for x in kv))
    sums = _Sums(first, zigzag.merged(last, between))
    if ring.degree > 1:
        (sums, kv), _ = jax.lax.scan(next_turn, (sums, ring.passed_on(kv)), jnp.arange(1, ring.degree - 1))
        sums = visit(sums, kv, ring.degree - 1)
    out = jnp.stack([part.out_BCHK for part in sums], axis=1).reshape(q.shape).astype(q.dtype)
    lse = jnp.stack([part.lse_BHC for part in sums], axis=2).reshape(B, H, l)
    out, lse = checkpoint_name(out, names.OUT), checkpoint_name(lse, names.LSE)
    return out, (q, k, v, starts_BM, lengths_BM, out, lse)


def _attend_bwd(
    kernel: zigzag.Kernel, ring: zigzag.Ring, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, starts_BM, lengths_BM, out, lse = saved
    B, l, H, _ = q.shape
    q_B2CHK, k_B2CGK, v_B2CGK, out_B2CHK, dout_B2CHK = (zigzag.in_chunks(x) for x in (q, k, v, out, dout))
    lse_B2HC = lse.reshape(B, H, 2, l // 2).swapaxes(1, 2)
    pieces_of = _Pieces(ring, starts_BM, lengths_BM, l // 2)
    done = (out_B2CHK, lse_B2HC, dout_B2CHK)

    def visit(dq: Array, dkv: list[Array], kv: list[Array], turn: Array | int) -> tuple[Array, list[Array]]:
        """dq of the two chunks, and dk and dv of keys that have come so many devices far, with what they are to each other."""
        at = pieces_of.turn(turn)
        inputs = at.queries(q_B2CHK), *(at.keys(x) for x in kv), *(at.queries(x) for x in done)
        dq_more, *dkv_more = zigzag.rectangle_backward(kernel, at.where, *inputs)
        return dq + at.of_queries(dq_more), [x + at.of_keys(more) for x, more in zip(dkv, dkv_more, strict=True)]

    def next_turn(carry: tuple[Array, list[Array], list[Array]], turn: Array) -> tuple[tuple, None]:
        dq, dkv, kv = carry
        come = ring.passed_on([*dkv, *kv])
        dq, dkv = visit(dq, come[:2], kv, turn)
        return (dq, dkv, come[2:]), None

    kv = [k_B2CGK, v_B2CGK]
    own = zigzag.own_backward(kernel, pieces_of.own, *(zigzag.as_rows(x) for x in (q_B2CHK, *kv, *done)))
    dq, *dkv = (x.reshape(B, 2, *x.shape[1:]) for x in own)
    of_chunks = q_B2CHK[:, 1], *(x[:, 0] for x in kv), *(x[:, 1] for x in done)
    dq_last, *dkv_first = zigzag.rectangle_backward(kernel, pieces_of.between, *of_chunks)
    dq = dq.at[:, 1].add(dq_last)
    dkv = [x.at[:, 0].add(more) for x, more in zip(dkv, dkv_first, strict=True)]
    # gradients follow their keys, a turn behind, so that they travel while the next turn is computed
    if ring.degree > 1:
        turns = jnp.arange(1, ring.degree - 1)
        (dq, dkv, kv), _ = jax.lax.scan(next_turn, (dq, dkv, ring.passed_on(kv)), turns)
        dq, dkv = visit(dq, ring.passed_on(dkv), kv, ring.degree - 1)
        dkv = ring.passed_on([x.astype(k.dtype) for x in dkv])  # home
    dk, dv = dkv
    return (
        dq.reshape(q.shape).astype(q.dtype),
        dk.reshape(k.shape).astype(k.dtype),
        dv.reshape(v.shape).astype(v.dtype),
        None,
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Sums(NamedTuple):
    """What the two chunks have got so far."""

    first: zigzag.Part
    last: zigzag.Part


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What there is to do when another device's keys are here, its two rectangles one after the other as rows.

    One is of the last chunk's queries and the first chunk's keys; the other of the first chunk of both, if the keys are of an
    earlier device, else of the last chunk of both.
    """

    earlier: Array
    where: segments.Rectangle

    def queries(self, x_B2: Array) -> Array:
        return zigzag.as_rows(jnp.stack([x_B2[:, 1], jnp.where(self.earlier, x_B2[:, 0], x_B2[:, 1])], axis=1))

    def keys(self, x_B2: Array) -> Array:
        return zigzag.as_rows(jnp.stack([x_B2[:, 0], jnp.where(self.earlier, x_B2[:, 0], x_B2[:, 1])], axis=1))

    def of_queries(self, x_R: Array) -> Array:
        """Sums for both chunks, of values for the rectangles' queries."""
        of_last, of_either = x_R[0::2], x_R[1::2]
        return jnp.stack([jnp.where(self.earlier, of_either, 0), of_last + jnp.where(self.earlier, 0, of_either)], axis=1)

    def of_keys(self, x_R: Array) -> Array:
        """The same for their keys."""
        of_first, of_either = x_R[0::2], x_R[1::2]
        return jnp.stack([of_first + jnp.where(self.earlier, of_either, 0), jnp.where(self.earlier, 0, of_either)], axis=1)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """What the pieces leave to do on this device."""

    ring: zigzag.Ring
    starts_BM: Array
    lengths_BM: Array
    chunk_tokens: int

    @property
    def own(self) -> zigzag.Own:
        return zigzag.own(self.ring, self.starts_BM, self.lengths_BM, chunk_tokens=self.chunk_tokens)

    @property
    def between(self) -> segments.Rectangle:
        """This device's last chunk, and its first chunk's keys."""
        first, last = self.ring.chunks(self.ring.here)
        return self._rectangle(last, first)

    def turn(self, turn: Array | int) -> _Turn:
        """The keys of the device so many before this one are here."""
        here = self.ring.here
        there = (here - turn) % self.ring.degree
        earlier = there < here
        (first, last), (their_first, their_last) = self.ring.chunks(here), self.ring.chunks(there)
        both = (
            self._rectangle(last, their_first),
            self._rectangle(jnp.where(earlier, first, last), jnp.where(earlier, their_first, their_last)),
        )
        return _Turn(earlier, segments.Rectangle(*(zigzag.as_rows(jnp.stack(x, axis=1)) for x in zip(*both, strict=True))))

    def _rectangle(self, queries: Array, keys: Array) -> segments.Rectangle:
        """Of two chunks by their numbers."""
        size = self.chunk_tokens
        return segments.rectangle(
            self.starts_BM,
            self.lengths_BM,
            queries=queries * size,
            num_queries=size,
            keys=keys * size,
            num_keys=size,
        )
