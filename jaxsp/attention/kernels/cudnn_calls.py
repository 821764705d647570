"""cuDNN's calls as XLA has them: the one file that knows jax._src.

JAX's own way to them is passed by, down to the primitives that stand for the calls: its custom_vjp cannot name the output and
the log-sum-exp for a remat policy, and it multiplies the packed places of K and V by the wrong number of heads before 0.11.1
(jax PR 39521), which is done here.
"""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxsp.attention.kernels.cudnn_slots import CallSlots
from jaxsp.attention.kernels.segments import OffDiagonalBlock

TESTED_JAX_VERSIONS = "0.10.1 to 0.12.0"
"""Versions of JAX."""

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
"""What jax 0.12 asks for besides: a function of the scores, which we have none of."""

CallMask = CallSlots | OffDiagonalBlock | None
"""What a call is of: slots of packed rows, rectangles, or rows as a whole."""


def describe_unsupported_jax() -> str | None:
    """Why this JAX cannot be used, or None: its inner functions are not one of those we know."""
    if _library() is None or _extra_params() is None:
        return f"is called through parts of JAX that this version, {jax.__version__}, has changed; {TESTED_JAX_VERSIONS} are known"
    return None


def installed_version() -> tuple[int, int, int] | None:
    """The installed cuDNN, None where JAX finds none."""
    library = _library()
    if library is None or library.cuda_versions is None:
        return None
    number = library.check_cudnn_version()
    return number // 10000, number // 100 % 100, number % 100


def describe_version() -> str:
    """Returns the name of the library, with its version if JAX finds one. Example: cuDNN 9.28.0."""
    installed = installed_version()
    return "cuDNN" if installed is None else f"cuDNN {'.'.join(map(str, installed))}"


def forward(
    call_mask: CallMask, q: Array, k: Array, v: Array, *, window: int | None
) -> tuple[Array, Array]:
    """Output and log-sum-exp, f32[B, h, L], of rows as a whole and of rectangles; or of slots, f32[S, h, T], undefined beyond
    each piece.
    """
    out, statistic = _library()._dot_product_attention_fwd_p.bind(
        *_operands(q, k, v, call_mask), **_primitive_params(q, call_mask, window), is_training=True
    )
    return out, statistic


def backward(
    call_mask: CallMask,
    lse: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    *,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv; of slots, undefined at tokens of none."""
    dq, dk, dv = _library()._dot_product_attention_bwd_p.bind(
        *_operands(q, k, v, call_mask), lse, out, dout, **_primitive_params(q, call_mask, window)
    )
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
    r'^ *(?:ROOT )?\S+ = \((.*?)\) custom-call\(.*custom_call_target="__cudnn\$fmha'
)
"""A line of a compiled program that calls cuDNN's attention; the group is the call's results."""


def _operands(q: Array, k: Array, v: Array, call_mask: CallMask) -> tuple[Array, ...]:
    unused = jnp.zeros(0, q.dtype)
    lengths, places = (unused, unused), (unused, unused)
    if isinstance(call_mask, OffDiagonalBlock):
        # no softmax over nothing: what a row without queries or keys gives is not used
        lengths = (jnp.maximum(call_mask.num_queries_B, 1), jnp.maximum(call_mask.num_keys_B, 1))
    elif call_mask is not None:
        lengths_RS = call_mask.lengths_S.reshape(len(q), -1)
        lengths, places = (
            (lengths_RS, lengths_RS),
            (_slot_offsets(call_mask, q), _slot_offsets(call_mask, k)),
        )
    return q, k, v, unused, *lengths, *places, unused, unused


def _slot_offsets(slots: CallSlots, x_RTXK: Array) -> Int32[Array, "R S_plus_1"]:
    """Where each slot begins in an array's memory, in elements: a slot's first token times what a token takes of *this* array.

    Unused slots, and the one place more of each row that the call has, are at the end of the memory.
    """
    R, T, X, K = x_RTXK.shape
    end = R * T
    starts_S = jnp.where(slots.lengths_S > 0, slots.starts_S, end)
    return jnp.concatenate([starts_S, jnp.full(R, end, jnp.int32)]).reshape(R, -1) * (X * K)


def _primitive_params(q: Array, call_mask: CallMask, window: int | None) -> dict[str, Any]:
    """What a call is told besides arrays.

    cuDNN keeps the scores where key + window > query and, being causal, key <= query, both counted from the slot's first
    token: the window counts the token itself. Where no slot is longer than the window, it is not told of one.
    Source: sliding_window_mask in NVIDIA/cudnn-frontend utils/attn_score_modifiers.h, aligned to the top left, with the left
        bound that openxla/xla xla/stream_executor/cuda/cuda_dnn.cc sets to sliding_window_length.
    """
    library = _library()
    masks = {type(None): "CAUSAL", CallSlots: "PADDING_CAUSAL", OffDiagonalBlock: "PADDING"}
    mask = library.MaskType[masks[type(call_mask)]]
    told = None if window is None or window >= q.shape[1] else window
    known = (
        q.shape[-1] ** -0.5,
        42,
        0.0,
        (False, False),
        mask,
        library.AttentionLayout.BTNH.value,
        told,
    )
    return dict(zip(_PARAMS, known, strict=True)) | (_extra_params() or {})


@functools.cache
def _library() -> Any:
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


@functools.cache
def _extra_params() -> dict[str, None] | None:
    """Parameters that this JAX's calls have besides those we know, with their values; None if there are others."""
    lowerings = [
        getattr(_library(), f"_dot_product_attention_{way}_cuda_lowering", None)
        for way in ("fwd", "bwd")
    ]
    primitives = [hasattr(_library(), f"_dot_product_attention_{way}_p") for way in ("fwd", "bwd")]
    if not all(primitives) or None in lowerings:
        return None
    forward, backward = (
        list(inspect.signature(function).parameters) for function in lowerings if function
    )
    for extra in ({}, _EXTRA_PARAMS_0_12):
        operands = ["score_mod_args"] if extra else []
        first = ["ctx", *_OPERANDS, *operands, *_PARAMS, *extra, "is_training"]
        second = ["ctx", *_OPERANDS, *_BACKWARD_OPERANDS, *operands, *_PARAMS, *extra]
        if (forward, backward) == (first, second):
            return dict(extra)
    return None
