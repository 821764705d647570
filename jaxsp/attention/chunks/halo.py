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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsp.attention.chunks import halo_exchange
from jaxsp.attention.chunks.chunk_group import ChunkGroup
from jaxsp.attention.chunks.halo_exchange import Halo
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import ChunkKernel
from jaxsp.attention.kernels.residuals import AttentionFunctions, Gradients, Saved
from jaxsp.attention.kernels.segments import Segments

_DROPPED_LSE = 1e30
"""Log-sum-exp of queries whose results are dropped: exp(score - this) is 0, and no infinity
occurs."""


def make_functions(group: ChunkGroup, kernel: ChunkKernel, window: int) -> AttentionFunctions:
    """Forward and backward pass of this device's tokens. Args: kernel: applies the window.

    Moves: the halos of k and v; in the backward pass, also their gradients back.
    """

    def make_rows(num_tokens: int) -> _Rows:
        chunk_tokens = num_tokens // group.chunks_per_device
        halo = Halo(window=window, chunk_tokens=chunk_tokens, num_chunks=group.layout.num_chunks)
        return _Rows(group, halo)

    def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
        rows = make_rows(q.shape[1])
        out_RTHK, lse_RHT = kernel.packed.forward(
            rows.join(rows.split_chunks(q)), *rows.receive_kv(k, v), rows.clip_segments(segments)
        )
        out = jnp.concatenate(rows.take_chunks(out_RTHK), axis=1).astype(q.dtype)
        return out, jnp.concatenate(rows.take_chunks(lse_RHT, axis=2), axis=2)

    def backward(saved: Saved, segments: Segments) -> Gradients:
        rows = make_rows(saved.q.shape[1])
        q = rows.join(rows.split_chunks(saved.q))
        k, v = rows.receive_kv(saved.k, saved.v)
        out = rows.join(rows.split_chunks(saved.out))
        lse = rows.join(rows.split_chunks(saved.lse, axis=2), axis=2, fill=_DROPPED_LSE)
        dout = rows.join(rows.split_chunks(saved.dout))
        of_rows = Saved(q, k, v, out, dout, lse)
        dq_RTHK, *dkv = kernel.packed.backward(of_rows, rows.clip_segments(segments))
        dq = jnp.concatenate(rows.take_chunks(dq_RTHK), axis=1).astype(saved.q.dtype)
        return dq, *rows.return_dkv(dkv, saved.k.dtype)

    return AttentionFunctions(forward, backward)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of T tokens that a kernel computes: the halo of a chunk, the chunk, and padding.

    The k chunks of a row follow each other: R = k B. A row begins at the first token of its halo,
    or of the whole row if that is later, because the cuDNN kernel assumes that a row's only segment
    begins with the row.
    """

    group: ChunkGroup
    halo: Halo

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
                segments.clip_to_chunk(
                    rows.starts_BM, rows.lengths_BM, first_token=begin, num_tokens=end - begin
                )
            )
        starts, lengths = zip(*clipped, strict=True)
        return Segments(_stack_rows(starts), _stack_rows(lengths))

    def join(
        self,
        chunks: Sequence[Array],
        halos: Sequence[Array] | None = None,
        *,
        axis: int = 1,
        fill: float = 0.0,
    ) -> Float[Array, "R ..."]:
        """Joins halos and chunks to rows. Args: halos: None: filled with `fill`."""
        halo = self.halo
        rows = []
        for index, (chunk, num_missing) in enumerate(zip(chunks, self.num_missing, strict=True)):
            before = halo.num_tokens if halos is None else 0
            widths = [(0, 0)] * chunk.ndim
            widths[axis] = (before, halo.row_tokens - halo.chunk_tokens)
            x = jnp.pad(chunk, widths, constant_values=fill)
            if halos is not None:
                x = jnp.concatenate([halos[index], x], axis)
            rows.append(jax.lax.dynamic_slice_in_dim(x, num_missing, halo.row_tokens, axis))
        return _stack_rows(rows)

    def split_chunks(self, x: Array, *, axis: int = 1) -> list[Array]:
        """A device's chunks of each row."""
        return jnp.split(x, self.group.chunks_per_device, axis)

    def take_chunks(self, rows: Array, *, axis: int = 1) -> list[Array]:
        """Takes the tokens of the chunks."""
        halo = self.halo
        return [
            jax.lax.dynamic_slice_in_dim(x, halo.num_tokens - num_missing, halo.chunk_tokens, axis)
            for x, num_missing in zip(self._unstack_rows(rows), self.num_missing, strict=True)
        ]

    def take_halos(self, rows: Float[Array, "R T G K"]) -> list[Array]:
        """Takes the tokens of the halos, 0 before the whole row."""
        size = self.halo.num_tokens
        return [
            jax.lax.dynamic_slice_in_dim(
                jnp.pad(x[:, :size], ((0, 0), (size, 0), (0, 0), (0, 0))),
                size - num_missing,
                size,
                1,
            )
            for x, num_missing in zip(self._unstack_rows(rows), self.num_missing, strict=True)
        ]

    def _unstack_rows(self, x_R: Array) -> list[Array]:
        """Undoes `_stack_rows`."""
        number = self.group.chunks_per_device
        return [x_R[index::number] for index in range(number)]

    def receive_kv(
        self, k: Array, v: Array
    ) -> tuple[Float[Array, "R T G K"], Float[Array, "R T G K"]]:
        """Rows of k and v with their halos."""
        k_chunks = self.split_chunks(k)
        v_chunks = self.split_chunks(v)
        chunks = [jnp.stack(kv) for kv in zip(k_chunks, v_chunks, strict=True)]
        halos = halo_exchange.receive_halos(self.group, self.halo, chunks)
        k_halos, v_halos = zip(*halos, strict=True)
        return self.join(k_chunks, k_halos), self.join(v_chunks, v_halos)

    def return_dkv(
        self, dkv_RTGK: Sequence[Array], dtype: jnp.dtype
    ) -> tuple[Float[Array, "B l G K"], Float[Array, "B l G K"]]:
        """dk and dv of this device's tokens, with the terms from the halos of later chunks."""
        halos = zip(*map(self.take_halos, dkv_RTGK), strict=True)
        dkv_chunks = [jnp.stack(dkv).astype(jnp.float32) for dkv in halos]
        returned = halo_exchange.return_halos(self.group, self.halo, dkv_chunks, dtype)
        sums = []
        for array, *terms in zip(dkv_RTGK, *returned, strict=True):
            chunks = [
                halo_exchange.add_to_last(chunk.astype(jnp.float32), term)
                for chunk, term in zip(self.take_chunks(array), terms, strict=True)
            ]
            sums.append(jnp.concatenate(chunks, axis=1).astype(dtype))
        dk, dv = sums
        return dk, dv


def _stack_rows(chunks: Sequence[Array]) -> Array:
    """Joins arrays of a device's chunks along the batch: k arrays [B, ...] to [k B, ...]."""
    x_Bk = jnp.stack(chunks, axis=1)
    return x_Bk.reshape(-1, *x_Bk.shape[2:])
