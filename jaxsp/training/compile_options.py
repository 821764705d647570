"""XLA's compile options for the training step.

Options are passed with the program, not in XLA_FLAGS: an unknown name there ends the process as
soon as XLA looks for devices, and names change between releases. There are few of them, because XLA
of the releases in TESTED_RELEASES does by default most of what is usually recommended.

Tried without gain on all of them:
- Pipelined all-gathers. They cost more in copies of weights than each layer's first gather waits
  (8B on 8 H100s: 0.2 to 1.1 % of a step), and with several microbatches they keep a second stack of
  activations.
- The latency-hiding scheduler. The compiled step is identical.
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

from jaxsp.attention.kernels import cudnn_calls
from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.model.remat import RematPolicy
from jaxsp.system import jax_platform
from jaxsp.training.step_config import StepConfig

XlaOptions = dict[str, bool | int | float | str]

DETERMINISTIC: XlaOptions = {"xla_gpu_deterministic_ops": True}
"""Computes sums in a fixed order, and does not choose kernels by timing.

In the gradient of the embedding, XLA sorts the tokens first (0.12), or adds one after another
(0.10).
"""

NO_TRITON: XlaOptions = {"xla_gpu_enable_triton_gemm": False}
"""Disables Triton's matrix multiplications.

As of 0.11, XLA otherwise chooses them, and fails with DETERMINISTIC, which permits none of them.
With `model.linear_dtype: float8`, cuBLAS has the faster products.
"""

NO_REMATERIALIZATION: XlaOptions = {"xla_disable_hlo_passes": "rematerialization"}
"""Disables XLA's rematerialization: `memory.remat` chooses better places.

If activations are offloaded, XLA's pass also counts them as device memory, and takes half of the
compile time at 1M tokens.
"""

OVERLAP_IN_LOOPS: XlaOptions = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
"""Lets all gathers of a layer overlap its loop over tiles.

By default, XLA overlaps one collective with a loop. Seconds of a step that wait for collectives, 8B
on 8 H100s, 32,768 tokens each, 4 tiles: 0.10 without and 0.03 with it (jax 0.12), 0.06 and 0.01
(0.10). Without tiles it makes the schedule worse (0.01 to 0.03).
"""

MEMORY_FOR_OVERLAP: XlaOptions = {"xla_gpu_memory_limit_slop_factor": 110}
"""Lets the scheduler use the memory that steps may use.

By default it gives up overlap to stay within 76 % of the device's memory. Seconds of a step that
wait: 8B on 8 H100s, 32,768 tokens each, 0.070 for collectives and 0.012 with it; LoRA on one H100,
131,072 tokens, 5.9 for offloaded inputs and 0.2 with it (jax 0.12). Not with `remat: full`, which
needs the memory to fit at all.
"""

SCATTER_IN_LAYER: XlaOptions = {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
"""Sums a layer's gradients over devices while that layer computes.

By default, XLA moves the sums of a step of one microbatch into the next layer's iteration, and
copies whole gradients for it: 8B on 8 H100s, 8,192 tokens each, planned 0.750 s a step, and 0.735
with it.
"""

SCATTER_IN_LAYER_0_10: XlaOptions = {"xla_gpu_enable_pipelined_reduce_scatter": False}
"""The same before MIN_PIPELINE_RELEASE: 0.746 s a step, and 0.714 with it (jax 0.10.1)."""

OVERLAP_REPLICAS: XlaOptions = {
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
"""Sums the gradients of a layer over replicas, all in one, while the next layer computes, and while
that one gathers and scatters inside its node.

Planned seconds of a step, 8B on 8 H100s in each of N nodes, a replica each, 8,192 tokens per GPU:
0.820 without and 0.779 with it (N = 2), 0.903 and 0.786 (N = 128), of which 0.08, 0.04, 0.16 and
0.01 wait for the sums over replicas (jax 0.12).
"""

MIN_PIPELINE_RELEASE = (0, 11, 1)
"""First tested release of jaxlib with these names, in which `false` no longer disables; and the
first that prefetches. Before, copies in pipelined loops could have wrong offsets: a model of 27B
diverged with more gathers in the loop (openxla/xla PRs 37979 and 39302)."""

PREFETCH_FROM_HOST: XlaOptions = {"xla_gpu_enable_pipelined_host_offloading": True}
"""Copies the activations of the next layer from the host while the backward pass computes this one.

Seconds of a step that wait for copies, 8B on 8 H100s, 32,768 tokens each, layer inputs and
attention offloaded: 0.61 without, 0.01 with it (jax 0.12). Pipelining a loop is where jax 0.10.2
and 0.11.0 had wrong gradients: the check `offload` of `scripts/bench/first_checks.py` tries it.
"""

TESTED_RELEASES = (
    ((0, 10, 1), (0, 10, 1)),
    ((0, 11, 1), (0, 11, 2)),
    ((0, 12, 0), (0, 12, 0, 1)),
)
"""First and last releases of jaxlib, inclusive, that the options were tested with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Compile options of a program, and their description."""

    options: XlaOptions
    description: str
    """Description for the banner; empty if there is nothing to report."""
    is_deterministic: bool = False
    """True if cuDNN's backward passes must also be deterministic."""


def choose_options(
    config: StepConfig,
    *,
    mesh: Mesh,
    is_tiled: bool,
    sums_replicas_early: bool,
    environ: Mapping[str, str] = os.environ,
    version: str = jaxlib.__version__,
) -> CompileOptions:
    """Compile options for a config's step.

    run.xla_options overrides XLA_FLAGS, which overrides jaxsp's own options.

    Args:
        mesh: of devices that may be absent. For CPUs, jaxsp adds no options.
        is_tiled: True if a device's tokens go through a layer in tiles.
        sums_replicas_early: as in `StepSpec`.
        version: of jaxlib.

    Raises: UserError if run.xla_options and run.deterministic contradict each other.
    """
    requested = dict(config.xla_options)
    flags = [name for name in _flag_names(environ.get("XLA_FLAGS", "")) if name not in requested]
    is_deterministic = config.is_deterministic
    options: XlaOptions = {}
    parts = []
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    if on_gpu:
        release = parse_version(version)
        offloads = config.memory.offload_activations != "none"
        if any(first <= release <= last for first, last in TESTED_RELEASES):
            options |= NO_REMATERIALIZATION
            if release < MIN_PIPELINE_RELEASE:
                options |= SCATTER_IN_LAYER_0_10
                if offloads:
                    parts.append("offloaded activations are not prefetched (needs jax 0.11.1)")
            else:
                options |= SCATTER_IN_LAYER
                options |= OVERLAP_REPLICAS if sums_replicas_early else {}
                options |= PREFETCH_FROM_HOST if offloads else {}
            if is_tiled and mesh.size > 1:
                options |= OVERLAP_IN_LOOPS
            if config.linear_dtype is not None:
                options |= NO_TRITON
            if RematPolicy(remat=config.memory.remat).is_attention_saved:
                options |= MEMORY_FOR_OVERLAP
            options = {name: value for name, value in options.items() if name not in flags}
            if is_deterministic and release >= MIN_PIPELINE_RELEASE:
                options |= NO_TRITON
        else:
            parts.append(f"defaults, because options were not tested with jaxlib {version}")
        if is_deterministic:
            options |= DETERMINISTIC
            parts.append(
                "deterministic: sums in a fixed order, kernels not chosen by timing them, cuDNN's "
                "deterministic backward pass; each of these can cost speed, and the last memory"
            )
            for name in (DETERMINISTIC | NO_TRITON).keys() & options.keys() & requested.keys():
                if requested[name] != options[name]:
                    raise UserError(
                        f"run.xla_options.{name} = {yaml_io.format_value(requested[name])}: "
                        f"run.deterministic = true sets it to "
                        f"{yaml_io.format_value(options[name])}. Leave one of them out."
                    )
    elif is_deterministic:
        parts.append("run.deterministic has no effect: CPUs are always deterministic")
    if requested:
        values = (f"{name}={yaml_io.format_value(value)}" for name, value in requested.items())
        parts.append(f"run.xla_options: {', '.join(values)}")
    if flags:
        parts.append(f"XLA_FLAGS: {', '.join(flags)}")
    return CompileOptions(
        options=options | requested,
        description="; ".join(parts),
        is_deterministic=is_deterministic and on_gpu,
    )


def compile_lowered(lowered: jax.stages.Lowered, options: CompileOptions) -> jax.stages.Compiled:
    """Compiles a program with these options.

    Raises: UserError if XLA does not know an option, or rejects its value.
    """
    if options.is_deterministic:
        _make_cudnn_deterministic(lowered)
    try:
        # XLA takes numbers too, although the annotation does not permit them
        return lowered.compile(compiler_options=cast(Any, options.options))
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"(?:No such compile option: '|While setting option )(\w+).*", str(error))
        if match is None:
            raise
        value = yaml_io.format_value(options.options.get(match[1]))
        raise UserError(
            f"run.xla_options.{match[1]} = {value}: XLA of jaxlib {jaxlib.__version__} refuses it: "
            f"{match[0].rstrip('.')}. Flags are true or false without quotes, not 1 or 0; enums "
            "are names in full, such as COLLECTIVE_PIPELINING_MODE_OFF."
        ) from None


def _make_cudnn_deterministic(lowered: jax.stages.Lowered) -> None:
    """Makes cuDNN's backward passes sum the gradients of queries in a fixed order.

    JAX has no argument for it. With xla_gpu_deterministic_ops only, the compiled calls of jaxlib
    0.10.1 and 0.12.0.1 do not change.

    Source: force_deterministic of CudnnfMHABackendConfig, openxla/xla
        xla/service/gpu/backend_configs.proto. XLA turns it into set_deterministic_algorithm of
        SDPA_backward of NVIDIA/cudnn-frontend.
    """
    module: Any = lowered.compiler_ir()

    def update_call(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            target = op.attributes["call_target_name"].value
            if target.startswith(cudnn_calls.CUSTOM_CALL_PREFIX) and target.endswith("Backward"):
                backend_config = json.loads(op.attributes["backend_config"].value)
                backend_config["cudnn_fmha_backend_config"]["force_deterministic"] = True
                op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(backend_config))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(update_call)


def _flag_names(flags: str) -> list[str]:
    """Names that XLA_FLAGS sets, without jaxsp's own flags.

    The variable contains flags, or the name of a file of flags.
    """
    own = (*jax_platform.CPU_FLAGS, *jax_platform.GPU_FLAGS, jax_platform.OWN_AUTOTUNING_FLAG)
    flags = " ".join(flag for flag in flags.split() if flag not in own)
    if flags.strip() and not flags.strip().startswith("-"):
        file = pathlib.Path(flags.strip())
        flags = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.findall(r"(?:^|\s)--?(xla_\w+)", flags)


def parse_version(version: str) -> tuple[int, ...]:
    """Leading numbers of a version. Example: 0.12.1.dev3 and 0.12.1rc1 are (0, 12, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
