"""What XLA is told when a program is compiled.

Options are passed with the program, not in XLA_FLAGS: a name there that XLA does not know ends the process as soon as it looks
for devices, and names come and go. What is asked for here is little, because XLA of the releases in TRIED does the rest of what
is usually recommended by itself: with xla_gpu_enable_latency_hiding_scheduler or pipelined reduce-scatters asked for, the
compiled step of Llama-3.1-8B is the same to the letter.
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

from jaxsp.core import axes, config, errors

Options = dict[str, bool | int | float | str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Releases:
    """Releases of jaxlib, both ends among them, and how they are asked for pipelined all-gathers."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    options: Options
    most_tokens: int
    """Of a device at a time: with more, pipelining takes a GiB and more, and there is little to gain."""
    deterministic: Options = dataclasses.field(default_factory=lambda: DETERMINISTIC | NO_TRITON)


DETERMINISTIC: Options = {"xla_gpu_deterministic_ops": True}
"""Sums in a fixed order, and kernels that are not chosen by timing them against each other. The gradient of the embedding, in
which those of the same token meet, is sorted first (0.12), or added one after another (0.10)."""

NO_TRITON: Options = {"xla_gpu_enable_triton_gemm": False}
"""Said too, because XLA from 0.11 on would make kernels of Triton's and then, asked for determinism, find none that it may use:
products go to cuBLAS from the start."""

_NEWER: Options = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}

TRIED = (
    Releases(
        first=(0, 10, 1),
        last=(0, 10, 1),
        options={"xla_gpu_enable_pipelined_all_gather": True},
        most_tokens=8192,
        deterministic=DETERMINISTIC,
    ),
    Releases(first=(0, 11, 1), last=(0, 11, 2), options=_NEWER, most_tokens=8192),
    Releases(first=(0, 12, 0), last=(0, 12, 0, 1), options=_NEWER, most_tokens=32768),
)
"""Pipelined all-gathers: in the loops over layers, the weights of the next layer travel while one is computed.

Otherwise a layer waits for its first weights, those of q, k and v: an estimated 2 % of the time of Llama-3.1-8B's forward pass
at 8,192 tokens a device and 350 GB/s, half of that with twice the tokens. Device memory of its step, compiled for 8 x H100:

    tokens of a device    8,192    16,384   32,768   65,536   131,072, all offloaded
    0.10.1, GiB more       0.44     1.96     2.71     3.68     6.77
    0.11.2                 0.45              2.24
    0.12.0.1               0.63     0.16     0.25     0.61     1.70
"""

NO_REMATERIALIZATION: Options = {"xla_disable_hlo_passes": "rematerialization"}
"""Where activations wait in host memory. XLA's own pass that computes again what does not fit counts them as the device's: it
gains nothing, and takes half of the time to compile 1,048,576 tokens."""

NAMES = {name for one in TRIED for name in one.options}
"""What older and newer XLA call this: whoever sets one of them decides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a program is compiled with."""

    options: Options
    words: str
    """The same for people; empty where there is nothing to say."""
    deterministic: bool = False
    """Whether cuDNN is told too."""


def options(
    settings: config.Config, *, mesh: Mesh, environ: Mapping[str, str] = os.environ, version: str = jaxlib.__version__
) -> Told:
    """Our options for a config's step, and those of run.xla_options, which win over XLA_FLAGS; that wins over ours.

    Args:
        mesh: of devices here or absent. For CPUs there is nothing of ours.
        version: of jaxlib.
    Raises: UserError where run.xla_options and run.deterministic contradict each other.
    """
    asked, deterministic = settings.run.xla_options, settings.run.deterministic
    by_flags = [name for name in _names(environ.get("XLA_FLAGS", "")) if name not in asked]
    tokens = settings.data.longest_row * settings.batch.rows_at_once // mesh.shape[axes.SEQ]
    ours: Options = {}
    parts = []
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    if on_gpu:
        known = next((one for one in TRIED if one.first <= numbers(version) <= one.last), None)
        if known is None:
            parts.append(f"its defaults, because options were not tried with jaxlib {version}")
        elif mesh.size > 1 and tokens <= known.most_tokens and not NAMES & {*by_flags, *asked}:
            ours |= known.options
            parts.append("the next layer's weights are gathered while one is computed")
        offloads = settings.memory.offload_activations != "none"
        if known and offloads and not NO_REMATERIALIZATION.keys() & {*by_flags, *asked}:
            ours |= NO_REMATERIALIZATION
            parts.append("it computes nothing again by itself, since it counts host memory as the device's")
        if deterministic:
            fixed = known.deterministic if known else DETERMINISTIC
            for name in fixed.keys() & asked.keys():
                if asked[name] != fixed[name]:
                    raise errors.UserError(
                        f"run.xla_options.{name} = {_line(asked[name])}: run.deterministic = true sets it to "
                        f"{_line(fixed[name])}. Leave one of them out."
                    )
            ours |= fixed
            parts.append(
                "deterministic: sums in a fixed order, kernels not chosen by timing them, cuDNN's deterministic backward pass; "
                "each of these can cost speed, and the last memory"
            )
    elif deterministic:
        parts.append("run.deterministic changes nothing here: on CPUs numbers are the same each time in any case")
    if asked:
        parts.append(f"run.xla_options: {', '.join(f'{name}={_line(value)}' for name, value in asked.items())}")
    if by_flags:
        parts.append(f"XLA_FLAGS: {', '.join(by_flags)}")
    return Told(options=ours | asked, words="; ".join(parts), deterministic=deterministic and on_gpu)


def compiled(lowered: jax.stages.Lowered, told: Told) -> jax.stages.Compiled:
    """A program compiled with these options. Raises: UserError for an option, or a value of one, that XLA does not take."""
    if told.deterministic:
        _fix_order_of_attention(lowered)
    try:
        return lowered.compile(compiler_options=cast(Any, told.options))  # numbers too, whatever its annotation says
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"(No such compile option: '|While setting option )(\w+)", str(error))
        if found is None:
            raise
        name = found[2]
        given = told.options.get(name)
        field = f"run.xla_options.{name} = {repr(given) if isinstance(given, str) else _line(given)}"
        if found[1].startswith("No such"):
            raise errors.UserError(f"{field}: XLA of jaxlib {jaxlib.__version__} has no such option. Leave it out.") from None
        rule = str(error).rpartition(" is ")[2].strip().rstrip(".")
        raise errors.UserError(
            f"{field}: is {rule}. Flags are true or false without quotes, not 1 or 0; enums are names in full, such as "
            "COLLECTIVE_PIPELINING_MODE_OFF of xla_gpu_pipeline_all_gather."
        ) from None


def _fix_order_of_attention(lowered: jax.stages.Lowered) -> None:
    """Tells cuDNN's backward passes to add up the queries' gradients in a fixed order; JAX has no argument for it.

    Source: force_deterministic of CudnnfMHABackendConfig, openxla/xla xla/service/gpu/backend_configs.proto; XLA makes
        set_deterministic_algorithm of NVIDIA/cudnn-frontend's SDPA_backward of it. With xla_gpu_deterministic_ops alone, the
        compiled calls of jaxlib 0.10.1 and 0.12.0.1 are as without.
    """
    module: Any = lowered.compiler_ir()

    def fix(op: Any) -> Any:
        attributes = op.attributes
        if op.name == "stablehlo.custom_call" and re.match(_BACKWARD, attributes["call_target_name"].value):
            told = json.loads(attributes["backend_config"].value)
            told["cudnn_fmha_backend_config"]["force_deterministic"] = True
            attributes["backend_config"] = ir.StringAttr.get(json.dumps(told))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(fix)


_BACKWARD = r"__cudnn\$fmha\w*Backward$"
"""What XLA calls cuDNN's backward passes of attention."""


def _names(flags: str) -> list[str]:
    """Names that XLA_FLAGS sets: it holds flags, or is the name of a file that does."""
    if flags.strip() and not flags.strip().startswith("-"):
        file = pathlib.Path(flags.strip())
        flags = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.findall(r"(?:^|\s)--?(xla_\w+)", flags)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with. Example: 0.12.1.dev3 is (0, 12, 1), and so is 0.12.1rc1."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _line(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
