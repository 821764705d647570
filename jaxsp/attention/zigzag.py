"""Zigzag: the shared part of ring and all-gather, which keep several chunks of queries per device.

Chunks are dealt to the devices back and forth (core/layout.py). The attention of each is computed
in parts (partial_attention.py), except in layers with a sliding window: see halo.py.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.attention import halo
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.halo import Halo
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    AttentionWorkload,
    ChunkKernel,
    Gradients,
    Kernel,
    KernelSettings,
    Saved,
    ScoreConfig,
)
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.partial_attention import LocalSegments
from jaxsp.attention.strategy import TokenExchange
from jaxsp.core.layout import Layout

MIN_CHUNK_TOKENS = 1024
"""Divisor of the tokens of a chunk if `auto` chooses more than 2 per device. Each chunk adds calls
of the kernel, and the memory of cuDNN's bins grows if chunks are short."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zigzag(TokenExchange):
    """Base class of exchanges whose devices keep their queries."""

    options = frozenset({"chunks_per_device"})

    chunks_per_device: int = 2
    """Number of chunks of a row that a device holds: a power of 2, at least 2."""

    @abc.abstractmethod
    def forward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        segments: Segments,
    ) -> tuple[Float[Array, "B l H K"], Float32[Array, "B H l"]]:
        """Output and log-sum-exp of this device's queries, inside shard_map."""

    @abc.abstractmethod
    def backward(self, kernel: ChunkKernel, saved: Saved, segments: Segments) -> Gradients:
        """dq, dk and dv of this device's tokens."""

    @abc.abstractmethod
    def chunk_sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        """`sent_bytes` of layers without a window."""

    @classmethod
    def from_config(
        cls, requested: AttentionConfig, workload: AttentionWorkload, *, degree: int, **options: Any
    ) -> TokenExchange:
        """The chunks are as many as requested; `auto`: as many as have MIN_CHUNK_TOKENS.

        2 chunks balance rows of one document. With windows, halos grow with the number of chunks.
        """
        chunks: Any = requested.chunks_per_device
        if chunks == "auto":
            is_few = workload.has_windowed_kinds or workload.max_segments == 1
            fits = lambda n: workload.row_tokens % (MIN_CHUNK_TOKENS * n * degree) == 0
            chunks = 2 if is_few else next(filter(fits, (16, 8, 4)), 2)
        return cls(degree=degree, chunks_per_device=chunks, **options)

    @property
    def layout(self) -> Layout:
        return Layout(degree=self.degree, chunks_per_device=self.chunks_per_device)

    @property
    def description(self) -> str:
        if self.chunks_per_device == 2:  # those of one round
            return super().description
        return f"{super().description} ({self.chunks_per_device} chunks each)"

    def kernel_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        halo = self._find_halo(workload)
        return dataclasses.replace(
            workload,
            chunk_tokens=halo.row_tokens if workload.has_window else halo.chunk_tokens,
            num_earlier_keys=0 if workload.has_window else halo.chunk_tokens,
            window=workload.window if workload.has_window else None,
            chunks_per_row=self.layout.num_chunks,
            chunks_per_device=self.chunks_per_device,
        )

    def sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        if not workload.has_window:
            return self.chunk_sent_bytes(workload)
        hop_tokens = self._find_halo(workload).hop_tokens
        if self.degree == 1 or not hop_tokens:
            return {}
        # k and v forward and backward, and their gradients: see `halo.return_halos`
        num_chunks = self.chunks_per_device * workload.num_rows
        kv_elements = num_chunks * 2 * workload.num_kv_heads * workload.head_dim
        in_float32 = sum(hop_tokens[1:-1])
        passes = 3 * sum(hop_tokens) - in_float32
        if workload.remat == "full" and workload.has_other_kinds:
            passes += sum(hop_tokens)
        size = passes * workload.itemsize + in_float32 * 4
        return {"collective-permute": kv_elements * size}

    def _find_halo(self, workload: AttentionWorkload) -> Halo:
        """The halo of layers with this window."""
        num_chunks = self.layout.num_chunks
        return Halo(
            window=workload.window or 1,
            chunk_tokens=workload.row_tokens // num_chunks,
            num_chunks=num_chunks,
        )

    def make_functions(
        self, kernel: Kernel, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        chunks = kernel.make_chunk_kernel(settings, score)
        if score.window is not None:
            return halo.make_functions(self, chunks, score.window)
        return AttentionFunctions(
            functools.partial(self.forward, chunks), functools.partial(self.backward, chunks)
        )

    def on_one_device(self) -> TokenExchange:
        return type(self)(degree=1, chunks_per_device=self.chunks_per_device)

    def find_local_segments(
        self, starts_BM: Array, lengths_BM: Array, chunk_tokens: int
    ) -> LocalSegments:
        """Finds the segments of this device's chunks."""
        clip = lambda first_token: segments.clip_to_chunk(
            starts_BM, lengths_BM, first_token=first_token, num_tokens=chunk_tokens
        )
        first_tokens_k = self.chunk_numbers(self.index) * chunk_tokens
        starts_BkM, lengths_BkM = jax.vmap(clip, out_axes=1)(first_tokens_k)
        starts_RM = starts_BkM.reshape(-1, starts_BkM.shape[-1])
        lengths_RM = lengths_BkM.reshape(starts_RM.shape)
        mask_RC = segments.segment_mask(starts_RM, lengths_RM, chunk_tokens)
        return LocalSegments(Segments(starts_RM, lengths_RM), mask_RC)

    def segment_mask(
        self, starts_BM: Array, lengths_BM: Array, num_tokens: int
    ) -> Bool[Array, "B l"]:
        local = self.find_local_segments(
            starts_BM, lengths_BM, num_tokens // self.chunks_per_device
        )
        return local.mask_RC.reshape(len(starts_BM), num_tokens)
