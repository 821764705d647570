"""XLA's compile options for the training step.

Options are passed with the program, not in XLA_FLAGS: an unknown name there ends the process as soon as XLA looks for devices,
and names come and go. There are few of them, because XLA of the releases in TRIED does by default most of what is usually
recommended. Tried without gain on all of them: pipelined all-gathers, which cost more in copies of weights than the first
gather of each layer waits (8B on 8 H100s: 0.2 to 1.1 % of a step), and with several microbatches keep a second stack of
activations; the latency-hiding scheduler and pipelined reduce-scatters leave the compiled step the same to the letter.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, cast

import jax
import jaxlib
from jax.sharding import Mesh
from jaxlib.mlir import ir

from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.runtime import jax_platform

XlaOptions = dict[str, bool | int | float | str]


DETERMINISTIC: XlaOptions = {"xla_gpu_deterministic_ops": True}
"""Sums in a fixed order, and no choice of kernels by timing. In the gradient of the embedding, tokens are sorted first (0.12),
or added one after another (0.10)."""

NO_TRITON: XlaOptions = {"xla_gpu_enable_triton_gemm": False}
"""As of 0.11, XLA otherwise chooses Triton's kernels, and fails with DETERMINISTIC because it may
use none of them."""

NO_REMATERIALIZATION: XlaOptions = {"xla_disable_hlo_passes": "rematerialization"}
"""XLA must not rematerialize what does not fit: `memory.remat` chooses better places. If
activations are offloaded, XLA's pass also counts them as the device's, and takes half of the
compile time at 1M tokens."""

OVERLAP_IN_LOOPS: XlaOptions = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
"""Lets all gathers of a layer overlap its loop over tiles. By default XLA overlaps one collective with
a loop. 8B on 8 H100s, 32,768 tokens each, 4 tiles, seconds of a step that wait for collectives: 0.10
without and 0.03 with it (jax 0.12), 0.06 and 0.01 (0.10). Without tiles it makes the schedule worse
(0.01 to 0.03)."""

PREFETCH_FROM_HOST: XlaOptions = {"xla_gpu_enable_pipelined_host_offloading": True}
"""The backward pass copies the activations of the next layer from the host while it computes this one. 8B on 8 H100s, 32,768
tokens each, layer inputs and attention offloaded, seconds of a step waited for copies: 0.61 before, 0.01 with it (jax 0.12).
Pipelining a loop is where jax 0.10.2 and 0.11.0 had wrong gradients: `selfcheck` tries it on the device before training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseRange:
    """Releases of jaxlib on which the options were tried, first and last included."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    deterministic: XlaOptions = dataclasses.field(default_factory=lambda: DETERMINISTIC | NO_TRITON)


TESTED_RELEASES = (
    ReleaseRange(first=(0, 10, 1), last=(0, 10, 1), deterministic=DETERMINISTIC),
    ReleaseRange(first=(0, 11, 1), last=(0, 11, 2)),
    ReleaseRange(first=(0, 12, 0), last=(0, 12, 0, 1)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What a program is compiled with."""

    options: XlaOptions
    description: str
    """Description for the banner; empty if there is nothing to report."""
    is_deterministic: bool = False
    """True if cuDNN's backward passes must be deterministic too."""


def choose_options(
    config: Config,
    *,
    mesh: Mesh,
    is_tiled: bool,
    environ: Mapping[str, str] = os.environ,
    version: str = jaxlib.__version__,
) -> CompileOptions:
    """Compile options for a config's step. run.xla_options overrides XLA_FLAGS, which overrides our
    options.

    Args:
        mesh: of devices here or absent. For CPUs, no options are ours.
        is_tiled: whether a device's tokens go through a layer in tiles.
        version: of jaxlib.
    Raises: UserError if run.xla_options and run.deterministic contradict each other.
    """
    asked, deterministic = config.run.xla_options, config.run.deterministic
    by_flags = [name for name in _flag_names(environ.get("XLA_FLAGS", "")) if name not in asked]
    ours: XlaOptions = {}
    parts = []
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    if on_gpu:
        known = next(
            (one for one in TESTED_RELEASES if one.first <= parse_version(version) <= one.last),
            None,
        )
        if known is None:
            parts.append(f"defaults, because options were not tested with jaxlib {version}")
        else:
            ours |= NO_REMATERIALIZATION
            if is_tiled and mesh.size > 1:
                ours |= OVERLAP_IN_LOOPS
            if config.memory.offload_activations != "none":
                ours |= PREFETCH_FROM_HOST
                if not PREFETCH_FROM_HOST.keys() & {*asked, *by_flags}:
                    parts.append("activations of the next layer are prefetched from host memory")
            ours = {name: value for name, value in ours.items() if name not in by_flags}
        if deterministic:
            fixed = known.deterministic if known else DETERMINISTIC
            for name in fixed.keys() & asked.keys():
                if asked[name] != fixed[name]:
                    raise UserError(
                        f"run.xla_options.{name} = {_format_value(asked[name])}: run.deterministic = true sets it to "
                        f"{_format_value(fixed[name])}. Leave one of them out."
                    )
            ours |= fixed
            parts.append(
                "deterministic: sums in a fixed order, kernels not chosen by timing them, cuDNN's deterministic backward pass; "
                "each of these can cost speed, and the last memory"
            )
    elif deterministic:
        parts.append("run.deterministic has no effect: CPUs are always deterministic")
    if asked:
        parts.append(
            f"run.xla_options: {', '.join(f'{name}={_format_value(value)}' for name, value in asked.items())}"
        )
    if by_flags:
        parts.append(f"XLA_FLAGS: {', '.join(by_flags)}")
    return CompileOptions(
        options=ours | asked,
        description="; ".join(parts),
        is_deterministic=deterministic and on_gpu,
    )


def compile_lowered(lowered: jax.stages.Lowered, options: CompileOptions) -> jax.stages.Compiled:
    """A program compiled with these options. Raises: UserError for an option, or a value of one, that XLA does not take."""
    if options.is_deterministic:
        _make_cudnn_deterministic(lowered)
    try:
        return lowered.compile(
            compiler_options=cast(Any, options.options)
        )  # numbers too, whatever its annotation says
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"(No such compile option: '|While setting option )(\w+)", str(error))
        if found is None:
            raise
        name = found[2]
        given = options.options.get(name)
        field = f"run.xla_options.{name} = {repr(given) if isinstance(given, str) else _format_value(given)}"
        if found[1].startswith("No such"):
            raise UserError(
                f"{field}: XLA of jaxlib {jaxlib.__version__} has no such option. Leave it out."
            ) from None
        rule = str(error).rpartition(" is ")[2].strip().rstrip(".")
        raise UserError(
            f"{field}: is {rule}. Flags are true or false without quotes, not 1 or 0; enums are names in full, such as "
            "COLLECTIVE_PIPELINING_MODE_OFF of xla_gpu_pipeline_all_gather."
        ) from None


def _make_cudnn_deterministic(lowered: jax.stages.Lowered) -> None:
    """Tells cuDNN's backward passes to add up the queries' gradients in a fixed order; JAX has no argument for it.

    Source: force_deterministic of CudnnfMHABackendConfig, openxla/xla xla/service/gpu/backend_configs.proto; XLA makes
        set_deterministic_algorithm of NVIDIA/cudnn-frontend's SDPA_backward of it. With xla_gpu_deterministic_ops alone, the
        compiled calls of jaxlib 0.10.1 and 0.12.0.1 are as without.
    """
    module: Any = lowered.compiler_ir()

    def fix(op: Any) -> Any:
        attributes = op.attributes
        if op.name == "stablehlo.custom_call" and re.match(
            _BACKWARD_CALL_TARGET, attributes["call_target_name"].value
        ):
            told = json.loads(attributes["backend_config"].value)
            told["cudnn_fmha_backend_config"]["force_deterministic"] = True
            attributes["backend_config"] = ir.StringAttr.get(json.dumps(told))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(fix)


_BACKWARD_CALL_TARGET = r"__cudnn\$fmha\w*Backward$"
"""What XLA calls cuDNN's backward passes of attention."""


def _flag_names(flags: str) -> list[str]:
    """Names that XLA_FLAGS sets, without our own flags for CPU devices.

    The variable holds flags or the name of a file of flags.
    """
    flags = " ".join(
        flag for flag in flags.split() if flag not in jax_platform.collective_timeout_flags()
    )
    if flags.strip() and not flags.strip().startswith("-"):
        file = pathlib.Path(flags.strip())
        flags = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.findall(r"(?:^|\s)--?(xla_\w+)", flags)


def parse_version(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with. Example: 0.12.1.dev3 is (0, 12, 1), and so is 0.12.1rc1."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
