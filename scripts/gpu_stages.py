"""Stages of scripts/gpu_check.py: the tests and benchmarks that each of them runs."""

import dataclasses

CHECKS = ("checkpoint", "offload", "outside", "pinning", "workspace", "profile")
"""Those of scripts/bench/first_checks.py, in this order."""

SECONDS = 460
"""Time of a stage. A part that is still running then is interrupted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One command of a stage."""

    name: str
    seconds: int
    """Time limit; the last part of a stage may take all the time that is left."""
    case_seconds: int = 0
    """Guessed duration of one case: with less time than this left, no further case starts."""
    module: str
    arguments: tuple[str, ...]
    is_tests: bool = False
    is_resumable: bool = False
    """True if this part uses --resume."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The parts that one command runs."""

    topics: str
    """Subjects of the stage, for --help."""
    parts: tuple[Part, ...]


def _tests(*files: str) -> tuple[Part, ...]:
    """A part for each file of tests/gpu/: after a CUDA error, later tests need a new process."""
    options = ["-vv", "-rs", "--durations=20"]
    for verb in ("reading", "writing"):
        # the cache warns about a program that it cannot keep, and warnings fail tests
        options += ["-W", f"ignore:Error {verb} persistent compilation cache"]
    return tuple(
        Part(
            name=file,
            seconds=SECONDS,
            module="pytest",
            arguments=(f"tests/gpu/test_{file}.py", *options),
            is_tests=True,
        )
        for file in files
    )


def _check(name: str) -> Part:
    return Part(name=name, seconds=300, module="scripts.bench.first_checks", arguments=(name,))


_STEP = tuple("--shapes llama8b-4layers --lengths 32768 --steps 5 --case-seconds 120".split())

_PIPELINED = "xla_gpu_enable_pipelined_host_offloading"


def _steps(
    *shapes: str,
    lengths: tuple[int, ...],
    name: str = "table",
    seconds: int = SECONDS,
    options: tuple[str, ...] = (),
) -> Part:
    """Step times of models with rows of these lengths."""
    return Part(
        name=name,
        seconds=seconds,
        case_seconds=100,
        module="scripts.bench.step",
        arguments=(
            *("--shapes", *shapes, "--lengths", *map(str, lengths)),
            *"--steps 3 --case-seconds 180".split(),
            *options,
        ),
        is_resumable=name == "table",
    )


STAGES = {
    "first": Stage(
        topics="assumptions that no CPU test covers, most harmful first; each with its range",
        parts=tuple(map(_check, CHECKS)),
    ),
    "kernels": Stage(
        topics="versions; accuracy of cuDNN attention, delta rules, experts and 8-bit products",
        parts=_tests("kernels", "layers"),
    ),
    "memory": Stage(
        topics="cost of tiles and offloading",
        parts=(
            Part(
                name="tiles",
                seconds=300,
                case_seconds=60,
                module="scripts.bench.step",
                arguments=(
                    *(*_STEP, "--documents", "one", "--remat", "save_attention"),
                    *"--mlp-tile-tokens 32768 8192 --loss-tile-tokens 4096 512".split(),
                ),
            ),
            Part(
                name="offload",
                seconds=SECONDS,
                case_seconds=60,
                module="scripts.bench.step",
                arguments=(
                    *(*_STEP, "--documents", "packed"),
                    *("--offload-activations", "layer_inputs_and_attention"),
                    *("--xla-option", f"{_PIPELINED}=false", f"{_PIPELINED}=true"),
                ),
            ),
        ),
    ),
    "speed": Stage(
        topics="tokens/s, MFU and memory, measured and planned",
        parts=(_steps("llama8b-4layers", "qwen3-0.6b", lengths=(32768, 131072, 8192)),),
    ),
    "hybrid": Stage(
        topics="step times of a model with gated delta nets",
        parts=(_steps("qwen3.5-9b-4layers", lengths=(16384, 131072)),),
    ),
    "experts": Stage(
        topics="step times of a model with experts, with both kernels",
        parts=(
            _steps("qwen3-30b-a3b-4layers", lengths=(16384, 65536), seconds=230),
            _steps(
                "qwen3-30b-a3b-4layers",
                lengths=(16384, 65536),
                name="xla",
                options=("--experts-kernel", "xla"),
            ),
        ),
    ),
    "options": Stage(
        topics="do memory options change only memory; does a GPU learn as a CPU does?",
        parts=_tests("memory_options", "training"),
    ),
}
