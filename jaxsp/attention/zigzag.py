"""Zigzag: the shared part of ring and all-gather, which keep several chunks of queries per device.

Chunks are dealt to the devices back and forth (core/layout.py). The chunks attend to themselves
with the kernel's packed causal attention. Of the tokens before a chunk, they see one block: the
part of the one segment that reaches from there into the chunk (see also chunk_calls.py). Partial
results are merged in float32 by their log-sum-exps. The backward pass uses the merged log-sum-exp,
so its partial results are only added. Layers with a sliding window do none of this: see halo.py.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

EMPTY_LSE = -1e30
"""Log-sum-exp of no keys. It is finite, so that differences are never NaN."""


MIN_CHUNK_TOKENS = 1024
"""Divisor of the tokens of a chunk if `auto` chooses more than 2 per device. Each chunk adds calls
of the kernel, and the memory of cuDNN's slots grows if chunks are short."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZigzagStrategy(ChunkGroup, Strategy, abc.ABC):
    """Base class of strategies whose devices keep their queries."""

    options = frozenset({"chunks_per_device"})

    @abc.abstractmethod
    def forward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        tables: Any = None,
    ) -> tuple[Float[Array, "B l H K"], Float32[Array, "B H l"]]:
        """Output and log-sum-exp of this device's queries, inside shard_map.

        Args: tables: result of `make_tables`.
        """

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
        tables: Any = None,
    ) -> tuple[Float[Array, "B l H K"], Float[Array, "B l G K"], Float[Array, "B l G K"]]:
        """dq, dk and dv of this device's tokens. Args: tables: result of `make_tables`."""

    @classmethod
    def candidates(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> Sequence["ZigzagStrategy"]:
        chunks = choose_chunks_per_device(requested, workload, degree=seq)
        return [cls(seq=seq, chunks_per_device=chunks)]

    @property
    def description(self) -> str:
        return super().description + self._chunks_suffix

    @property
    def _chunks_suffix(self) -> str:
        """End of the description if devices hold more than the 2 chunks of one round."""
        if self.chunks_per_device == 2:
            return ""
        return f" ({self.chunks_per_device} chunks each)"

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        chunks = self.chunk_workload(workload)
        if not workload.has_window:
            return chunks
        return dataclasses.replace(
            workload.to_kernel_workload(),
            num_rows=chunks.num_rows,
            row_tokens=Halo.from_workload(workload, layout=self.layout).row_tokens,
            chunks_per_row=chunks.chunks_per_row,
            chunks_per_device=chunks.chunks_per_device,
        )

    def chunk_workload(self, workload: LayerWorkload) -> KernelWorkload:
        """The workload of layers without a window."""
        chunks_per_row = self.layout.num_chunks
        chunk_tokens = workload.row_tokens // chunks_per_row
        return dataclasses.replace(
            workload.to_kernel_workload(),
            num_rows=self.chunks_per_device * workload.num_rows,
            row_tokens=chunk_tokens,
            chunks_per_row=chunks_per_row,
            chunks_per_device=self.chunks_per_device,
            num_earlier_keys=chunk_tokens,
            window=None,
        )

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        if workload.has_window:
            return halo_exchange.sent_bytes(workload, layout=self.layout)
        return self.chunk_sent_bytes(workload)

    @abc.abstractmethod
    def chunk_sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        """`sent_bytes` of layers without a window."""

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        q, kv = workload.qkv_bytes
        inputs = 3 * q + kv  # with the output and its gradient
        if not workload.has_window:
            return inputs + 4 * (q + kv)  # float32 sums, and what travels
        halo = Halo.from_workload(workload, layout=self.layout)
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

        def attend_shards(*inputs: Array, tables: Any = None, **options: Any) -> Array:
            return attend(*inputs, tables, **options)

        return mask_padding(kernel, attend_shards, self.segment_mask)

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
        return type(self)(seq=1, chunks_per_device=self.chunks_per_device)

    def find_local_segments(
        self, starts_BM: Array, lengths_BM: Array, chunk_tokens: int
    ) -> "LocalSegments":
        """Finds the segments of this device's chunks."""

        def clip(first_token: Array) -> tuple[Array, Array]:
            return segments.clip_to_chunk(
                starts_BM, lengths_BM, first_token=first_token, num_tokens=chunk_tokens
            )

        first_tokens_k = self.chunk_numbers(self.index) * chunk_tokens
        starts_BkM, lengths_BkM = jax.vmap(clip, out_axes=1)(first_tokens_k)
        starts_RM = starts_BkM.reshape(-1, starts_BkM.shape[-1])
        lengths_RM = lengths_BkM.reshape(starts_RM.shape)
        mask_RC = segments.segment_mask(starts_RM, lengths_RM, chunk_tokens)
        return LocalSegments(starts_RM, lengths_RM, mask_RC)

    def segment_mask(
        self, starts_BM: Array, lengths_BM: Array, num_tokens: int
    ) -> Bool[Array, "B l"]:
        """True for this device's tokens that belong to a segment."""
        local = self.find_local_segments(
            starts_BM, lengths_BM, num_tokens // self.chunks_per_device
        )
        return local.mask_RC.reshape(len(starts_BM), num_tokens)


def choose_chunks_per_device(
    requested: AttentionConfig, workload: LayerWorkload, *, degree: int
) -> int:
    """Chooses the requested number; `auto` is the largest with chunks of MIN_CHUNK_TOKENS.

    2 chunks balance rows of one document. With windows, the halos grow with the number of chunks.

    Args: degree: number of devices that the chunks of a row are dealt to.
    """
    if requested.chunks_per_device != "auto":
        return requested.chunks_per_device
    if workload.has_windowed_kinds or workload.max_segments == 1:
        return 2
    row_tokens = math.gcd(workload.row_tokens, workload.shortest_row_tokens or workload.row_tokens)
    num_devices = workload.row_tokens // workload.tokens_per_device
    return next(
        chunks
        for chunks in (16, 8, 4, 2)
        if chunks == 2
        or (
            row_tokens % (MIN_CHUNK_TOKENS * chunks * degree) == 0
            and row_tokens % (chunks * num_devices) == 0
        )
    )


class PartialAttention(NamedTuple):
    """Attention of some queries over a part of their keys."""

    out_BCHK: Float32[Array, "B C H K"]
    lse_BCH: Float32[Array, "B C H"]


class LocalSegments(NamedTuple):
    """Segments of this device's chunks. Chunks count as rows, those of a row one after another."""

    starts_RM: Int32[Array, "R M"]
    lengths_RM: Int32[Array, "R M"]
    mask_RC: Bool[Array, "R C"]
    """True for tokens of a segment."""


def to_chunk_rows(x_Bl: Array, chunks_per_device: int) -> Array:
    """Makes chunks rows of their own: [B, l, ...] to [R, C, ...]."""
    B, l = x_Bl.shape[:2]
    return x_Bl.reshape(B * chunks_per_device, l // chunks_per_device, *x_Bl.shape[2:])


def from_chunk_rows(x_RC: Array, num_rows: int) -> Array:
    """Undoes `to_chunk_rows`."""
    return x_RC.reshape(num_rows, -1, *x_RC.shape[2:])


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
    lse_BCH = jnp.logaddexp(first.lse_BCH, second.lse_BCH)
    terms = [part.out_BCHK * jnp.exp(part.lse_BCH - lse_BCH)[..., None] for part in (first, second)]
    return PartialAttention(jnp.asarray(sum(terms)), lse_BCH)


def _make_partial(out_RCHK: Array, lse_RHC: Array, mask_RC: Array) -> PartialAttention:
    return PartialAttention(
        _zero_outside(out_RCHK, mask_RC),
        jnp.where(mask_RC[..., None], lse_RHC.swapaxes(1, 2), EMPTY_LSE),
    )


def _zero_outside(x_RCXK: Array, mask_RC: Array) -> Float[Array, "R C X K"]:
    """float32 values; 0 for tokens outside the mask, whatever the kernel has left there."""
    return jnp.where(mask_RC[..., None, None], x_RCXK.astype(jnp.float32), 0.0)
