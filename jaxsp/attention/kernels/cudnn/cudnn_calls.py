"""XLA's calls of cuDNN's attention. The only module of this package that uses jax._src.

JAX's public function (`jax.nn.dot_product_attention`) is not used. Its custom_vjp cannot name the
output and the log-sum-exp for a remat policy. Before 0.11.1 it also multiplies the packed offsets
of K and V by the wrong number of heads (jax PR 39521). So this module binds the primitives under it
and computes the offsets.
"""

import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxsp.attention.kernels.cudnn.cudnn_bins import CallBins
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.kernels.residuals import Gradients, Saved
from jaxsp.attention.kernels.segments import OffDiagonalBlock

CUSTOM_CALL_PREFIX = "__cudnn$fmha"
"""Prefix of the custom call targets of cuDNN's attention in a program."""

TESTED_JAX_VERSIONS = "0.10.1 to 0.12.0"
"""Versions of JAX whose private functions this module can call."""

_OPERANDS = (
    "query",
    "key",
    "value",
    "bias",
    "q_seqlen",
    "kv_seqlen",
    "q_offsets",
    "kv_offsets",
    "page_table_k",
    "page_table_v",
)
_BACKWARD_OPERANDS = ("activation", "fwd_output", "grad_output")
_PARAMS = (
    "scale",
    "seed",
    "dropout_rate",
    "variadic_args",
    "mask_type",
    "layout",
    "sliding_window_length",
)
_EXTRA_PARAMS_0_12 = {"score_mod_name": None, "score_mod_jaxpr": None}
"""Parameters that jax 0.12 adds, for a function of the scores, which jaxsp does not use."""


class SegmentRows(NamedTuple):
    """Rows of one segment each, which begins at the row's first token."""

    lengths_S: Int32[Array, "S"]


CallMask = CallBins | SegmentRows | OffDiagonalBlock | None
"""Mask of a call: bins of packed rows, rows of one segment, off-diagonal blocks, or None for
whole rows."""


def describe_unsupported_jax() -> str | None:
    """Reason why this version of JAX cannot call cuDNN; None if it can."""
    if _library() is None or _extra_params() is None:
        return (
            f"needs private functions of JAX that jax {jax.__version__} has changed; "
            f"jaxsp supports jax {TESTED_JAX_VERSIONS}"
        )
    return None


def installed_version() -> tuple[int, int, int] | None:
    """Version of the installed cuDNN; None if JAX finds none."""
    library = _library()
    if library is None or library.cuda_versions is None:
        return None
    number = library.check_cudnn_version()
    return number // 10000, number // 100 % 100, number % 100


def describe_version() -> str:
    """Returns the name of the library, with its version if JAX finds one. Example: cuDNN 9.28.0."""
    installed = installed_version()
    if installed is None:
        return "cuDNN"
    return f"cuDNN {'.'.join(map(str, installed))}"


def forward(
    call_mask: CallMask, score: ScoreConfig, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Output and log-sum-exp.

    Shapes: the log-sum-exp is f32[B, h, L] for whole rows and off-diagonal blocks, and f32[S, h, T]
        for bins and rows of one segment, undefined after the end of each segment.
    """
    operands = _operands(q, k, v, call_mask)
    params = _primitive_params(q, call_mask, score)
    out, lse = _library()._dot_product_attention_fwd_p.bind(*operands, **params, is_training=True)
    return out, lse


def backward(call_mask: CallMask, score: ScoreConfig, saved: Saved) -> Gradients:
    """dq, dk and dv; undefined at tokens of no segment if the call has bins or segments."""
    q, k, v, out, dout, lse = saved
    operands = _operands(q, k, v, call_mask)
    params = _primitive_params(q, call_mask, score)
    dq, dk, dv = _library()._dot_product_attention_bwd_p.bind(*operands, lse, out, dout, **params)
    return dq, dk, dv


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


_ATTENTION_CALL_PATTERN = (
    r'^ *(?:ROOT )?\S+ = \((.*?)\) custom-call\(.*custom_call_target="'
    + re.escape(CUSTOM_CALL_PREFIX)
)
"""Pattern of a line of a compiled program that calls cuDNN's attention; the group is its
results."""


def _operands(q: Array, k: Array, v: Array, call_mask: CallMask) -> tuple[Array, ...]:
    """Arrays of a call, in the order of _OPERANDS."""
    unused = jnp.zeros(0, q.dtype)
    lengths = (unused, unused)
    offsets = (unused, unused)
    if isinstance(call_mask, OffDiagonalBlock):
        # At least 1, because a softmax over no keys is NaN. Results of empty blocks are not used.
        lengths = (jnp.maximum(call_mask.num_queries_B, 1), jnp.maximum(call_mask.num_keys_B, 1))
    elif isinstance(call_mask, SegmentRows):
        lengths_S = jnp.maximum(call_mask.lengths_S, 1)
        lengths = (lengths_S, lengths_S)
    elif call_mask is not None:
        lengths_RS = call_mask.lengths_S.reshape(len(q), -1)
        lengths = (lengths_RS, lengths_RS)
        offsets = (_bin_offsets(call_mask, q), _bin_offsets(call_mask, k))
    return q, k, v, unused, *lengths, *offsets, unused, unused


def _bin_offsets(bins: CallBins, x_RTXK: Array) -> Int32[Array, "R S_plus_1"]:
    """Offset of each bin in an array's memory, in elements of this array.

    Unused bins are at the end of the memory, and so is the extra offset at the end of each row.
    """
    R, T, X, K = x_RTXK.shape
    end = R * T
    starts_S = jnp.where(bins.lengths_S > 0, bins.starts_S, end)
    return jnp.concatenate([starts_S, jnp.full(R, end, jnp.int32)]).reshape(R, -1) * (X * K)


def _primitive_params(q: Array, call_mask: CallMask, score: ScoreConfig) -> dict[str, Any]:
    """Static parameters of a call.

    cuDNN keeps the scores where key + window > query and, as it is causal, key <= query. Both are
    counted from the bin's first token, and the window includes the token itself. A window as long
    as the bins is left out.
    Source: sliding_window_mask in NVIDIA/cudnn-frontend utils/attn_score_modifiers.h, aligned to
        the top left, with the left bound that openxla/xla xla/stream_executor/cuda/cuda_dnn.cc sets
        to sliding_window_length.
    """
    library = _library()
    masks = {
        type(None): "CAUSAL",
        CallBins: "PADDING_CAUSAL",
        SegmentRows: "PADDING_CAUSAL",
        OffDiagonalBlock: "PADDING",
    }
    window = score.window
    if window is not None and window >= q.shape[1]:
        window = None
    assert window is None or not isinstance(call_mask, OffDiagonalBlock), "block with window"
    assert score.softcap is None, "cudnn_limits.unsupported_reasons refuses it"
    params = {
        "scale": score.find_scale(q.shape[-1]),
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": library.MaskType[masks[type(call_mask)]],
        "layout": library.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    return params | (_extra_params() or {})


@functools.cache
def _library() -> Any:
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


@functools.cache
def _extra_params() -> dict[str, None] | None:
    """Parameters that this JAX's calls have in addition to _PARAMS, with their values.

    None if the calls have parameters that are in neither.
    """
    signatures = []
    for direction in ("fwd", "bwd"):
        name = f"_dot_product_attention_{direction}"
        lowering = getattr(_library(), f"{name}_cuda_lowering", None)
        if lowering is None or not hasattr(_library(), f"{name}_p"):
            return None
        signatures.append(list(inspect.signature(lowering).parameters))
    for extra in ({}, _EXTRA_PARAMS_0_12):
        operands = ["score_mod_args"] if extra else []
        forward = ["ctx", *_OPERANDS, *operands, *_PARAMS, *extra, "is_training"]
        backward = ["ctx", *_OPERANDS, *_BACKWARD_OPERANDS, *operands, *_PARAMS, *extra]
        if signatures == [forward, backward]:
            return dict(extra)
    return None
