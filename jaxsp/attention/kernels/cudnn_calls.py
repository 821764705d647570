"""XLA's calls of cuDNN's attention, by mask. The only module of this package that uses jax._src.

JAX's public function (`jax.nn.dot_product_attention`) is not used. Its custom_vjp cannot name the
output and the log-sum-exp for a remat policy. Before 0.11.1 it also multiplies the packed offsets
of K and V by the wrong number of heads (jax PR 39521). So this module binds the primitives under it
and computes the offsets.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as library
from jaxtyping import Array, Bool, Float, Int32

from jaxsp.attention.kernels import cudnn_bins
from jaxsp.attention.kernels.cudnn_bins import CallBins, PackedCall
from jaxsp.attention.kernels.kernel import Gradients, Saved, ScoreConfig
from jaxsp.attention.kernels.segments import OffDiagonalBlock, Segments

CUSTOM_CALL_PREFIX = "__cudnn$fmha"
"""Prefix of the custom call targets of cuDNN's attention in a program."""


def installed_version() -> tuple[int, int, int] | None:
    """Version of the installed cuDNN; None if JAX finds none."""
    if library.cuda_versions is None:
        return None
    number = library.check_cudnn_version()
    return number // 10000, number // 100 % 100, number % 100


def describe_version() -> str:
    """Returns the name of the library, with its version if JAX finds one. Example: cuDNN 9.28.0."""
    installed = installed_version()
    return "cuDNN" if installed is None else f"cuDNN {'.'.join(map(str, installed))}"


_ATTENTION_CALL_PATTERN = (
    r'^ *(?:ROOT )?\S+ = \((.*?)\) custom-call\(.*custom_call_target="'
    + re.escape(CUSTOM_CALL_PREFIX)
)
"""Pattern of a line of a compiled program that calls cuDNN's attention; the group is its
results."""


def read_workspace_bytes(program_text: str) -> int | None:
    """Size in bytes of the largest workspace of cuDNN's attention calls in a compiled program.

    The workspace is the last result of each call, `u8[size]`. XLA knows the size only if it
    compiles with a GPU present; otherwise the result stays `u8[0]`. Calls run one after another,
    so XLA's buffer assignment reuses the memory, and only the largest one counts.

    Args: text of the program, from `jax.stages.Compiled.as_text()`.
    Returns: None if no call has a workspace, as in every program that was compiled without a GPU.
    Source: AddWorkspace in openxla/xla xla/service/gpu/transforms/cudnn_custom_call_compiler.cc.
    """
    sizes = [
        int(size)
        for results in re.findall(_ATTENTION_CALL_PATTERN, program_text, re.MULTILINE)
        for size in re.findall(r"\bu8\[(\d+)\]", results)
    ]
    return max(sizes, default=0) or None


class CallMask(NamedTuple):
    """Mask of a call; by default, rows are whole and causal."""

    type: str = "CAUSAL"
    """A `MaskType` of the library: PADDING_CAUSAL and PADDING have lengths."""
    lengths: tuple[Int32[Array, "S"], Int32[Array, "S"]] | None = None
    """Number of queries, and of keys, of each row or bin."""
    starts_S: Int32[Array, "S"] | None = None
    """First token of each bin, counted over all rows; None: rows are not packed."""

    def operands(self, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        """query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets and page tables."""
        unused = jnp.zeros(0, q.dtype)
        lengths = self.lengths or (unused, unused)
        offsets = (unused, unused)
        if self.starts_S is not None:
            offsets = (self._find_offsets(self.starts_S, q), self._find_offsets(self.starts_S, k))
            lengths = (lengths[0].reshape(len(q), -1), lengths[1].reshape(len(q), -1))
        return q, k, v, unused, *lengths, *offsets, unused, unused

    def _find_offsets(self, starts_S: Array, x_RTXK: Array) -> Int32[Array, "R S_plus_1"]:
        """Offset of each bin in an array's memory, in elements of this array.

        Unused bins are at the end of the memory, and so is the extra offset at the end of each row.
        """
        assert self.lengths is not None
        R, T, X, K = x_RTXK.shape
        end = R * T
        starts_S = jnp.where(self.lengths[0] > 0, starts_S, end)
        return jnp.concatenate([starts_S, jnp.full(R, end, jnp.int32)]).reshape(R, -1) * (X * K)

    def params(self, score: ScoreConfig, q: Array) -> dict[str, Any]:
        """Static parameters of a call.

        cuDNN keeps the scores where key + window > query and, as it is causal, key <= query. Both
        are counted from the bin's first token, and the window includes the token itself. A window
        as long as the bins is left out.
        Source: sliding_window_mask in NVIDIA/cudnn-frontend utils/attn_score_modifiers.h, aligned
            to the top left, with the left bound that openxla/xla
            xla/stream_executor/cuda/cuda_dnn.cc sets to sliding_window_length.
        """
        window = score.window
        if window is not None and window >= q.shape[1]:
            window = None
        assert window is None or self.type != "PADDING", "block with window"
        assert score.softcap is None, "cudnn_limits.unsupported_reasons refuses it"
        params = {
            "scale": score.find_scale(q.shape[-1]),
            "seed": 42,
            "dropout_rate": 0.0,
            "variadic_args": (False, False),
            "mask_type": library.MaskType[self.type],
            "layout": library.AttentionLayout.BTNH.value,
            "sliding_window_length": window,
        }
        if jax.__version_info__ >= (0, 12):  # has functions of the scores, which jaxsp does not use
            params |= {"score_mod_name": None, "score_mod_jaxpr": None}
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedCall:
    """One call of the library with its mask, for one chunk of the heads."""

    score: ScoreConfig
    mask: CallMask
    inside_BL: Bool[Array, "B L"] | None = None
    """Tokens whose results are defined; None: not known, all results are used."""

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Output and log-sum-exp. Shapes: those of `AttentionFunctions`."""
        params = self.mask.params(self.score, q)
        operands = self.mask.operands(q, k, v)
        out, lse = library._dot_product_attention_fwd_p.bind(*operands, **params, is_training=True)
        return out, lse

    def backward(self, saved: Saved) -> Gradients:
        """dq, dk and dv."""
        q, k, v, out, dout, lse = saved
        params = self.mask.params(self.score, q)
        operands = self.mask.operands(q, k, v)
        dq, dk, dv = library._dot_product_attention_bwd_p.bind(*operands, lse, out, dout, **params)
        return dq, dk, dv


def make_off_diagonal_call(score: ScoreConfig, block: OffDiagonalBlock) -> MaskedCall:
    """Queries of each row over keys before them."""
    # At least 1, because a softmax over no keys is NaN. Results of empty blocks are not used
    lengths = (jnp.maximum(block.num_queries_B, 1), jnp.maximum(block.num_keys_B, 1))
    return MaskedCall(score=score, mask=CallMask("PADDING", lengths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeRowCall(MaskedCall):
    """Causal attention of rows of one segment, with padding only after it; the output is NaN if
    there is some before."""

    starts_at_0_B: Array

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse_BhL = super().forward(q, k, v)
        starts_at_0_B111 = self.starts_at_0_B[:, None, None, None]
        nan_B111 = jnp.where(starts_at_0_B111, 0.0, jnp.nan).astype(out.dtype)
        return jnp.where(starts_at_0_B111, out, nan_B111), lse_BhL

    def backward(self, saved: Saved) -> Gradients:
        assert self.inside_BL is not None
        # Queries at padding attend to the segment before them, and must add 0 to its gradients:
        # with MASKED_LSE, their probabilities exp(score - LSE) are 0
        lse_BhL = jnp.where(self.inside_BL[:, None], saved.lse, cudnn_bins.MASKED_LSE)
        return super().backward(saved._replace(lse=lse_BhL))


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
        out, lse_ShT = super().forward(*map(self._split, (q, k, v)))
        lse_Nh = cudnn_bins.compress_lse(lse_ShT, self.bins)
        return self._join(out, q), lse_Nh.reshape(B, L, h).swapaxes(1, 2)

    def backward(self, saved: Saved) -> Gradients:
        lse_Nh = saved.lse.swapaxes(1, 2).reshape(-1, saved.q.shape[2])
        lse_ShT = cudnn_bins.expand_lse(lse_Nh, self.bins, bin_tokens=self.call.bin_tokens)
        q, k, v, out, dout = map(self._split, saved[:5])
        dqkv = super().backward(Saved(q, k, v, out, dout, lse_ShT))
        dq, dk, dv = map(self._join, dqkv, saved[:3])
        return dq, dk, dv

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
        call = WholeRowCall(
            score=score, mask=CallMask(), inside_BL=inside_BL, starts_at_0_B=starts_at_0_B
        )
        return [call], inside_BL
    split = {"row_tokens": row_tokens, "capacity_factor": capacity_factor}
    if tables is None:
        tables = cudnn_bins.make_tables(starts_BM, lengths_BM, **split)
    assert tables is not None
    calls: list[MaskedCall] = []
    for index, packed_call in enumerate(cudnn_bins.plan_calls(num_rows=B, max_segments=M, **split)):
        bins = tables.get_bins(index)
        lengths_S = jnp.maximum(bins.lengths_S, 1) if copies_segments else bins.lengths_S
        starts_S = None if copies_segments else bins.starts_S
        calls.append(
            BinCall(
                score=score,
                mask=CallMask("PADDING_CAUSAL", (lengths_S, lengths_S), starts_S),
                inside_BL=(bins.bin_N >= 0).reshape(B, row_tokens),
                call=packed_call,
                bins=bins,
                copies_segments=copies_segments,
            )
        )
    return calls, (tables.segment_N >= 0).reshape(B, row_tokens)
