"""Calls of cuDNN's attention by mask: packed bins, whole rows and off-diagonal blocks."""

import abc
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.attention.kernels.cudnn import cudnn_bins, cudnn_calls
from jaxsp.attention.kernels.cudnn.cudnn_bins import CallBins, PackedCall
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.kernels.residuals import Gradients, Saved
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedCall(abc.ABC):
    """One call of the library with its mask, for one chunk of the heads."""

    score: ScoreConfig
    inside_BL: Bool[Array, "B L"] | None = None
    """Tokens whose results are defined; None: not known, all results are used."""

    @abc.abstractmethod
    def forward(
        self, q: Array, k: Array, v: Array
    ) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
        """Output and log-sum-exp."""

    @abc.abstractmethod
    def backward(self, saved: Saved) -> Gradients: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffDiagonalCall(MaskedCall):
    """Queries of each row over keys before them."""

    block: OffDiagonalBlock

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return cudnn_calls.forward(self.block, self.score, q, k, v)

    def backward(self, saved: Saved) -> Gradients:
        return cudnn_calls.backward(self.block, self.score, saved)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeRowCall(MaskedCall):
    """Rows of one segment, with padding only after it; the output is NaN if there is some before.

    cuDNN computes them without a mask: causal attention of the whole row (`call_mask=None`).
    """

    starts_at_0_B: Array

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse_BhL = cudnn_calls.forward(None, self.score, q, k, v)
        starts_at_0_B111 = self.starts_at_0_B[:, None, None, None]
        nan_B111 = jnp.where(starts_at_0_B111, 0.0, jnp.nan).astype(out.dtype)
        return jnp.where(starts_at_0_B111, out, nan_B111), lse_BhL

    def backward(self, saved: Saved) -> Gradients:
        assert self.inside_BL is not None
        # Queries at padding attend to the segment before them, and must add 0 to its gradients:
        # with MASKED_LSE, their probabilities exp(score - LSE) are 0
        lse_BhL = jnp.where(self.inside_BL[:, None], saved.lse, cudnn_bins.MASKED_LSE)
        return cudnn_calls.backward(None, self.score, saved._replace(lse=lse_BhL))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinCall(MaskedCall):
    """The segments of one range of lengths, each in a bin.

    GPUs before Hopper compute no packed rows: there, each segment is copied to a row of its own as
    long as a bin.

    Memory: with copies, those of the inputs and results of all bins, `capacity_factor` times the
    rows.
    """

    call: PackedCall
    bins: CallBins
    copies_segments: bool

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        B, L, h, _ = q.shape
        out, lse_ShT = cudnn_calls.forward(self._mask, self.score, *map(self._split, (q, k, v)))
        lse_Nh = cudnn_bins.compress_lse(lse_ShT, self.bins)
        return self._join(out, q), lse_Nh.reshape(B, L, h).swapaxes(1, 2)

    def backward(self, saved: Saved) -> Gradients:
        lse_Nh = saved.lse.swapaxes(1, 2).reshape(-1, saved.q.shape[2])
        lse_ShT = cudnn_bins.expand_lse(lse_Nh, self.bins, bin_tokens=self.call.bin_tokens)
        q, k, v, out, dout, _ = saved
        q_T, k_T, v_T, out_T, dout_T = map(self._split, (q, k, v, out, dout))
        in_bins = Saved(q_T, k_T, v_T, out_T, dout_T, lse_ShT)
        dq, dk, dv = cudnn_calls.backward(self._mask, self.score, in_bins)
        return self._join(dq, q), self._join(dk, k), self._join(dv, v)

    @property
    def _mask(self) -> cudnn_calls.CallMask:
        return cudnn_calls.SegmentRows(self.bins.lengths_S) if self.copies_segments else self.bins

    def _split(self, x_BLXK: Array) -> Float[Array, "S T X K"]:
        """S rows of T tokens, the length of a bin: the same memory, or copies of segments."""
        if not self.copies_segments:
            return x_BLXK.reshape(self.call.num_rows, self.call.bin_tokens, *x_BLXK.shape[2:])
        x_NXK = x_BLXK.reshape(-1, *x_BLXK.shape[2:])
        return x_NXK[self.bins.tokens_ST(self.call.bin_tokens)]

    def _join(self, x_STXK: Array, like: Array) -> Array:
        """Undoes `_split`; values at tokens of no bin are undefined."""
        if self.copies_segments:
            x_STXK = x_STXK[self.bins.bin_N, self.bins.position_N]
        return x_STXK.reshape(like.shape)


def make_row_calls(
    segments: Segments,
    row_tokens: int,
    *,
    capacity_factor: int,
    score: ScoreConfig,
    copies_segments: bool,
) -> tuple[list[MaskedCall], Bool[Array, "B L"]]:
    """The calls that compute rows of segments, and a mask of the tokens that are in a segment."""
    starts_BM, lengths_BM, tables = segments
    B, M = starts_BM.shape
    if M == 1:
        inside_BL = jnp.arange(row_tokens, dtype=jnp.int32)[None] < (starts_BM + lengths_BM)
        starts_at_0_B = starts_BM[:, 0] == 0
        call = WholeRowCall(score=score, inside_BL=inside_BL, starts_at_0_B=starts_at_0_B)
        return [call], inside_BL
    split = {"row_tokens": row_tokens, "capacity_factor": capacity_factor}
    if tables is None:
        tables = cudnn_bins.make_tables(starts_BM, lengths_BM, **split)
    assert tables is not None
    calls: list[MaskedCall] = []
    for index, packed_call in enumerate(cudnn_bins.plan_calls(num_rows=B, max_segments=M, **split)):
        bins = tables.get_bins(index)
        calls.append(
            BinCall(
                score=score,
                inside_BL=(bins.bin_N >= 0).reshape(B, row_tokens),
                call=packed_call,
                bins=bins,
                copies_segments=copies_segments,
            )
        )
    return calls, (tables.segment_N >= 0).reshape(B, row_tokens)
