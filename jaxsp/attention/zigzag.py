"""Zigzag: the shared part of ring and all-gather, which keep two chunks of queries per device.

Rows are in zigzag (core/layout.py): with P devices, device d has chunks d and 2P - 1 - d. The
chunks attend to themselves with the kernel's packed causal attention. Of the tokens before a chunk,
they see one block: the part of the one segment that reaches from there into the chunk. Partial
results are merged in float32 by their log-sum-exps. The backward pass uses the merged log-sum-exp,
so its partial results are only added. Layers with a sliding window do none of this: see halo.py.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention import halo, halo_exchange
from jaxsp.attention.chunk_group import ChunkGroup
from jaxsp.attention.halo_exchange import Halo
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    ChunkKernel,
    Kernel,
    KernelSettings,
    KernelWorkload,
    RowKernel,
    ScoreConfig,
)
from jaxsp.attention.kernels.residuals import AttentionFunctions, with_saved_residuals
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.strategy import LayerWorkload, Strategy, mask_padding
from jaxsp.config.schema import AttentionConfig

_EMPTY_LSE = -1e30
"""Log-sum-exp of no keys. It is finite, so that differences are never NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZigzagStrategy(ChunkGroup, Strategy, abc.ABC):
    """Base class of strategies whose devices keep their queries."""

    @abc.abstractmethod
    def forward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
    ) -> tuple[Float[Array, "B l H K"], Float32[Array, "B H l"]]:
        """Output and log-sum-exp of this device's queries, inside shard_map."""

    @abc.abstractmethod
    def backward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        out: Float[Array, "B l H K"],
        lse: Float32[Array, "B H l"],
        dout: Float[Array, "B l H K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
    ) -> tuple[Float[Array, "B l H K"], Float[Array, "B l G K"], Float[Array, "B l G K"]]:
        """dq, dk and dv of this device's tokens."""

    @classmethod
    def candidates(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> Sequence["ZigzagStrategy"]:
        return [cls(seq=seq)]

    @property
    def layout_degree(self) -> int:
        return self.seq

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        chunks = self.chunk_workload(workload)
        if not workload.has_window:
            return chunks
        return dataclasses.replace(
            workload.to_kernel_workload(),
            num_rows=chunks.num_rows,
            row_tokens=Halo.from_workload(workload, seq=self.seq).row_tokens,
            chunks_per_row=chunks.chunks_per_row,
        )

    def chunk_workload(self, workload: LayerWorkload) -> KernelWorkload:
        """The workload of layers without a window."""
        chunks_per_row = 2 * self.seq
        chunk_tokens = workload.row_tokens // chunks_per_row
        return dataclasses.replace(
            workload.to_kernel_workload(),
            num_rows=2 * workload.num_rows,
            row_tokens=chunk_tokens,
            chunks_per_row=chunks_per_row,
            num_earlier_keys=chunk_tokens,
            window=None,
        )

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        if workload.has_window:
            return halo_exchange.sent_bytes(workload, seq=self.seq)
        return self.chunk_sent_bytes(workload)

    @abc.abstractmethod
    def chunk_sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        """`sent_bytes` of layers without a window."""

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        q, kv = workload.qkv_bytes
        inputs = 3 * q + kv  # with the output and its gradient
        if not workload.has_window:
            return inputs + 4 * (q + kv)  # float32 sums, and what travels
        halo = Halo.from_workload(workload, seq=self.seq)
        rows = (4 * q + 2 * kv) * halo.row_tokens // halo.chunk_tokens  # inputs and gradients
        return inputs + rows

    def device_groups(self, operation: str) -> list[list[int]]:
        return self.axis_index_groups

    def communicators(self) -> list[list[int]]:
        return self.axis_index_groups[:1]

    def build(
        self, kernel: Kernel, settings: KernelSettings, *, kinds: Sequence[ScoreConfig]
    ) -> RowKernel:
        functions = [self.make_functions(kernel, settings, score) for score in kinds]
        attend = with_saved_residuals(functions, self.segment_mask)
        return mask_padding(kernel, attend, self.segment_mask)

    def make_functions(
        self, kernel: Kernel, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        """Returns the forward and backward pass of one kind of layer, inside shard_map."""
        chunks = self._make_chunk_kernel(kernel, settings, dataclasses.replace(score, window=None))
        whole_rows = AttentionFunctions(
            functools.partial(self.forward, chunks), functools.partial(self.backward, chunks)
        )
        window = score.window
        if window is None:
            return whole_rows
        windowed_chunks = self._make_chunk_kernel(kernel, settings, score)
        arguments = self, windowed_chunks, window
        windowed = AttentionFunctions(
            functools.partial(halo.forward, *arguments),
            functools.partial(halo.backward, *arguments),
        )

        def select(q: Array) -> AttentionFunctions:
            return windowed if window < self.seq * q.shape[1] else whole_rows

        return AttentionFunctions(
            lambda q, *inputs: select(q).forward(q, *inputs),
            lambda q, *inputs: select(q).backward(q, *inputs),
        )

    def _make_chunk_kernel(
        self, kernel: Kernel, settings: KernelSettings, score: ScoreConfig
    ) -> ChunkKernel:
        chunk_kernel = kernel.make_chunk_kernel(settings, score)
        assert chunk_kernel is not None, "kernel_selection.raise_if_whole_rows_only refuses it"
        return chunk_kernel

    def on_one_device(self) -> Strategy:
        return type(self)(seq=1)

    def find_local_segments(
        self, starts_BM: Array, lengths_BM: Array, chunk_tokens: int
    ) -> "LocalSegments":
        """Finds the segments of this device's chunks."""
        chunks = [
            segments.clip_to_chunk(
                starts_BM, lengths_BM, first_token=number * chunk_tokens, num_tokens=chunk_tokens
            )
            for number in self.chunk_numbers(self.index)
        ]
        starts_RM, lengths_RM = stack_chunks(*chunks)
        mask_RC = segments.segment_mask(starts_RM, lengths_RM, chunk_tokens)
        return LocalSegments(starts_RM, lengths_RM, mask_RC)

    def segment_mask(
        self, starts_BM: Array, lengths_BM: Array, num_tokens: int
    ) -> Bool[Array, "B l"]:
        """True for this device's tokens that belong to a segment."""
        local = self.find_local_segments(starts_BM, lengths_BM, num_tokens // 2)
        return local.mask_RC.reshape(len(starts_BM), num_tokens)


class PartialAttention(NamedTuple):
    """Attention of some queries over a part of their keys."""

    out_BCHK: Float32[Array, "B C H K"]
    lse_BHC: Float32[Array, "B H C"]

    def split_chunks(self) -> tuple["PartialAttention", "PartialAttention"]:
        """Undoes `flatten_chunks`: the parts of the first and of the second chunk of each row."""
        pairs = [x.reshape(-1, 2, *x.shape[1:]) for x in self]
        return PartialAttention(*(x[:, 0] for x in pairs)), PartialAttention(
            *(x[:, 1] for x in pairs)
        )


class LocalSegments(NamedTuple):
    """Segments of this device's chunks. Chunks count as rows, both of a row one after the other."""

    starts_RM: Int32[Array, "R M"]
    lengths_RM: Int32[Array, "R M"]
    mask_RC: Bool[Array, "R C"]
    """True for tokens of a segment."""


def split_chunks(x_BlXK: Array) -> Array:
    """Splits a device's shard of each row into its two chunks: [B, 2, C, X, K]."""
    B, l = x_BlXK.shape[:2]
    return x_BlXK.reshape(B, 2, l // 2, *x_BlXK.shape[2:])


def flatten_chunks(x_B2: Array) -> Array:
    """Makes both chunks of each row rows of their own: [B, 2, ...] to [R, ...]."""
    return x_B2.reshape(-1, *x_B2.shape[2:])


def stack_chunks(first: Iterable[Array], last: Iterable[Array]) -> list[Array]:
    """Makes arrays of the first and of the last chunk of each row rows of their own."""
    return [flatten_chunks(jnp.stack(x, axis=1)) for x in zip(first, last, strict=True)]


def diagonal_forward(
    kernel: ChunkKernel, local_segments: LocalSegments, q_RCHK: Array, k_RCGK: Array, v_RCGK: Array
) -> PartialAttention:
    """Attention of chunks to themselves."""
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
    """dq, dk and dv of the attention of chunks to themselves, in float32."""
    gradients = kernel.backward(
        q_RCHK,
        k_RCGK,
        v_RCGK,
        out_RCHK,
        lse_RHC,
        dout_RCHK,
        local_segments.starts_RM,
        local_segments.lengths_RM,
    )
    dq, dk, dv = (_zero_outside(x, local_segments.mask_RC) for x in gradients)
    return dq, dk, dv


def off_diagonal_forward(
    kernel: ChunkKernel, block: OffDiagonalBlock, q_RCHK: Array, k_RDGK: Array, v_RDGK: Array
) -> PartialAttention:
    """Attention of chunks to keys before them. Nothing is computed if no segment spans both."""
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
    """dq, dk and dv of the attention of chunks to keys before them, in float32."""
    inputs = q_RCHK, k_RDGK, v_RDGK, out_RCHK, lse_RHC, dout_RCHK
    dq, dk, dv = _compute_if_any(block, kernel.off_diagonal_backward, *inputs)
    query_mask = block.query_mask(q_RCHK.shape[1])
    key_mask = block.key_mask(k_RDGK.shape[1])
    return _zero_outside(dq, query_mask), _zero_outside(dk, key_mask), _zero_outside(dv, key_mask)


def _compute_if_any(
    block: OffDiagonalBlock, compute: Callable[..., tuple[Array, ...]], *inputs: Array
) -> tuple[Array, ...]:
    """The kernel's results in its own dtype, or zeros if no row has a block.

    Results of a conditional are written to memory: in float32 they would be twice as large (ring of
    8, a million tokens: 3 GiB).
    """
    shapes = jax.eval_shape(compute, *inputs, block)

    def make_zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)

    return jax.lax.cond(block.is_any(), lambda: tuple(compute(*inputs, block)), make_zeros)


def merge(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention of queries over the keys of both parts."""
    lse_BHC = jnp.logaddexp(first.lse_BHC, second.lse_BHC)
    terms = []
    for part in (first, second):
        weight_BCH1 = jnp.exp(part.lse_BHC - lse_BHC).swapaxes(1, 2)[..., None]
        terms.append(part.out_BCHK * weight_BCH1)
    return PartialAttention(jnp.asarray(sum(terms)), lse_BHC)


def mask_partial(part: PartialAttention, is_seen: Array) -> PartialAttention:
    """The part if `is_seen`, a scalar, is true; otherwise attention over no keys."""
    return PartialAttention(
        jnp.where(is_seen, part.out_BCHK, 0.0), jnp.where(is_seen, part.lse_BHC, _EMPTY_LSE)
    )


def _make_partial(out_RCHK: Array, lse_RHC: Array, mask_RC: Array) -> PartialAttention:
    return PartialAttention(
        _zero_outside(out_RCHK, mask_RC), jnp.where(mask_RC[:, None], lse_RHC, _EMPTY_LSE)
    )


def _zero_outside(x_RCXK: Array, mask_RC: Array) -> Float[Array, "R C X K"]:
    """float32 values; 0 for tokens outside the mask, whatever the kernel has left there."""
    return jnp.where(mask_RC[..., None, None], x_RCXK.astype(jnp.float32), 0.0)
