"""Checks of attention, delta nets and offloading on this device before the first step.

Releases of JAX and cuDNN have computed wrong results silently. jax 0.10.2 and 0.11.0 read keys at
wrong offsets in packed rows if query heads share them (jax PR 39521), and read offloaded
activations back in the wrong order (openxla/xla PR 46231).
"""

import dataclasses
import math
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxsp import attention
from jaxsp.attention import (
    Kernel,
    KernelSettings,
    LayerWorkload,
    ScoreConfig,
    Strategy,
)
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.kernels.cudnn import cudnn_calls
from jaxsp.blocks import float8
from jaxsp.blocks.config import ATTENTION, DELTA_NET, LayerKind, LayerSegment
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.core.units import GIB
from jaxsp.memory import memory_fit
from jaxsp.model import layer_stack
from jaxsp.model.layer_stack import LayerParts
from jaxsp.model.remat import RematPolicy
from jaxsp.run import float8_check, segment_errors
from jaxsp.run.delta_rule_check import DeltaRuleCheck
from jaxsp.run.experts_check import TOLERANCE, ExpertsCheck
from jaxsp.sharding import sharding
from jaxsp.sharding.sharding import Gather, Shard
from jaxsp.training import compile_options
from jaxsp.training.specs import StepSpec

ATTENTION_TOLERANCE = 1e-2
"""Maximum of `AttentionCheck.measure_errors` in bfloat16.

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
_PLAIN_SCORES = ScoreConfig()
_WHOLE_ROWS = attention.combine(1)


def check_device(spec: StepSpec) -> list[str]:
    """Checks this process's devices, and returns a line for each check that passed.

    Attention and delta nets are checked on the first, and offloading on all of them. CPUs are not
    checked. Each process checks devices of its own, without waiting for the others.
    Raises: UserError if a check fails, with a suggestion.
    """
    devices = spec.mesh.devices.flat
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        return []
    check_arithmetic(local[0])
    passed = []
    if checks := _list_checks(spec):
        start_s = time.perf_counter()
        for check in checks:
            raise_on_attention_error(check.measure_errors(local[0]), local[0])
        kernels = " and ".join(dict.fromkeys(check.kernel.describe() for check in checks))
        passed.append(
            f"self-check: {kernels} attention agrees with the blockwise kernel on this device "
            f"({_format_elapsed(start_s)})"
        )
    if any(layer.mixer == DELTA_NET for layer in spec.model.layers):
        passed.append(check_delta_nets(spec, local[0]))
    if spec.model.experts is not None and spec.model.experts.kernel != "xla":
        passed.append(check_experts(spec, local[0]))
    if spec.model.linear_dtype == float8.NAME:
        passed.append(check_float8(spec, local[0]))
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
        raise _make_error(
            f"jax = {jax.__version__}: computes sqrt(512) and ones(4) + 1 as {actual} on this "
            "device",
            device,
            "another release of jax, or its packages for another version of CUDA",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCheck:
    """Comparison of a kernel with the blockwise kernel in float32, on small packed rows."""

    kernel: Kernel
    heads_per_kv_head: int
    num_kv_heads: int
    head_dim: int
    max_segments: int
    """1: rows of one segment; more: rows of several, with padding between them."""
    dtype: jnp.dtype
    """Dtype in which the kernel computes; results are float32."""
    score: ScoreConfig = _PLAIN_SCORES
    """Scores of a layer; a window is shortened to 100 tokens, because the rows are short."""
    head_chunks: int = 1
    """Number of head chunks; reduced to the largest number that the few heads allow."""
    copies_segments: bool = False
    """See `KernelSettings`."""
    strategy: Strategy = _WHOLE_ROWS
    """Strategy on one device: whole rows, or chunks of rows."""

    def measure_errors(self, device: jax.Device) -> dict[str, float]:
        """Errors of the kernel's output and gradients, by name: out, dq, dk, dv.

        Units: those of `segment_errors.find_largest_error`.
        """
        reference = dataclasses.replace(
            self,
            kernel=BlockwiseKernel(),
            dtype=jnp.dtype(jnp.float32),
            strategy=_WHOLE_ROWS,
        )
        inputs = jax.device_put(self._make_inputs(), device)
        actual, expected = (check._compute(device, *inputs) for check in (self, reference))
        starts_BM, lengths_BM = inputs[1]
        segment_BL = np.asarray(segments.segment_ids(starts_BM, lengths_BM, _ROW_TOKENS))
        return {
            name: segment_errors.find_largest_error(actual[name], expected[name], segment_BL)
            for name in expected
        }

    def _compute(
        self, device: jax.Device, qkv_dout: Any, starts_and_lengths: Any
    ) -> dict[str, np.ndarray]:
        compiled = self.compile(device)
        fill_free_memory(device, num_bytes=choose_fill_bytes(device.memory_stats()))
        results = map(np.asarray, compiled(qkv_dout, starts_and_lengths))
        return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))

    def _make_inputs(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns q, k, v and the output's gradient, as bfloat16 has them, and the segments."""
        starts_BM = _STARTS_BM[:, : self.max_segments]
        lengths_BM = _LENGTHS_BM[:, : self.max_segments]
        if self.max_segments == 1:
            starts_BM = np.zeros((2, 1), np.int32)
            lengths_BM = np.array([[_ROW_TOKENS - 100], [_ROW_TOKENS]], np.int32)
        rng = np.random.default_rng(0)
        G = self.num_kv_heads
        H = self.heads_per_kv_head * G
        shapes = [(2, _ROW_TOKENS, heads, self.head_dim) for heads in (H, G, G, H)]
        qkv_dout = [np.asarray(rng.standard_normal(x, np.float32), jnp.bfloat16) for x in shapes]
        return qkv_dout, [starts_BM, lengths_BM]

    def compile(self, device: jax.Device) -> jax.stages.Compiled:
        """Compiles the kernel's output and gradients for a device, which may be an absent one."""
        inputs = self._make_inputs()
        window = self.score.window
        if window is not None:
            window = min(window, _WINDOW)
        layer = LayerWorkload(
            num_rows=2,
            tokens_per_device=_ROW_TOKENS,
            row_tokens=_ROW_TOKENS,
            max_segments=inputs[1][0].shape[1],
            num_heads=self.heads_per_kv_head * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(self.dtype),
            window=window,
        )
        legal = self.kernel.legal_head_chunks(self.strategy.kernel_workload(layer))
        attend = attention.make_attend(
            kernel=self.kernel,
            strategy=self.strategy,
            layer_scores=[dataclasses.replace(self.score, window=window)],
            settings=KernelSettings(
                head_chunks=max(n for n in legal if n <= self.head_chunks),
                copies_segments=self.copies_segments,
            ),
        )

        def run(qkv_dout: list[Array], starts_and_lengths: list[Array]) -> list[Array]:
            *qkv, dout = (x.astype(self.dtype) for x in qkv_dout)
            out, pull = jax.vjp(lambda *qkv: attend(*qkv, *starts_and_lengths), *qkv)
            return [x.astype(jnp.float32) for x in (out, *pull(dout))]

        place = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs
        )
        return jax.jit(run).lower(*shapes).compile(compiler_options=_NO_AUTOTUNING)


def _list_checks(spec: StepSpec) -> list[AttentionCheck]:
    """Lists a check for each kind of layer over whole rows, and one over chunks of rows if the
    strategy computes those."""
    choice = spec.attention
    if not choice.kernel.needs_selfcheck:
        return []
    model = spec.model
    heads, kv_heads = choice.strategy.heads.local_heads(model.num_heads, model.num_kv_heads)
    exchanges = dict.fromkeys((None, choice.strategy.tokens.on_one_device()))
    return [
        AttentionCheck(
            kernel=choice.kernel,
            heads_per_kv_head=heads // kv_heads,
            num_kv_heads=min(2, kv_heads),
            head_dim=model.head_dim,
            max_segments=spec.config.data.max_segments_per_row,
            dtype=spec.dtype,
            score=score,
            head_chunks=choice.settings.head_chunks,
            copies_segments=choice.settings.copies_segments,
            strategy=attention.combine(1, tokens),
        )
        for tokens in exchanges
        for score in dict.fromkeys(choice.layer_scores)
    ]


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


def raise_on_attention_error(attention_errors: Mapping[str, float], device: jax.Device) -> None:
    """Raises UserError if an error is larger than rounding explains."""
    wrong = [
        f"{name} {error:.3g}"
        for name, error in attention_errors.items()
        if not error <= ATTENTION_TOLERANCE
    ]
    if wrong:
        raise _make_error(
            "attention.kernel = cudnn: computes wrong results on this device (relative error of "
            f"{', '.join(wrong)}; must be at most {ATTENTION_TOLERANCE:g})",
            device,
            "attention.kernel=blockwise, or other releases",
        )


def check_delta_nets(spec: StepSpec, device: jax.Device) -> str:
    """Checks the delta rule with the model's sizes of heads, and returns a line for it.

    Raises: UserError if an error is larger than rounding explains.
    """
    start_s = time.perf_counter()
    assert spec.model.delta_net is not None, "has delta nets"
    check = DeltaRuleCheck.of_model(spec.model.delta_net, spec.dtype)
    errors = check.measure_errors(device, _NO_AUTOTUNING)
    wrong = [
        f"{name} {error:.3g}" for name, error in errors.items() if not error <= check.tolerance
    ]
    if wrong:
        other = "float32" if check.dtype == jnp.bfloat16 else "bfloat16"
        raise _make_error(
            f"delta net: computes wrong results in {check.dtype} on this device (relative error of "
            f"{', '.join(wrong)}; must be at most {check.tolerance:g})",
            device,
            f"another release of jax, or model.compute_dtype={other}",
        )
    return (
        "self-check: the delta net agrees with its recurrence, token by token, on this device "
        f"({_format_elapsed(start_s)})"
    )


def check_float8(spec: StepSpec, device: jax.Device) -> str:
    """Checks products in 8-bit floats with the model's sizes, and returns a line for them.

    Raises: UserError if an error is larger than rounding explains.
    """
    start_s = time.perf_counter()
    model = spec.model
    errors = float8_check.measure_errors(device, model.hidden_size, model.intermediate_size)
    wrong = [
        f"{name} {error:.3g}"
        for name, error in errors.items()
        if not error <= float8_check.TOLERANCE
    ]
    if wrong:
        raise _make_error(
            f"model.linear_dtype = {float8.NAME}: computes wrong products on this device (relative "
            f"error of {', '.join(wrong)}; must be at most {float8_check.TOLERANCE:g})",
            device,
            "another release of jax, or model.linear_dtype=null",
        )
    return (
        "self-check: products in 8-bit floats agree with those in float32 on this device "
        f"({_format_elapsed(start_s)})"
    )


def check_experts(spec: StepSpec, device: jax.Device) -> str:
    """Checks the kernel of experts with the model's sizes, and returns a line for it.

    Raises: UserError if an error is larger than rounding explains, or the kernel does not run.
    """
    start_s = time.perf_counter()
    check = ExpertsCheck.of_model(spec.model)
    suggestion = "another release of jax, or model.experts_kernel=xla"
    name = f"model.experts_kernel = {spec.config.model.experts_kernel}: {check.kernel}"
    try:
        errors = check.measure_errors(device)
    except Exception as error:  # the compiler of the kernels has errors of many classes
        reason = str(error).partition("\n")[0]
        raise _make_error(f"{name} does not run here: {reason}", device, suggestion) from error
    wrong = [f"{name} {error:.3g}" for name, error in errors.items() if not error <= TOLERANCE]
    if wrong:
        raise _make_error(
            f"{name} computes wrong results on this device (relative error of {', '.join(wrong)}; "
            f"must be at most {TOLERANCE:g})",
            device,
            suggestion,
        )
    return (
        f"self-check: {check.kernel} kernels of experts agree with XLA on this device "
        f"({_format_elapsed(start_s)})"
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
    for remat in memory_fit.list_remats(spec, is_memory_known=True):
        for value in memory_fit.list_offloads_during_attention(spec, remat):
            yield dataclasses.replace(
                spec.remat_policy,
                remat=remat,
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
    """Relative error of the gradients of small layers, compared with no offloading.

    Args: see `compile_offload_gradients`.
    """

    def compute_gradients(policy: RematPolicy) -> list[np.ndarray]:
        compiled = compile_offload_gradients(
            policy, devices=devices, options=options, tokens=tokens, width=width
        )
        rng = np.random.default_rng(0)
        arguments = [
            jax.device_put(rng.standard_normal(x.shape, np.float32) * np.float32(std), place)
            for x, std, place in zip(
                compiled.args_info[0],
                (1, width**-0.5),
                compiled.input_shardings[0],
                strict=True,
            )
        ]
        return [np.asarray(gradient) for gradient in compiled(*arguments)]

    actual = compute_gradients(policy)
    expected = compute_gradients(RematPolicy(remat=policy.remat))
    relative_errors = [
        np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(actual, expected, strict=True)
    ]
    return float(np.nan_to_num(np.max(relative_errors), nan=np.inf))


def _shard_small_layers(
    param: Parameter, devices: Sequence[jax.Device], *, tokens: int
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the input and the weights of the small layers."""
    mesh = Mesh(np.array(devices).reshape(-1, 1), axes.SHARDS)
    specs = (jax.P(axes.SHARDS), sharding.partition_spec(param, len(devices)))
    shapes = ((len(devices) * tokens, param.shape[1]), sharding.stored_shape(param, len(devices)))
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def _mix_in_small_layer(_: None, inputs: tuple[Array], *__: Any) -> Array:
    """An elementwise operation, with the names of attention's results."""
    out_lD = jnp.tanh(inputs[0])
    for name in attention.CHECKPOINT_NAMES:
        out_lD = checkpoint_name(out_lD, name)
    return out_lD


def compile_offload_gradients(
    policy: RematPolicy,
    *,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] = types.MappingProxyType({}),
    tokens: int = 4096,
    width: int = 1024,
) -> jax.stages.Compiled:
    """Compiles the gradients of small layers as a function of their input and weights.

    They are layers of the model's stack whose parts are one product and elementwise operations. The
    weights are sharded over the devices, and each layer gathers its own, as in a training step:
    with gathers in the loop, prefetched activations were wrong on several GPUs and right on one
    (openxla/xla PR 37979).

    Args:
        policy: what is offloaded.
        devices: may be absent ones.
        options: XLA's compile options, as for the training step.
        tokens, width: shape of a layer's input on a device, 16 MiB; XLA may treat smaller copies
            differently.
    """
    num_layers = 6  # XLA unrolls shorter loops
    float32 = jnp.dtype(jnp.float32)
    param = Parameter(shape=(width, width), hf_name="", layers=tuple(range(num_layers)))
    gather = Gather(num_shards=len(devices), compute_dtype=float32, reduce_dtype=float32)
    kind = LayerKind(ATTENTION, "mlp")
    parts = LayerParts(
        pre=lambda shard, x, *_: ((x @ gather(param, shard),), ()),
        mix=_mix_in_small_layer,
        post=lambda _, x, out, *__: (x + jnp.sin(out), {}),
    )

    def loss(x_lD: Array, holders_NdD: Array, weights_NdD: Array) -> Array:
        own = Shard(value=weights_NdD, grad_holder=holders_NdD)
        out_lD, _ = layer_stack.run_layers(
            {kind: parts},
            x_lD,
            {kind: {"pre_attention": own, "post_attention": ()}},
            indices=(),
            batch=(),
            segments=[LayerSegment(0, (kind,), num_layers)],
            policy=policy,
            gather=gather,
        )
        return jnp.sum(out_lD**2)

    gradients = jax.grad(loss, argnums=(0, 1))
    shapes = _shard_small_layers(param, devices, tokens=tokens)
    specs = tuple(x.sharding.spec for x in shapes)
    on_mesh = jax.shard_map(
        lambda x, weights: gradients(x, jnp.zeros_like(weights), weights),
        mesh=shapes[0].sharding.mesh,
        in_specs=specs,
        out_specs=specs,
        check_vma=False,
    )
    with jax.default_matmul_precision("float32"):
        lowered = jax.jit(on_mesh).lower(*shapes)
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
    raise _make_error(
        "memory.offload_activations: gives wrong gradients of a small stack of layers on this "
        f"device (relative error {offload_error:.3g})",
        device,
        suggestion,
    )


def _make_error(problem: str, device: jax.Device, suggestion: str) -> UserError:
    return UserError(
        f"{problem}. Nothing was trained. Versions: jax {jax.__version__}, jaxlib "
        f"{jaxlib.__version__}, {cudnn_calls.describe_version()} on {device.device_kind}. "
        f"Use {suggestion}."
    )


def _format_elapsed(start_s: float) -> str:
    return f"{time.perf_counter() - start_s:.1f} s"
