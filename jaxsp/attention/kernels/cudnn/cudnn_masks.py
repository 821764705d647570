"""Calls of cuDNN's attention by mask: packed bins, whole rows and off-diagonal blocks."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.attention.kernels.cudnn import cudnn_bins, cudnn_calls
from jaxsp.attention.kernels.cudnn.cudnn_bins import CallBins, PackedCall, SegmentTables
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.kernels.segments import OffDiagonalBlock


@runtime_checkable
class MaskedCall(Protocol):
    """One call of the library with its mask, for one chunk of the heads."""

    @property
    def inside_BL(self) -> Bool[Array, "B L"] | None:
        """Tokens whose results are defined; None: not known, all results are used."""

    def forward(
        self, q: Array, k: Array, v: Array
    ) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
        """Output and log-sum-exp."""

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
        """dq, dk and dv."""


@dataclasses.dataclass(frozen=True)
class OffDiagonalCall:
    """Queries of each row over keys before them."""

    block: OffDiagonalBlock
    score: ScoreConfig
    inside_BL: None = None

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return cudnn_calls.forward(self.block, self.score, q, k, v)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        return cudnn_calls.backward(self.block, self.score, lse_BhL, q, k, v, out, dout)


@dataclasses.dataclass(frozen=True)
class WholeRowCall:
    """Rows of one segment, with padding only after it; the output is NaN if there is some before.

    cuDNN computes them without a mask: causal attention of the whole row (`call_mask=None`).
    """

    inside_BL: Array
    starts_at_0_B: Array
    score: ScoreConfig

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse_BhL = cudnn_calls.forward(call_mask=None, score=self.score, q=q, k=k, v=v)
        starts_at_0_B111 = self.starts_at_0_B[:, None, None, None]
        nan_B111 = jnp.where(starts_at_0_B111, 0.0, jnp.nan).astype(out.dtype)
        return jnp.where(starts_at_0_B111, out, nan_B111), lse_BhL

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        # Queries at padding attend to the segment before them, and must add 0 to its gradients:
        # with MASKED_LSE, their probabilities exp(score - LSE) are 0
        lse_BhL = jnp.where(self.inside_BL[:, None], lse_BhL, cudnn_bins.MASKED_LSE)
        return cudnn_calls.backward(
            call_mask=None, score=self.score, lse=lse_BhL, q=q, k=k, v=v, out=out, dout=dout
        )


@dataclasses.dataclass(frozen=True)
class BinCall:
    """The segments of one range of lengths, each in a bin."""

    call: PackedCall
    bins: CallBins
    score: ScoreConfig
    inside_BL: Array

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        B, L, h, _ = q.shape
        arrays = map(self._as_bin_rows, (q, k, v))
        out, lse_ShT = cudnn_calls.forward(self.bins, self.score, *arrays)
        lse_Nh = cudnn_bins.compress_lse(lse_ShT, self.bins)
        return out.reshape(q.shape), lse_Nh.reshape(B, L, h).swapaxes(1, 2)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        lse_Nh = lse_BhL.swapaxes(1, 2).reshape(-1, q.shape[2])
        lse_ShT = cudnn_bins.expand_lse(lse_Nh, self.bins, bin_tokens=self.call.bin_tokens)
        arrays = map(self._as_bin_rows, (q, k, v, out, dout))
        dq, dk, dv = cudnn_calls.backward(self.bins, self.score, lse_ShT, *arrays)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)

    def _as_bin_rows(self, x_BLXK: Array) -> Array:
        """The same memory as more and shorter rows, each as long as a bin."""
        return x_BLXK.reshape(self.call.num_rows, self.call.bin_tokens, *x_BLXK.shape[2:])


@dataclasses.dataclass(frozen=True)
class CopiedCall:
    """The segments of one range of lengths, each copied to a row of its own as long as a bin.

    For GPUs before Hopper, on which cuDNN computes no packed rows.

    Memory: copies of the inputs and results of all bins, `capacity_factor` times the rows.
    """

    call: PackedCall
    bins: CallBins
    score: ScoreConfig
    inside_BL: Array

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        B, L, h, _ = q.shape
        segments = cudnn_calls.SegmentRows(self.bins.lengths_S)
        out, lse_ShT = cudnn_calls.forward(segments, self.score, *map(self._copy, (q, k, v)))
        lse_Nh = cudnn_bins.compress_lse(lse_ShT, self.bins)
        return self._copy_back(out, q), lse_Nh.reshape(B, L, h).swapaxes(1, 2)

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, dout: Array, lse_BhL: Array
    ) -> tuple[Array, Array, Array]:
        segments = cudnn_calls.SegmentRows(self.bins.lengths_S)
        lse_Nh = lse_BhL.swapaxes(1, 2).reshape(-1, q.shape[2])
        lse_ShT = cudnn_bins.expand_lse(lse_Nh, self.bins, bin_tokens=self.call.bin_tokens)
        arrays = map(self._copy, (q, k, v, out, dout))
        dq, dk, dv = cudnn_calls.backward(segments, self.score, lse_ShT, *arrays)
        return self._copy_back(dq, q), self._copy_back(dk, k), self._copy_back(dv, v)

    def _copy(self, x_BLXK: Array) -> Float[Array, "S T X K"]:
        """Copies each of S segments to a row of T tokens, the length of a bin; X heads."""
        x_NXK = x_BLXK.reshape(-1, *x_BLXK.shape[2:])
        return x_NXK[self.bins.tokens_ST(self.call.bin_tokens)]

    def _copy_back(self, x_STXK: Array, like: Array) -> Array:
        """Undoes `_copy`; values at tokens of no bin are undefined."""
        return x_STXK[self.bins.bin_N, self.bins.position_N].reshape(like.shape)


def make_row_calls(
    starts_BM: Array,
    lengths_BM: Array,
    tables: SegmentTables | None,
    row_tokens: int,
    *,
    capacity_factor: int,
    score: ScoreConfig,
    copies_segments: bool = False,
) -> tuple[list[MaskedCall], Bool[Array, "B L"]]:
    """The calls that compute rows of segments, and a mask of the tokens that are in a segment.

    Args: copies_segments: True on GPUs without packed calls.
    """
    B, M = starts_BM.shape
    if M == 1:
        inside_BL = jnp.arange(row_tokens, dtype=jnp.int32)[None] < (starts_BM + lengths_BM)
        return [WholeRowCall(inside_BL, starts_BM[:, 0] == 0, score)], inside_BL
    split = {"row_tokens": row_tokens, "capacity_factor": capacity_factor}
    if tables is None:
        tables = cudnn_bins.make_tables(starts_BM, lengths_BM, **split)
    assert tables is not None
    calls: list[MaskedCall] = []
    for index, packed_call in enumerate(cudnn_bins.plan_calls(num_rows=B, max_segments=M, **split)):
        bins = tables.get_bins(index)
        inside_BL = (bins.bin_N >= 0).reshape(B, row_tokens)
        call_class = CopiedCall if copies_segments else BinCall
        calls.append(call_class(packed_call, bins, score, inside_BL))
    return calls, (tables.segment_N >= 0).reshape(B, row_tokens)
