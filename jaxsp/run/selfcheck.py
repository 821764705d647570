"""Checks of kernels on this device before the first step: they agree with XLA in float32.

Releases of JAX and cuDNN have computed wrong results silently. jax 0.10.2 and 0.11.0 read keys at
wrong offsets in packed rows if query heads share them (jax PR 39521).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import cudnn_calls, segments
from jaxsp.attention.kernels.kernel import Kernel, KernelSettings, ScoreConfig
from jaxsp.attention.strategy import Strategy, combine
from jaxsp.blocks import float8
from jaxsp.blocks.config import DeltaNetConfig
from jaxsp.core.errors import UserError, first_line
from jaxsp.core.layout import KEPT_ORDER
from jaxsp.core.units import GIB
from jaxsp.delta_rule import delta_rule
from jaxsp.delta_rule import kernels as delta_kernels
from jaxsp.delta_rule.spans import RowSpans
from jaxsp.experts import kernels as expert_kernels
from jaxsp.training import compile_options
from jaxsp.training.specs import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """Comparison of a kernel's output and gradients with those of a reference, on small inputs."""

    field: str
    """The kernel, or the setting that chooses it."""
    suggestion: str
    """Setting that avoids the kernel."""
    tolerance: float
    """Maximum error of the output and of each gradient."""
    kernel: Callable[..., Array]
    reference: Callable[..., Array]
    """Functions of the inputs and the constants, by position; the reference's are float32."""
    dtype: str = "bfloat16"
    """Dtype in which the kernel computes: bfloat16 inputs are cast to it."""
    inputs: Mapping[str, np.ndarray]
    """Inputs by name; the last is the gradient of the output."""
    constants: Sequence[np.ndarray] = ()
    find_error: Callable[[np.ndarray, np.ndarray], Any] = lambda *pair: _compare(*pair)
    options: Mapping[str, Any] | None = None
    """XLA's compile options; None: without autotuning, which would take longer than the rest."""

    def run(self, device: jax.Device) -> None:
        """Raises: UserError, with a suggestion, if the kernel is wrong or does not run."""
        if problem := self.find_problem(device):
            raise UserError(
                f"{problem}. Nothing was trained. Versions: jax {jax.__version__}, "
                f"jaxlib {jaxlib.__version__}, {cudnn_calls.describe_version()} on "
                f"{device.device_kind}. Use {self.suggestion}, or other releases."
            )

    def find_problem(self, device: jax.Device) -> str:
        """Problem of the kernel on a device; empty if there is none."""
        try:
            errors = self.measure_errors(device)
        except Exception as error:  # compilers of kernels have errors of many classes
            return f"{self.field}: does not run on this device: {first_line(error)}"
        limit = self.tolerance
        wrong = [f"{name} {error:.3g}" for name, error in errors.items() if not error <= limit]
        if not wrong:
            return ""
        return (
            f"{self.field}: computes wrong results on this device (relative error of "
            f"{', '.join(wrong)}; must be at most {limit:g})"
        )

    def measure_errors(self, device: jax.Device) -> dict[str, float]:
        """Errors of the output, `out`, and of the gradient of each input, such as `dq`."""
        reference = dataclasses.replace(self, kernel=self.reference, dtype="float32")
        arguments = jax.device_put([*self.inputs.values(), *self.constants], device)
        results = []
        for check in (self, reference):
            compiled = check.compile(device)
            fill_free_memory(device, device.memory_stats())
            results.append(map(np.asarray, compiled(*arguments)))
        names = ("out", *(f"d{name}" for name in self.inputs))
        return {x: float(self.find_error(*pair)) for x, *pair in zip(names, *results, strict=False)}

    def compile(self, device: jax.Device) -> jax.stages.Compiled:
        """Compiles the output and the gradients for a device, which may be an absent one."""

        def compute(*arguments: Array) -> list[Array]:
            constants = arguments[len(self.inputs) :]
            cast = lambda x: x.astype(self.dtype) if x.dtype == jnp.bfloat16 else x
            *inputs, dout = map(cast, arguments[: len(self.inputs)])
            out, pull = jax.vjp(lambda *x: self.kernel(*x, *constants), *inputs)
            return [x.astype(jnp.float32) for x in (out, *pull(dout))]

        options = dict(self.options or {"xla_gpu_autotune_level": "0"})
        place = jax.sharding.SingleDeviceSharding(device)
        arrays = (*self.inputs.values(), *self.constants)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays]
        with jax.default_matmul_precision("float32" if self.dtype == "float32" else None):
            return jax.jit(compute).lower(*shapes).compile(compiler_options=options)


DELTA_NET_FIELD = "model.delta_net_kernel"


def check_device(spec: StepSpec, *, may_replace: bool = False) -> tuple[list[str], str]:
    """Checks a step's kernels on this process's first device.

    Attention has a check for each kind of layer over whole rows, and one over chunks of rows if the
    strategy computes those. CPUs are not checked.

    Args: may_replace: whether the kernel of delta nets can be replaced if its check fails.
    Returns: a line about the checks, and the problem for which it must be replaced.
    Raises: UserError if another check fails.
    """
    device = next(x for x in spec.mesh.devices.flat if x.process_index == jax.process_index())
    if device.platform == "cpu":
        return [], ""
    lines: list[str] = []
    if spec.teacher is not None:
        lines, _ = check_device(spec.teacher)
    start_s = time.perf_counter()
    model = spec.model
    dtype = str(spec.dtype)
    choice = spec.attention
    checks = []
    for tokens in dict.fromkeys((None, choice.strategy.tokens.on_one_device())):
        for score in dict.fromkeys(choice.layer_scores):
            kernel, settings = choice.find_kernel(score.heads)
            num_kv_heads, head_dim = score.heads or (model.num_kv_heads, model.head_dim)
            if kernel.needs_selfcheck:
                check = check_attention(
                    kernel,
                    heads=choice.strategy.heads.local_heads(model.num_heads, num_kv_heads),
                    head_dim=head_dim,
                    max_segments=spec.config.max_segments,
                    dtype=dtype,
                    score=score,
                    settings=settings,
                    strategy=combine(1, tokens),
                )
                checks.append(check)
    if model.delta_net is not None:
        checks += check_delta_rule(model.delta_net, dtype)
    if (experts := model.experts) is not None and experts.kernel != "xla":
        checks.append(check_experts(experts.kernel, width=model.hidden_size, size=experts.size))
    if model.linear_dtype is not None:
        sizes = model.hidden_size, model.intermediate_size
        checks.append(check_float8(*sizes, name=model.linear_dtype))
    for check in checks:
        if not (may_replace and check.field.startswith(DELTA_NET_FIELD)):
            check.run(device)
        elif problem := check.find_problem(device):
            return [], problem
    fields = ", ".join(dict.fromkeys(check.field for check in checks))
    text = f"self-check: {fields}: agrees with XLA on this device"
    if checks:
        lines.append(f"{text} ({time.perf_counter() - start_s:.1f} s)")
    return lines, ""


def check_attention(
    kernel: Kernel,
    *,
    heads: tuple[int, int],
    head_dim: int,
    max_segments: int,
    dtype: str,
    score: ScoreConfig,
    settings: KernelSettings,
    strategy: Strategy,
) -> KernelCheck:
    """Check of attention over two short rows, of one segment or of several with padding between.

    Args: heads: numbers of query and K/V heads of a device; strategy: on one device.
    """
    # The lengths need two calls of cuDNN, with padding between segments and at the end
    row_tokens = 1024
    starts_BM = np.array([[0, 300, 301, 520, 700, 0], [5, 695, 0, 0, 0, 0]], np.int32)
    lengths_BM = np.array([[300, 1, 211, 129, 260, 0], [690, 300, 0, 0, 0, 0]], np.int32)
    if max_segments == 1:
        starts_BM = np.zeros((2, 1), np.int32)
        lengths_BM = np.array([[row_tokens - 100], [row_tokens]], np.int32)
    constants = [array[:, :max_segments] for array in (starts_BM, lengths_BM)]
    if score.window is not None:
        score = dataclasses.replace(score, window=min(score.window, 100))
    G = min(2, heads[1])
    H = G * heads[0] // heads[1]
    chunks = (n for n in range(1, settings.head_chunks + 1) if H % n == 0 and 0 in (G % n, n % G))
    settings = KernelSettings(head_chunks=max(chunks), copies_segments=settings.copies_segments)
    starts, lengths = map(jnp.asarray, constants)
    segment_BL = np.asarray(segments.segment_ids(starts, lengths, row_tokens))
    make = functools.partial(make_attend, layer_scores=[score])
    queries, keys = ((2, row_tokens, n, head_dim) for n in (H, G))
    return KernelCheck(
        field=f"attention.kernel = {kernel.name}",
        suggestion="attention.kernel=blockwise",
        # Rounding gives up to 3.4e-3; attention to one token of another segment gives 0.1
        tolerance=1e-2,
        kernel=make(kernel=kernel, strategy=strategy, settings=settings),
        reference=make(kernel="blockwise"),
        dtype=dtype,
        inputs=_draw(q=queries, k=keys, v=keys, out=queries),
        constants=constants,
        find_error=functools.partial(_compare_segments, segment_BL),
    )


def check_delta_rule(sizes: DeltaNetConfig, dtype: str) -> Iterator[KernelCheck]:
    """Checks of the delta rule with several sections, between which states pass, and of `jla` also
    with one, against the recurrence, token by token.

    Rounding gives errors up to 6.5e-3 in bfloat16 and 7.7e-7 in float32 on a CPU. A GPU adds up in
    another order. A state that passes to the next segment gives more than 0.1.
    """
    row_tokens = 1100  # more than one section, the last of which is padded
    starts_BM = jnp.array([[3, 40, 41, 700]], np.int32)  # in a chunk, one token, over two sections
    lengths_BM = jnp.array([[37, 1, 600, 390]], np.int32)
    is_first_BL = np.isin(np.arange(row_tokens), np.asarray(starts_BM))[None]
    G = min(2, sizes.num_key_heads)
    H = G * sizes.num_heads // sizes.num_key_heads
    keys = (1, row_tokens, G, sizes.key_size)
    values = (1, row_tokens, H, sizes.value_size)
    inputs = _draw(q=keys, k=keys, v=values, g=values[:3], beta=values[:3], out=values)
    inputs["g"] = -0.1 * np.random.default_rng(1).random(values[:3], np.float32)
    inputs["beta"] = np.float32(-10 * sizes.strength_scale) * inputs["g"]
    segment_BL = np.asarray(segments.segment_ids(starts_BM, lengths_BM, row_tokens))
    for array in inputs.values():
        array[segment_BL < 0] = 0
    spans = RowSpans(seq=1, layout=KEPT_ORDER, tokens_per_device=row_tokens)

    def recur(*inputs: Array) -> Array:
        @jax.checkpoint  # keeps one state for each token
        def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
            *own, is_first = (x[:, None] for x in token)
            state = jnp.where(is_first[..., None, None, None], 0, state)
            out, state = delta_rule.compute_token(state, *own)
            return state, out[:, 0]

        first = jnp.zeros((1, G, H // G, sizes.key_size, sizes.value_size))
        _, out = jax.lax.scan(step, first, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
        return jnp.moveaxis(out, 0, 1)

    suggestion = f"model.compute_dtype={'float32' if dtype == 'bfloat16' else 'bfloat16'}"
    max_chunks: tuple[int | None, ...] = (4,)
    if sizes.kernel == "jla":
        suggestion = f"{DELTA_NET_FIELD}=xla"
        max_chunks = (None, 9)
    for count in max_chunks:
        yield KernelCheck(
            field=f"{DELTA_NET_FIELD} = {sizes.kernel}",
            suggestion=suggestion,
            tolerance={"bfloat16": 2e-2, "float32": 1e-4}[dtype],
            kernel=functools.partial(
                delta_kernels.find(sizes.kernel), spans=spans, max_chunks=count
            ),
            reference=recur,
            dtype=dtype,
            inputs=inputs,
            constants=[is_first_BL],
            find_error=functools.partial(_compare_segments, segment_BL),
        )


def check_experts(kernel: str, *, width: int, size: int) -> KernelCheck:
    """Check of products with experts' matrices and an adapter, against XLA's loop over tiles.

    Rounding to bfloat16 gives errors up to 5e-3 on a CPU; an expert's tile that is multiplied with
    another expert's matrix gives more than 0.1.
    """
    # One of the experts has two tiles, and one has no tokens; no last tile is full
    experts_TK = np.array([[0, 2]] * 70 + [[2, 3]] * 90 + [[3, 0]], np.int32)
    T = len(experts_TK)
    shapes = {"up": (4, size, width), "down": (4, width, size)}
    shapes |= {"down_a": (4, 8, size), "down_b": (4, width, 8)}
    inputs = _draw(**shapes, up_bias=(4, size), x=(T, width), shares=(T, 2), out=(T, width))
    for name, shape in shapes.items():
        inputs[name] *= np.asarray(shape[-1] ** -0.5, jnp.bfloat16)
    inputs["shares"] = np.abs(np.float32(inputs["shares"]))

    def run_block(x: Array, weights: Mapping[str, Any]) -> Array:
        hidden = jax.nn.silu(weights["up_bias"].add_to(weights["up"].multiply(x)))
        adapted = weights["down_b"].multiply(weights["down_a"].multiply(hidden))
        return weights["down"].multiply(hidden) + adapted

    def apply(kernel: str, *arrays: Array) -> Array:
        weights = dict(zip(inputs, arrays[:5], strict=False))
        return expert_kernels.find(kernel)(run_block, weights, *arrays[5:])

    return KernelCheck(
        field=f"model.experts_kernel = {kernel}",
        suggestion="model.experts_kernel=xla",
        tolerance=2e-2,
        kernel=functools.partial(apply, kernel),
        reference=functools.partial(apply, "xla"),
        inputs=inputs,
        constants=[experts_TK],
    )


def check_float8(dim_in: int, dim_out: int, *, name: str = float8.NAME) -> KernelCheck:
    """Check of products in 8-bit floats. Rounding of both factors gives errors up to 0.06.

    The sizes of tokens differ, so that each needs its own scale.
    """
    inputs = _draw(x=(256, dim_in), weight=(dim_out, dim_in), out=(256, dim_out))
    sizes = np.exp2(np.random.default_rng(1).integers(-20, 20, (256, 1)))
    inputs["x"] = (inputs["x"] * sizes).astype(jnp.bfloat16)
    inputs["weight"] = inputs["weight"].astype(np.float32)
    inputs["out"] = (inputs["out"] / sizes).astype(jnp.bfloat16)
    return KernelCheck(
        field=f"model.linear_dtype = {name}",
        suggestion="model.linear_dtype=null",
        tolerance=0.08,
        kernel=functools.partial(float8.multiply, is_gradient_float8=name == float8.ALL),
        reference=lambda x, weight: x @ weight.T,
        inputs=inputs,
        find_error=functools.partial(_compare, axis=-1),
        options=compile_options.NO_TRITON,
    )


def _draw(**shapes: Sequence[int]) -> dict[str, np.ndarray]:
    """Draws normal values, as bfloat16 has them, for each name."""
    normal = np.random.default_rng(0).standard_normal
    return {name: np.array(normal(shape), jnp.bfloat16) for name, shape in shapes.items()}


def _compare(actual: np.ndarray, expected: np.ndarray, axis: int | None = None) -> Any:
    """Relative error of the array, or of the row where it is largest."""
    norm = functools.partial(np.linalg.norm, axis=axis)
    return np.max(norm(actual - expected) / norm(expected))


def _compare_segments(segment_BL: np.ndarray, actual: np.ndarray, expected: np.ndarray) -> Any:
    """Relative root mean square error of the segment, or the padding, where it is largest.

    Relative to the root mean square expected in it or in all segments, whichever is larger.
    """
    root_mean_square = lambda x: np.sqrt(np.mean(np.square(x, dtype=np.float64)))
    overall = root_mean_square(expected[segment_BL >= 0])
    places = [(row, x == n) for row, x in enumerate(segment_BL) for n in np.unique(x)]
    bases = [np.maximum(root_mean_square(expected[place]), overall) for place in places]
    errors = [root_mean_square(actual[place] - expected[place]) for place in places]
    return np.max(np.divide(errors, bases))


def fill_free_memory(device: jax.Device, stats: Mapping[str, int] | None) -> None:
    """Fills up to 2 GiB with NaN and frees them again, for the next allocations to reuse.

    The memory of a new process is mostly zero, and XLA does not clear workspaces: a kernel that
    reads its workspace before writing to it could pass, and give NaN in training
    (TransformerEngine issue 2186).
    """
    if stats is not None:  # CPUs have none
        free = max(0, stats["bytes_limit"] - stats["bytes_in_use"])
        filled = jnp.full(min(free // 2, 2 * GIB) // 4, jnp.nan, jnp.float32, device=device)
        jax.block_until_ready(filled).delete()
