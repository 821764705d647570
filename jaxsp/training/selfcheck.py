"""Checks of attention and offloading on this device before the first step.

Releases of JAX and cuDNN have computed wrong results silently. jax 0.10.2 and 0.11.0 read keys at
wrong offsets in packed rows if query heads share them (jax PR 39521), and read offloaded
activations back in the wrong order (openxla/xla PR 46231).
"""

import dataclasses
import itertools
import math
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxsp import attention
from jaxsp.attention import (
    AttentionChoice,
    Kernel,
    KernelSettings,
    LayerWorkload,
    ScoreConfig,
    Strategy,
)
from jaxsp.attention.kernels import cudnn_calls, segments
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.core.errors import UserError
from jaxsp.core.units import GIB
from jaxsp.model import remat
from jaxsp.model.layer_stack import LayerParts, OffloadedStack
from jaxsp.model.remat import RematPolicy
from jaxsp.training import compile_options, memory_fit
from jaxsp.training.specs import StepSpec

ATTENTION_TOLERANCE = 1e-2
"""Maximum of `measure_attention_error` in bfloat16.

Rounding gives up to 3.4e-3; attention to one token of another segment gives 0.1.
"""

OFFLOAD_TOLERANCE = 1e-4
"""Maximum of `measure_offload_error`: float32 gradients, computed twice in the same way."""

_NO_AUTOTUNING: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Compile option without autotuning, which would take longer than the rest of the check."""

MAX_FILL_BYTES = 2 * GIB
"""Maximum memory that is filled with NaN before a kernel runs.

Arrays and workspaces of the check take a few hundred MiB. The device's peak memory, a metric,
counts the filled memory.
"""

_ROW_TOKENS = 1024
_STARTS_BM = np.array([[0, 300, 301, 520, 700, 0], [5, 695, 0, 0, 0, 0]], np.int32)
_LENGTHS_BM = np.array([[300, 1, 211, 129, 260, 0], [690, 300, 0, 0, 0, 0]], np.int32)
"""The lengths need two calls of cuDNN. There is padding between segments and at the end."""

_WINDOW = 100


def check_device(spec: StepSpec, choices: Sequence[AttentionChoice]) -> list[str]:
    """Checks this process's devices, and returns a line for each check that passed.

    Attention is checked on the first, and offloading on all of them. CPUs are not checked. Each
    process checks devices of its own, without waiting for the others.
    Raises: UserError if a check fails, with a suggestion.
    """
    devices = spec.mesh.devices.flat
    local = [device for device in devices if device.process_index == jax.process_index()]
    device = local[0]
    if device.platform == "cpu":
        return []
    check_arithmetic(device)
    passed = []
    checks = dict.fromkeys(
        itertools.chain.from_iterable(_list_checks(spec, choice) for choice in choices)
    )
    if checks:
        start_s = time.perf_counter()
        for check in checks:
            _check_attention(spec, check, device)
        kernels = " and ".join(dict.fromkeys(check.kernel.describe() for check in checks))
        passed.append(
            f"self-check: {kernels} attention agrees with the blockwise kernel on this device "
            f"({_format_elapsed(start_s)})"
        )
    if spec.remat_policy.is_input_offloaded:
        start_s = time.perf_counter()
        _check_offloading(spec, local)
        passed.append(
            "self-check: gradients are the same with and without offloaded activations on "
            f"{len(local)} of this process's devices ({_format_elapsed(start_s)})"
        )
    return passed


def check_arithmetic(device: jax.Device) -> None:
    """Checks operations that are dispatched one by one, without jit.

    jax 0.11.0 and 0.11.1 with CUDA 13 have computed them wrong (jax issue 40633).
    Raises: UserError with a suggestion.
    """
    with jax.default_device(device):
        actual = [float(jnp.sqrt(512.0)), *np.asarray(jnp.ones(4) + 1).tolist()]
    if not np.allclose(actual, [math.sqrt(512), 2, 2, 2, 2], rtol=1e-5):
        raise UserError(
            f"jax = {jax.__version__}: computes sqrt(512) and ones(4) + 1 as {actual} on this "
            f"device. Nothing was trained. {_describe_versions(device)}. Use another release of "
            "jax, or its packages for another version of CUDA."
        )


class _AttentionCheck(NamedTuple):
    """A check of attention, which several row lengths may share."""

    kernel: Kernel
    heads_per_kv_head: int
    num_kv_heads: int
    head_chunks: int
    copies_segments: bool
    score: ScoreConfig
    strategy: Strategy
    """Strategy on one device: whole rows, or chunks of rows."""


def _list_checks(spec: StepSpec, choice: AttentionChoice) -> list[_AttentionCheck]:
    """Lists a check for each kind of layer over whole rows, and one over chunks of rows if the
    strategy computes those."""
    if not choice.kernel.needs_selfcheck:
        return []
    model = spec.model
    heads, kv_heads = choice.strategy.heads.local_heads(model.num_heads, model.num_kv_heads)
    exchanges = dict.fromkeys((None, choice.strategy.tokens.on_one_device()))
    return [
        _AttentionCheck(
            kernel=choice.kernel,
            heads_per_kv_head=heads // kv_heads,
            num_kv_heads=min(2, kv_heads),
            head_chunks=choice.settings.head_chunks,
            copies_segments=choice.settings.copies_segments,
            score=score,
            strategy=attention.combine(1, tokens),
        )
        for tokens in exchanges
        for score in dict.fromkeys(choice.layer_scores)
    ]


def _check_attention(spec: StepSpec, check: _AttentionCheck, device: jax.Device) -> None:
    """Runs a check. Raises: UserError."""
    attention_errors = measure_attention_error(
        **check._asdict(),
        head_dim=spec.model.head_dim,
        max_segments=spec.config.data.max_segments_per_row,
        dtype=spec.dtype,
        device=device,
    )
    raise_on_attention_error(attention_errors, device)


def measure_attention_error(
    kernel: str | Kernel | Callable[..., Array],
    *,
    heads_per_kv_head: int,
    num_kv_heads: int,
    head_dim: int,
    max_segments: int,
    score: ScoreConfig,
    dtype: jnp.dtype,
    device: jax.Device,
    head_chunks: int = 1,
    copies_segments: bool = False,
    strategy: Strategy | None = None,
) -> dict[str, float]:
    """Errors of a kernel's output and gradients on small packed rows, by name: out, dq, dk, dv.

    The expected values are those of the blockwise kernel in float32.

    Args:
        heads_per_kv_head: query heads per K/V head.
        max_segments: 1: rows of one segment; more: rows of several, with padding between them.
        score: scores of a layer; a window is shortened to 100 tokens, because the rows are short.
        head_chunks: reduced to the largest number that the few heads allow.
        copies_segments: see `KernelSettings`.
        strategy: a strategy on one device; None: whole rows.
    Units: relative root mean square error of the segment where it is largest; padding of a row
        counts as a segment. The base is the root mean square of the expected values, in the
        segment or in all segments, whichever is larger. Infinite if a value is NaN.
    """
    arguments = make_attention_inputs(
        heads_per_kv_head=heads_per_kv_head,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_segments=max_segments,
        dtype=dtype,
    )
    inputs, slots = jax.device_put(arguments, device)

    def compute(kernel: Any, dtype: jnp.dtype, strategy: Strategy | None) -> dict[str, np.ndarray]:
        compiled = compile_attention(
            kernel,
            inputs,
            slots,
            dtype=dtype,
            score=score,
            head_chunks=head_chunks,
            copies_segments=copies_segments,
            strategy=strategy,
        )
        fill_free_memory(device, num_bytes=choose_fill_bytes(device.memory_stats()))
        results = map(np.asarray, compiled(inputs, slots))
        return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))

    actual = compute(kernel, dtype, strategy)
    expected = compute(BlockwiseKernel(), jnp.dtype(jnp.float32), None)
    starts_BM, lengths_BM = slots
    segment_BL = np.asarray(segments.segment_ids(starts_BM, lengths_BM, _ROW_TOKENS))
    return {name: _largest_error(actual[name], expected[name], segment_BL) for name in expected}


def _largest_error(actual: np.ndarray, expected: np.ndarray, segment_BL: np.ndarray) -> float:
    """Relative error of the segment where it is largest; see `measure_attention_error`."""
    overall = _root_mean_square(expected[segment_BL >= 0])
    relative_errors = []
    for row, segment_L in enumerate(segment_BL):
        for segment in np.unique(segment_L):
            tokens = row, segment_L == segment
            base = max(_root_mean_square(expected[tokens]), overall)
            error = _root_mean_square(actual[tokens] - expected[tokens])
            relative_errors.append(error / base)
    return float(np.nan_to_num(np.max(relative_errors), nan=np.inf))


def _root_mean_square(x: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


def choose_fill_bytes(stats: Mapping[str, int] | None) -> int:
    """Half of the free memory of a device, at most MAX_FILL_BYTES; 0 without stats, as on CPUs.

    Args: stats: the device's memory_stats().
    """
    if stats is None:
        return 0
    return min(max(stats["bytes_limit"] - stats["bytes_in_use"], 0) // 2, MAX_FILL_BYTES)


def fill_free_memory(device: jax.Device, *, num_bytes: int) -> None:
    """Fills free memory of a device with NaN and frees it again, for the next allocations to reuse.

    The memory of a new process is mostly zero, and XLA does not clear workspaces. Without this, a
    kernel that reads its workspace before writing to it could pass the check and give NaN in
    training (TransformerEngine issue 2186). XLA's BFC allocator takes an allocation from the lowest
    addresses of the smallest free block that is large enough. Early in a process there is one
    block: the fill takes its beginning, and so do the allocations after it.
    """
    if num_bytes == 0:
        return
    filled = jax.block_until_ready(jnp.full(num_bytes // 4, jnp.nan, jnp.float32, device=device))
    filled.delete()


def make_attention_inputs(
    *, heads_per_kv_head: int, num_kv_heads: int, head_dim: int, max_segments: int, dtype: jnp.dtype
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns q, k, v and the output's gradient, and starts and lengths, of small packed rows."""
    starts_BM = _STARTS_BM[:, :max_segments]
    lengths_BM = _LENGTHS_BM[:, :max_segments]
    if max_segments == 1:
        starts_BM = np.zeros((2, 1), np.int32)
        lengths_BM = np.array([[_ROW_TOKENS - 100], [_ROW_TOKENS]], np.int32)
    rng = np.random.default_rng(0)
    num_heads = heads_per_kv_head * num_kv_heads
    inputs = [
        np.asarray(rng.standard_normal((2, _ROW_TOKENS, heads, head_dim), np.float32), dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]
    return inputs, [starts_BM, lengths_BM]


def compile_attention(
    kernel: str | Kernel | Callable[..., Array],
    inputs: list[Any],
    slots: list[Any],
    *,
    dtype: jnp.dtype,
    score: ScoreConfig,
    head_chunks: int = 1,
    copies_segments: bool = False,
    strategy: Strategy | None = None,
) -> jax.stages.Compiled:
    """Compiles a kernel's output and gradients as functions of `make_attention_inputs`.

    Args:
        inputs, slots: arrays, or their shapes on an absent device.
        dtype: dtype in which the kernel computes; results are float32.
    """
    kernel = attention.as_kernel(kernel)
    num_rows, row_tokens, num_heads, head_dim = inputs[0].shape
    strategy = strategy or attention.combine(1)
    if score.window is not None:
        score = dataclasses.replace(score, window=min(score.window, _WINDOW))
    layer = LayerWorkload(
        num_rows=num_rows,
        tokens_per_device=row_tokens,
        row_tokens=row_tokens,
        max_segments=slots[0].shape[1],
        num_heads=num_heads,
        num_kv_heads=inputs[1].shape[2],
        head_dim=head_dim,
        dtype=str(dtype),
        window=score.window,
    )
    legal = kernel.legal_head_chunks(strategy.kernel_workload(layer))
    chunks = max(n for n in legal if n <= head_chunks)
    attend = attention.make_attend(
        kernel=kernel,
        strategy=strategy,
        layer_scores=[score],
        settings=KernelSettings(head_chunks=chunks, copies_segments=copies_segments),
    )

    def run(inputs: list[Array], slots: list[Array]) -> list[Array]:
        *qkv, dout = (x.astype(dtype) for x in inputs)
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, *slots), *qkv)
        return [x.astype(jnp.float32) for x in (out, *pull(dout))]

    return jax.jit(run).lower(inputs, slots).compile(compiler_options=_NO_AUTOTUNING)


def raise_on_attention_error(attention_errors: Mapping[str, float], device: jax.Device) -> None:
    """Raises UserError if an error is larger than rounding explains."""
    wrong = [
        f"{name} {error:.3g}"
        for name, error in attention_errors.items()
        if not error <= ATTENTION_TOLERANCE
    ]
    if wrong:
        raise UserError(
            f"attention.kernel = cudnn: computes wrong results on this device (relative error of "
            f"{', '.join(wrong)}; must be at most {ATTENTION_TOLERANCE:g}). Nothing was trained. "
            f"{_describe_versions(device)}. Use attention.kernel=blockwise, or other releases."
        )


def _check_offloading(spec: StepSpec, devices: Sequence[jax.Device]) -> None:
    """Raises UserError if gradients are wrong, with a suggestion that was tested on this device."""
    options = spec.compile_options.options
    prefetch = {name: options[name] for name in compile_options.PREFETCH_FROM_HOST.keys() & options}
    for policy in _list_policies(spec):
        offload_error = measure_offload_error(policy, devices=devices, options=prefetch)
        without_prefetch = offload_error
        if not offload_error <= OFFLOAD_TOLERANCE and any(prefetch.values()):
            without_prefetch = measure_offload_error(
                policy, devices=devices, options=dict.fromkeys(prefetch, False)
            )
        raise_on_offload_error(offload_error, devices[0], without_prefetch=without_prefetch)


def _list_policies(spec: StepSpec) -> Iterator[RematPolicy]:
    """Policies that `memory_fit` may choose."""
    for remat_value in memory_fit.list_remats(spec, is_memory_known=True):
        for value in memory_fit.list_offloads_during_attention(spec, remat_value):
            yield dataclasses.replace(
                spec.remat_policy,
                remat=remat_value,
                offloads_during_attention=value == "always",
            )


def measure_offload_error(
    policy: RematPolicy,
    *,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] = types.MappingProxyType({}),
    tokens: int = 4096,
    width: int = 1024,
) -> float:
    """Relative error of the gradients of a small stack of layers, compared with no offloading.

    The weights are sharded over the devices, and each layer gathers its own, as in a training step:
    with gathers in the loop, prefetched activations were wrong on several GPUs and right on one
    (openxla/xla PR 37979).

    Args:
        policy: what is offloaded.
        options: XLA's compile options, as for the training step.
        tokens, width: shape of a layer's input on a device, 16 MiB; XLA may treat smaller copies
            differently.
    """
    arguments = make_offload_inputs(len(devices), tokens=tokens, width=width)
    arguments = jax.device_put(arguments, offload_shardings(devices))

    def compute_gradients(policy: RematPolicy) -> list[np.ndarray]:
        compiled = compile_offload_gradients(policy, *arguments, options=options)
        return [np.asarray(gradient) for gradient in compiled(*arguments)]

    actual = compute_gradients(policy)
    expected = compute_gradients(RematPolicy(remat=policy.remat))
    relative_errors = [
        np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(actual, expected, strict=True)
    ]
    return float(np.nan_to_num(np.max(relative_errors), nan=np.inf))


_OFFLOAD_SPECS = (jax.P("devices"), jax.P(None, "devices"))
"""Tokens of the input, and rows of the weights, are divided among the devices."""


def offload_shardings(devices: Sequence[jax.Device]) -> tuple[NamedSharding, ...]:
    """Shardings of `make_offload_inputs`."""
    mesh = Mesh(np.array(devices), ("devices",))
    return tuple(NamedSharding(mesh, spec) for spec in _OFFLOAD_SPECS)


def make_offload_inputs(
    num_devices: int, *, tokens: int = 4096, width: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """Input and weights of the small stack of layers; see `measure_offload_error`."""
    num_layers = 6  # XLA unrolls shorter loops
    width = -(-width // num_devices) * num_devices
    rng = np.random.default_rng(0)
    x_LD = rng.standard_normal((num_devices * tokens, width), np.float32)
    weights_NDD = rng.standard_normal((num_layers, width, width), np.float32) / width**0.5
    return x_LD, weights_NDD


def compile_offload_gradients(
    policy: RematPolicy,
    x_LD: Any,
    weights_NDD: Any,
    *,
    options: Mapping[str, Any] = types.MappingProxyType({}),
) -> jax.stages.Compiled:
    """Compiles the gradients of the small stack of layers as a function of `make_offload_inputs`.

    Args:
        x_LD, weights_NDD: arrays with `offload_shardings`, or their shapes on absent devices.
        options: XLA's compile options, as for the training step.
    """

    def gather(weight_dD: Array) -> Array:
        return jax.lax.all_gather(weight_dD, "devices", tiled=True)

    def run_own_stack(x_lD: Array, weights_NdD: Array) -> Array:
        parts = LayerParts(
            pre_attention=lambda weight, x, *_: (x @ gather(weight), x, x, None),
            attend=lambda _, q, k, v, *__: jnp.tanh(q),
            post_attention=lambda _, x, out, *__: x + jnp.sin(out),
        )
        stack = OffloadedStack(
            parts=parts,
            num_layers=len(weights_NdD),
            group_size=policy.offload_every,
            offloads_during_attention=policy.offloads_during_attention,
            merge_slots=lambda slots, weights: jax.tree.map(jnp.add, slots, weights),
        )
        zeros_NdD = weights_NdD - jax.lax.stop_gradient(weights_NdD)
        slots, weights = (
            {"pre_attention": x, "post_attention": ()} for x in (zeros_NdD, weights_NdD)
        )
        return stack(x_lD, slots, weights, (), ())

    def layer(x_lD: Array, weight_dD: Array) -> tuple[Array, None]:
        x_lD = remat.name_layer_input(x_lD)
        out_lD = jnp.tanh(x_lD @ gather(weight_dD))
        for name in attention.CHECKPOINT_NAMES:
            out_lD = checkpoint_name(out_lD, name)
        return x_lD + jnp.sin(out_lD), None

    def loss(x_lD: Array, weights_NdD: Array) -> Array:
        if policy.has_own_backward_pass:
            out_lD = run_own_stack(x_lD, weights_NdD)
        else:
            out_lD, _ = jax.lax.scan(remat.checkpoint_layer(layer, policy), x_lD, weights_NdD)
        return jnp.sum(out_lD**2)

    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=x_LD.sharding.mesh,
        in_specs=_OFFLOAD_SPECS,
        out_specs=_OFFLOAD_SPECS,
        check_vma=False,
    )
    with jax.default_matmul_precision("float32"):
        lowered = jax.jit(gradients).lower(x_LD, weights_NDD)
    return lowered.compile(compiler_options={**_NO_AUTOTUNING, **options})


def raise_on_offload_error(
    offload_error: float, device: jax.Device, *, without_prefetch: float = math.inf
) -> None:
    """Raises UserError if the error is larger than rounding explains.

    Args: without_prefetch: the error if activations are not prefetched.
    """
    if offload_error <= OFFLOAD_TOLERANCE:
        return
    (prefetch,) = compile_options.PREFETCH_FROM_HOST
    suggestion = "memory.offload_activations=none, or another release of jax"
    if without_prefetch <= OFFLOAD_TOLERANCE:
        suggestion = (
            f"run.xla_options='{{{prefetch}: false}}', with which gradients are right, "
            "or another release of jax"
        )
    raise UserError(
        "memory.offload_activations: gives wrong gradients of a small stack of layers on this "
        f"device (relative error {offload_error:.3g}). Nothing was trained. "
        f"{_describe_versions(device)}. Use {suggestion}."
    )


def _describe_versions(device: jax.Device) -> str:
    return (
        f"Versions: jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"{cudnn_calls.describe_version()} on {device.device_kind}"
    )


def _format_elapsed(start_s: float) -> str:
    return f"{time.perf_counter() - start_s:.1f} s"
