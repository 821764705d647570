"""Halo: sliding windows where devices keep several chunks of queries each (zigzag.py).

With a window of w tokens, a chunk's queries see at most the w - 1 tokens before the chunk: its
halo. Only these are sent, from each chunk to the next one in token order. A halo longer than a
chunk takes several hops, and the last hop brings only the rest. With 4 devices and chunks 0 to 7,
the chunks that the devices have received after each hop:

    device (chunks)    0 (0, 7)    1 (1, 6)    2 (2, 5)    3 (3, 4)
    hop 1                -  6        0  5        1  4        2  3
    hop 2                -  5        -  4        0  3        1  2

First chunks receive from the device before, last chunks from the device after. Only the last device
has the chunk before its last chunk itself. With more chunks per device, both kinds alternate. Then
the kernel computes packed windowed attention over rows of halo and chunk. Queries of the halo are
zeros, whose results are dropped.

Source: halo exchange of distributed stencils. Differs: the order of the chunks is that of zigzag.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import AttentionFunctions, ChunkKernel, Gradients, Saved
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.strategy import TokenExchange
from jaxsp.core import axes

_ROW_MULTIPLES = (2048, 512)
"""Preferred divisors of a row. cuDNN divides rows of several segments by 4 and by 16, into bins of
a multiple of 128 tokens: see `cudnn_bins.plan_calls`."""

_DROPPED_LSE = 1e30
"""Log-sum-exp of queries whose results are dropped: exp(score - this) is 0, and no infinity
occurs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halo:
    """Sizes of the halos and of the rows that a kernel computes."""

    window: int
    """Number of tokens that a token sees, including itself."""
    chunk_tokens: int
    num_chunks: int
    """Number of chunks of a row."""

    @property
    def num_tokens(self) -> int:
        """Tokens before a chunk that its queries may see; the last chunk has most before it."""
        return min(self.window - 1, (self.num_chunks - 1) * self.chunk_tokens)

    @property
    def hop_tokens(self) -> list[int]:
        """Tokens that a chunk sends in each hop."""
        whole_chunks, rest = divmod(self.num_tokens, max(self.chunk_tokens, 1))
        tokens = [self.chunk_tokens] * whole_chunks
        return [*tokens, rest] if rest else tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of a halo and its chunk, and padding.

        Padded to a multiple of 2,048 or 512 if the chunk is one, and if the padding is at most an
        eighth of the tokens.
        """
        tokens = self.num_tokens + self.chunk_tokens
        for multiple in _ROW_MULTIPLES:
            padding = -tokens % multiple
            if self.chunk_tokens % multiple == 0 and 8 * padding <= tokens:
                return tokens + padding
        return tokens + -tokens % math.gcd(self.chunk_tokens, 128)


def make_functions(group: TokenExchange, kernel: ChunkKernel, window: int) -> AttentionFunctions:
    """Forward and backward pass of this device's tokens. Args: kernel: applies the window.

    Moves: the halos of k and v; in the backward pass, also their gradients back.
    """

    def make_rows(num_tokens: int) -> _Rows:
        layout = group.layout
        chunk_tokens = num_tokens // layout.chunks_per_device
        halo = Halo(window=window, chunk_tokens=chunk_tokens, num_chunks=layout.num_chunks)
        return _Rows(group, halo)

    def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
        rows = make_rows(q.shape[1])
        out_RTHK, lse_RHT = kernel.packed.forward(
            rows.join(q), *rows.receive_kv(k, v), rows.clip_segments(segments)
        )
        out = jnp.concatenate(rows.take_chunks(out_RTHK), axis=1).astype(q.dtype)
        return out, jnp.concatenate(rows.take_chunks(lse_RHT, axis=2), axis=2)

    def backward(saved: Saved, segments: Segments) -> Gradients:
        rows = make_rows(saved.q.shape[1])
        q = rows.join(saved.q)
        k, v = rows.receive_kv(saved.k, saved.v)
        out = rows.join(saved.out)
        lse = rows.join(saved.lse, axis=2, fill=_DROPPED_LSE)
        of_rows = Saved(q, k, v, out, rows.join(saved.dout), lse)
        dq_RTHK, *dkv = kernel.packed.backward(of_rows, rows.clip_segments(segments))
        dq = jnp.concatenate(rows.take_chunks(dq_RTHK), axis=1).astype(saved.q.dtype)
        dk, dv = rows.return_dkv(dkv, saved.k.dtype)
        return dq, dk, dv

    return AttentionFunctions(forward, backward)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of T tokens that a kernel computes: the halo of a chunk, the chunk, and padding.

    The k chunks of a row follow each other: R = k B. A row begins at the first token of its halo,
    or of the whole row if that is later, because the cuDNN kernel assumes that a row's only segment
    begins with the row.
    """

    group: TokenExchange
    halo: Halo

    @property
    def num_chunks(self) -> int:
        """Chunks of a row that this device has."""
        return self.group.layout.chunks_per_device

    @property
    def first_tokens(self) -> list[Array]:
        """First token of each chunk, counted from the beginning of the whole row."""
        return list(self.group.chunk_numbers(self.group.index) * self.halo.chunk_tokens)

    @property
    def num_missing(self) -> list[Array]:
        """Tokens of each halo that are before the whole row."""
        return [jnp.maximum(self.halo.num_tokens - x, 0) for x in self.first_tokens]

    def clip_segments(self, rows: Segments) -> Segments:
        """Parts of segments in each row."""
        clipped = []
        for first_token in self.first_tokens:
            begin = jnp.maximum(first_token - self.halo.num_tokens, 0)
            end = first_token + self.halo.chunk_tokens
            clipped.append(
                segments.clip_to_chunk(*rows[:2], first_token=begin, num_tokens=end - begin)
            )
        starts, lengths = zip(*clipped, strict=True)
        return Segments(_stack_rows(starts), _stack_rows(lengths))

    def join(
        self,
        x: Array,
        halos: Sequence[Array] | None = None,
        *,
        axis: int = 1,
        fill: float = 0.0,
    ) -> Float[Array, "R ..."]:
        """Joins halos and this device's chunks to rows. Args: halos: None: filled with `fill`."""
        halo = self.halo
        rows = []
        chunks = jnp.split(x, self.num_chunks, axis)
        for index, (chunk, num_missing) in enumerate(zip(chunks, self.num_missing, strict=True)):
            before = halo.num_tokens if halos is None else 0
            widths = [(0, 0)] * chunk.ndim
            widths[axis] = (before, halo.row_tokens - halo.chunk_tokens)
            row = jnp.pad(chunk, widths, constant_values=fill)
            if halos is not None:
                row = jnp.concatenate([halos[index], row], axis)
            rows.append(jax.lax.dynamic_slice_in_dim(row, num_missing, halo.row_tokens, axis))
        return _stack_rows(rows)

    def take_chunks(self, rows: Array, *, axis: int = 1) -> list[Array]:
        """Takes the tokens of the chunks."""
        halo = self.halo
        return [
            jax.lax.dynamic_slice_in_dim(x, halo.num_tokens - num_missing, halo.chunk_tokens, axis)
            for x, num_missing in zip(self._unstack_rows(rows), self.num_missing, strict=True)
        ]

    def _take_halos(self, rows: Float[Array, "R T G K"]) -> list[Array]:
        """Takes the tokens of the halos, 0 before the whole row."""
        size = self.halo.num_tokens
        widths = ((0, 0), (size, 0), (0, 0), (0, 0))
        return [
            jax.lax.dynamic_slice_in_dim(jnp.pad(x[:, :size], widths), size - num_missing, size, 1)
            for x, num_missing in zip(self._unstack_rows(rows), self.num_missing, strict=True)
        ]

    def _unstack_rows(self, x_R: Array) -> list[Array]:
        """Undoes `_stack_rows`."""
        return [x_R[index :: self.num_chunks] for index in range(self.num_chunks)]

    def receive_kv(self, k: Array, v: Array) -> list[Float[Array, "R T G K"]]:
        """Rows of k and v with their halos."""
        chunks = zip(*(jnp.split(x, self.num_chunks, 1) for x in (k, v)), strict=True)
        halos = zip(
            *receive_halos(self.group, self.halo, list(map(jnp.stack, chunks))), strict=True
        )
        return list(map(self.join, (k, v), halos))

    def return_dkv(
        self, dkv_RTGK: Sequence[Array], dtype: jnp.dtype
    ) -> list[Float[Array, "B l G K"]]:
        """dk and dv of this device's tokens, with the terms from the halos of later chunks."""
        halos = zip(*map(self._take_halos, dkv_RTGK), strict=True)
        dkv_chunks = [jnp.stack(dkv).astype(jnp.float32) for dkv in halos]
        returned = return_halos(self.group, self.halo, dkv_chunks, dtype)
        sums = []
        for array, *terms in zip(dkv_RTGK, *returned, strict=True):
            chunks = [
                _add_to_last(chunk.astype(jnp.float32), term)
                for chunk, term in zip(self.take_chunks(array), terms, strict=True)
            ]
            sums.append(jnp.concatenate(chunks, axis=1).astype(dtype))
        return sums


def _stack_rows(chunks: Sequence[Array]) -> Array:
    """Joins arrays of a device's chunks along the batch: k arrays [B, ...] to [k B, ...]."""
    x_Bk = jnp.stack(chunks, axis=1)
    return x_Bk.reshape(-1, *x_Bk.shape[2:])


def receive_halos(group: TokenExchange, halo: Halo, chunks: Sequence[Array]) -> list[Array]:
    """k and v of the tokens before each chunk.

    Shapes: one array for each of this device's chunks, [2, B, C, G, K] to [2, B, num_tokens, G, K]:
        k and v, B rows, C tokens of a chunk, G K/V heads, head_dim K.
    """
    received = list(chunks)
    # Parts of 0 tokens: with a window of 1 token, a halo has no others
    parts = [[x[:, :, :0] for x in received]]
    for tokens in halo.hop_tokens:
        received = _send(group, [x[:, :, -tokens:] for x in received])
        parts.append(received)
    return [jnp.concatenate(x[::-1], axis=2) for x in zip(*parts, strict=True)]


def return_halos(
    group: TokenExchange, halo: Halo, dkv: Sequence[Array], dtype: jnp.dtype
) -> list[Array]:
    """Sends the gradients of halos back to the devices that hold their tokens, and sums them there.

    The hops are those of `receive_halos` in reverse. The first hop to run uses `dtype`, because
    its gradients are not sums yet, and so does the last one; the hops between them use float32.
    Shapes: one array for each chunk, [2, B, num_tokens, G, K] to [2, B, tokens of the first hop, G,
        K], as in `receive_halos`.
    """
    returned = [x[:, :, :0] for x in dkv]
    begin = 0
    for hop, tokens in reversed(list(enumerate(halo.hop_tokens))):
        sums = [
            _add_to_last(x[:, :, begin : begin + tokens], y, axis=2)
            for x, y in zip(dkv, returned, strict=True)
        ]
        if hop in (0, len(halo.hop_tokens) - 1):
            sums = [x.astype(dtype) for x in sums]
        returned = _send(group, sums, is_back=True)
        begin += tokens
    return returned


def _send(group: TokenExchange, chunks: Sequence[Array], *, is_back: bool = False) -> list[Array]:
    """Sends arrays of all chunks to the next chunk of the row, or back to the previous one, and
    returns those received. The chunk at the row's end, to which none is sent, gets 0."""
    zeros = jnp.zeros_like(chunks[0])
    here = [*chunks[1:], zeros] if is_back else [zeros, *chunks[:-1]]
    if group.degree == 1:
        return here
    up = [pair for devices in group.groups for pair in itertools.pairwise(devices)]
    down = [(target, source) for source, target in up]
    pairs = [down, up] if is_back else [up, down]
    ends = [group.degree - 1, 0] if is_back else [0, group.degree - 1]
    # Even chunks are dealt up, and odd ones down: an end device holds two neighbors itself
    received = [jax.lax.ppermute(jnp.stack(chunks[i::2]), axes.SEQ, pairs[i]) for i in (0, 1)]
    first, last = (
        jnp.where(group.index == ends[i], jnp.stack(here[i::2]), received[i]) for i in (0, 1)
    )
    return [x for pair in zip(first, last, strict=True) for x in pair]


def _add_to_last(x: Array, term: Array, *, axis: int = 1) -> Array:
    """Adds an array, which may be shorter along `axis`, to the last tokens of a float32 array."""
    begin = x.shape[axis] - term.shape[axis]
    kept, changed = jnp.split(x, [begin], axis)
    return jnp.concatenate([kept, changed + term.astype(x.dtype)], axis)
