"""What is tried on this very device before the first step, because releases of JAX and cuDNN had it wrong without a word.

jax 0.10.2 and 0.11.0 took keys from the wrong places in packed rows where query heads share them (jax PR 39521), and read
offloaded activations back in the wrong order (openxla/xla PR 46231); neither raised anything.
"""

import dataclasses
import math
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxsp import attention
from jaxsp.attention import AttentionChoice, Kernel, KernelSettings, LayerWorkload, Strategy
from jaxsp.attention.kernels import cudnn_calls
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.ulysses import Ulysses
from jaxsp.core.errors import UserError
from jaxsp.model import remat
from jaxsp.model.remat import RematPolicy
from jaxsp.training import compile_options
from jaxsp.training.train_step import Program

ATTENTION_TOLERANCE = 1e-2
"""Of `attention_differences` in bfloat16: rounding makes up to 3.4e-3 of them, seeing one token of another piece 0.1."""

OFFLOAD_TOLERANCE = 1e-4
"""Of gradients in float32 that were computed twice in the same way."""

_NO_AUTOTUNING: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Trying out which way of multiplying is fastest would take longer than all the rest."""

MAX_FILL_BYTES = 2 * 2**30
"""Maximum memory that is filled with NaN before a kernel runs.

Arrays and workspaces of the check take a few hundred MiB. The device's peak memory, a metric, counts the filled memory.
"""

_ROW_TOKENS = 1024
_SEGMENTS = (
    (
        (0, 300),
        (300, 1),
        (301, 211),
        (520, 129),
        (700, 260),
    ),  # lengths for two calls of cuDNN, padding in between and behind
    ((5, 690), (695, 300)),
)
_MAX_SEGMENTS = 6
_WINDOW = 100


def check_device(program: Program, choice: AttentionChoice) -> list[str]:
    """What was tried on this process's first device and found right, a line each; nothing on CPUs.

    Every process tries its own device, and none waits for another.
    Raises: UserError where something is wrong, with a way out.
    """
    device = next(
        one for one in program.mesh.devices.flat if one.process_index == jax.process_index()
    )
    if device.platform == "cpu":
        return []
    memory, model = program.config.memory, program.model
    done = []
    if choice.kernel.needs_selfcheck:
        began = time.perf_counter()
        heads, kv_heads = choice.strategy.local_heads(model.num_heads, model.num_kv_heads)
        alike: dict[str, Any] = {
            "heads_per_kv_head": heads // kv_heads,
            "num_kv_heads": min(2, kv_heads),
            "head_chunks": choice.settings.head_chunks,
            "head_dim": model.head_dim,
            "max_segments": program.config.data.max_segments_per_row,
            "dtype": program.dtype,
            "device": device,
        }
        raise_on_attention_error(
            measure_attention_error(choice.kernel, window=choice.window, **alike),
            device,
        )
        chunk_strategy = choice.strategy.on_one_device()
        if chunk_strategy is not None:
            raise_on_attention_error(
                measure_attention_error(
                    choice.kernel, window=None, strategy=chunk_strategy, **alike
                ),
                device,
            )
        done.append(
            f"self-check: {choice.kernel.describe()} attention agrees with the blockwise kernel "
            f"on this device ({_format_elapsed(began)})"
        )
    if memory.offload_activations != "none":
        began = time.perf_counter()
        _check_offloading(program, device)
        done.append(
            f"self-check: gradients are the same with and without offloaded activations ({_format_elapsed(began)})"
        )
    return done


def measure_attention_error(
    kernel: str | Kernel | Callable[..., Array],
    *,
    heads_per_kv_head: int,
    num_kv_heads: int,
    head_dim: int,
    max_segments: int,
    window: int | None,
    dtype: jnp.dtype,
    device: jax.Device,
    head_chunks: int = 1,
    strategy: Strategy | None = None,
) -> dict[str, float]:
    """How far a kernel's output and gradients are from those of the blockwise kernel in float32, on small packed rows.

    Args:
        sharing: query heads for each K/V head.
        max_pieces: with 1, rows of one piece are tried; with more, several and padding between them.
        window: tried with a shorter one, because the rows are short.
        head_chunks: tried with as many of these parts as there are heads for.
        strategy: on one device; None: whole rows.
    Units: root mean square of the difference in a piece, or in padding, over that of what is right there or in all pieces,
        whichever is larger; of the piece where this is most. Infinite where something is not a number.
    """
    arguments = make_attention_inputs(
        heads_per_kv_head=heads_per_kv_head,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_segments=max_segments,
        dtype=dtype,
    )
    starts_BM, lengths_BM = arguments[1]
    inputs, slots = jax.device_put(arguments, device)

    def results(
        kernel: str | Kernel | Callable[..., Array],
        computes_in: jnp.dtype,
        strategy: Strategy | None,
    ) -> dict[str, np.ndarray]:
        compiled = compile_attention(
            kernel,
            inputs,
            slots,
            dtype=computes_in,
            window=window,
            head_chunks=head_chunks,
            strategy=strategy,
        )
        fill_free_memory(device, num_bytes=choose_fill_bytes(device.memory_stats()))
        return dict(
            zip(("out", "dq", "dk", "dv"), map(np.asarray, compiled(inputs, slots)), strict=True)
        )

    found = results(kernel, dtype, strategy)
    right = results(BlockwiseKernel(), jnp.dtype(jnp.float32), None)
    piece_BL = np.full((len(starts_BM), _ROW_TOKENS), -1)
    for number, slot in np.argwhere(lengths_BM > 0):
        start, length = starts_BM[number, slot], lengths_BM[number, slot]
        piece_BL[number, start : start + length] = slot

    def size(x: np.ndarray) -> np.floating:
        return np.sqrt(np.mean(np.square(x, dtype=np.float64)))

    def furthest(name: str) -> float:
        overall = size(right[name][piece_BL >= 0])
        shares = []
        for row, piece in {(row, piece) for row, of_row in enumerate(piece_BL) for piece in of_row}:
            of_piece = row, piece_BL[row] == piece
            own = right[name][of_piece]
            shares.append(size(found[name][of_piece] - own) / max(size(own), overall))
        return float(np.nan_to_num(np.max(shares), nan=np.inf))

    return {name: furthest(name) for name in right}


def choose_fill_bytes(stats: Mapping[str, int] | None) -> int:
    """Half of the free memory of a device, at most FILL_BYTES; 0 without stats, as on CPUs.

    Args: stats: the device's memory_stats().
    """
    if stats is None:
        return 0
    return min(max(stats["bytes_limit"] - stats["bytes_in_use"], 0) // 2, MAX_FILL_BYTES)


def fill_free_memory(device: jax.Device, *, num_bytes: int) -> None:
    """Fills free memory of a device with NaN and frees it again, for the next allocations to reuse.

    The memory of a new process is mostly zero, and XLA does not clear workspaces. Without this, a kernel
    that reads its workspace before it writes there could pass the check and give NaN in training
    (TransformerEngine issue 2186). XLA's BFC allocator cuts an allocation from the lowest addresses of the
    smallest free block that is large enough. Early in a process that is one block: the fill takes its
    beginning, and so do the allocations after it.
    """
    if num_bytes == 0:
        return
    filled = jax.block_until_ready(jnp.full(num_bytes // 4, jnp.nan, jnp.float32, device=device))
    filled.delete()


def make_attention_inputs(
    *, heads_per_kv_head: int, num_kv_heads: int, head_dim: int, max_segments: int, dtype: jnp.dtype
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns q, k, v and the output's gradient, and starts and lengths, of small packed rows."""
    pieces = _SEGMENTS if max_segments > 1 else (((0, _ROW_TOKENS - 100),), ((0, _ROW_TOKENS),))
    starts_BM, lengths_BM = (
        np.zeros((len(pieces), min(max_segments, _MAX_SEGMENTS)), np.int32) for _ in range(2)
    )
    for row, of_row in enumerate(pieces):
        for slot, (start, length) in enumerate(of_row[: starts_BM.shape[1]]):
            starts_BM[row, slot], lengths_BM[row, slot] = start, length
    rng = np.random.default_rng(0)
    heads = (
        heads_per_kv_head * num_kv_heads,
        num_kv_heads,
        num_kv_heads,
        heads_per_kv_head * num_kv_heads,
    )
    drawn = (
        rng.standard_normal((len(pieces), _ROW_TOKENS, x, head_dim), np.float32) for x in heads
    )
    return [np.asarray(x, dtype) for x in drawn], [starts_BM, lengths_BM]


def compile_attention(
    kernel: str | Kernel | Callable[..., Array],
    inputs: list[Any],
    segments: list[Any],
    *,
    dtype: jnp.dtype,
    window: int | None,
    head_chunks: int = 1,
    strategy: Strategy | None = None,
) -> jax.stages.Compiled:
    """Compiles a kernel's output and gradients, in float32, as functions of `attention_arguments`.

    Args:
        inputs, slots: arrays, or their shapes on an absent device.
        dtype: the kernel computes in it.
    """
    kernel = attention.as_kernel(kernel)
    num_rows, row_tokens, num_heads, head_dim = inputs[0].shape
    strategy = strategy or Ulysses(seq=1)
    layer = LayerWorkload(
        num_rows=num_rows,
        tokens_per_device=row_tokens,
        row_tokens=row_tokens,
        max_segments=segments[0].shape[1],
        num_heads=num_heads,
        num_kv_heads=inputs[1].shape[2],
        head_dim=head_dim,
        dtype=str(dtype),
    )
    legal = kernel.legal_head_chunks(strategy.kernel_workload(layer))
    attend = attention.make_attend(
        kernel=kernel,
        strategy=strategy,
        window=None if window is None else min(window, _WINDOW),
        settings=KernelSettings(head_chunks=max(n for n in legal if n <= head_chunks)),
    )

    def run(inputs: list[Array], slots: list[Array]) -> list[Array]:
        *qkv, dout = (x.astype(dtype) for x in inputs)
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, *slots), *qkv)
        return [x.astype(jnp.float32) for x in (out, *pull(dout))]

    return jax.jit(run).lower(inputs, segments).compile(compiler_options=_NO_AUTOTUNING)


def raise_on_attention_error(attention_errors: Mapping[str, float], device: jax.Device) -> None:
    """Raises: UserError where a difference is larger than rounding explains."""
    wrong = {
        name: value for name, value in attention_errors.items() if not value <= ATTENTION_TOLERANCE
    }
    if wrong:
        said = ", ".join(f"{name} by {value:.3g}" for name, value in wrong.items())
        raise UserError(
            f"attention.kernel = cudnn: computes wrong on this device: {said} of what is right, where rounding explains "
            f"{ATTENTION_TOLERANCE:g}. Nothing was trained. {_versions(device)}. Use attention.kernel=blockwise, or other releases."
        )


def _check_offloading(program: Program, device: jax.Device) -> None:
    """Raises: UserError if gradients are wrong, with a suggestion that was tested on this
    device."""
    prefetch = {
        name: value
        for name, value in program.compile_options.options.items()
        if name in compile_options.PREFETCH_FROM_HOST
    }
    candidates = [program.remat_policy]
    if program.config.memory.remat == "auto" and not program.remat_policy.is_attention_offloaded:
        candidates.append(dataclasses.replace(program.remat_policy, remat="full"))
    for how in candidates:
        difference = measure_offload_error(how, device=device, options=prefetch)
        without = difference
        if not difference <= OFFLOAD_TOLERANCE and any(prefetch.values()):
            without = measure_offload_error(
                how, device=device, options=dict.fromkeys(prefetch, False)
            )
        raise_on_offload_error(difference, device, without_prefetch=without)


def measure_offload_error(
    policy: RematPolicy,
    *,
    device: jax.Device,
    options: Mapping[str, Any] = types.MappingProxyType({}),
    tokens: int = 4096,
    width: int = 1024,
    checkpoint_layer: Callable[
        [Callable[..., Any], RematPolicy], Callable[..., Any]
    ] = remat.checkpoint_layer,
) -> float:
    """How far gradients of a small stack of layers are from those without offload, relative.

    Args:
        how: what is offloaded.
        options: XLA's compile options, as for the training step.
        tokens, width: of a layer's input, 16 MiB: smaller copies XLA may treat differently.
        layer: what makes a layer do so.
    """
    arguments = jax.device_put(make_offload_inputs(tokens=tokens, width=width), device)

    def gradients(how: RematPolicy) -> list[np.ndarray]:
        compiled = compile_offload_gradients(
            how, *arguments, options=options, checkpoint_layer=checkpoint_layer
        )
        return [np.asarray(x) for x in compiled(*arguments)]

    found, right = gradients(policy), gradients(RematPolicy(remat=policy.remat))
    shares = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, right, strict=True)]
    return float(np.nan_to_num(np.max(shares), nan=np.inf))


def make_offload_inputs(*, tokens: int = 4096, width: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """Returns the input and the weights of the small stack of layers; see `offload_difference`."""
    num_layers = 6  # XLA writes shorter loops out
    rng = np.random.default_rng(0)
    x_LD = rng.standard_normal((tokens, width), np.float32)
    return x_LD, rng.standard_normal((num_layers, width, width), np.float32) / width**0.5


def compile_offload_gradients(
    policy: RematPolicy,
    x_LD: Any,
    weights_NDD: Any,
    *,
    options: Mapping[str, Any] = types.MappingProxyType({}),
    checkpoint_layer: Callable[
        [Callable[..., Any], RematPolicy], Callable[..., Any]
    ] = remat.checkpoint_layer,
) -> jax.stages.Compiled:
    """Compiles the gradients of the small stack of layers as a function of `offload_arguments`.

    Args:
        x_LD, weights_NDD: arrays, or their shapes on an absent device.
        options: XLA's compile options, as for the training step.
    """

    def one(x_LD: Array, weight_DD: Array) -> tuple[Array, None]:
        x_LD = remat.name_layer_input(x_LD)
        out_LD = jnp.tanh(x_LD @ weight_DD)
        for name in attention.CHECKPOINT_NAMES:
            out_LD = checkpoint_name(out_LD, name)
        return x_LD + jnp.sin(out_LD), None

    def total(x_LD: Array, weights_NDD: Array) -> Array:
        return jnp.sum(jax.lax.scan(checkpoint_layer(one, policy), x_LD, weights_NDD)[0] ** 2)

    with jax.default_matmul_precision("float32"):
        lowered = jax.jit(jax.grad(total, argnums=(0, 1))).lower(x_LD, weights_NDD)
    return lowered.compile(compiler_options={**_NO_AUTOTUNING, **options})


def raise_on_offload_error(
    offload_error: float, device: jax.Device, *, without_prefetch: float = math.inf
) -> None:
    """Raises: UserError if gradients differ.

    Args: without_prefetch: the difference if activations are not prefetched.
    """
    if offload_error <= OFFLOAD_TOLERANCE:
        return
    (prefetch,) = compile_options.PREFETCH_FROM_HOST
    way = "memory.offload_activations=none, or another release of jax"
    if without_prefetch <= OFFLOAD_TOLERANCE:
        way = f"run.xla_options='{{{prefetch}: false}}', with which gradients are right, or another release of jax"
    raise UserError(
        f"memory.offload_activations: gradients of a small stack of layers are wrong with it on this device, relative "
        f"error {offload_error:.3g}. Nothing was trained. {_versions(device)}. Use {way}."
    )


def _versions(device: jax.Device) -> str:
    return f"This is jax {jax.__version__}, jaxlib {jaxlib.__version__}, {cudnn_calls.describe_version()} on {device.device_kind}"


def _format_elapsed(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"
