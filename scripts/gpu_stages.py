"""Stages of scripts/gpu_check.py: the tests and benchmarks that each of them runs."""

import dataclasses

SECONDS = 460
"""Time of a stage. A part that is still running then is interrupted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One command of a stage. `{base}` in its arguments is the path of the stage's files."""

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
    needs: str | None = None
    """Name of the part whose results this part reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The parts that one command runs."""

    topics: str
    """Subjects of the stage, for --help."""
    parts: tuple[Part, ...]


def _tests(*files: str) -> Part:
    options = ["-p", "scripts.junit_log", "-vv", "-rs", "--durations=20"]
    for verb in ("reading", "writing"):
        # the cache warns about a program that it cannot keep, and warnings fail tests
        options += ["-W", f"ignore:Error {verb} persistent compilation cache"]
    return Part(
        name="tests",
        seconds=SECONDS,
        module="pytest",
        arguments=(*files, *options),
        is_tests=True,
    )


_STEP = tuple("--shapes llama8b-4layers --lengths 32768 --steps 5 --case-seconds 120".split())

_PIPELINED = "xla_gpu_enable_pipelined_host_offloading"

_PLAN_ERRORS = Part(
    name="plans",
    seconds=SECONDS,
    case_seconds=20,
    module="scripts.bench.plan_error",
    arguments=("{base}-table.json",),
    needs="table",
)


def _steps(
    shape: str,
    *lengths: int,
    name: str = "table",
    seconds: int = 400,
    options: tuple[str, ...] = (),
) -> Part:
    """Step times of a model with rows of these lengths."""
    return Part(
        name=name,
        seconds=seconds,
        case_seconds=100,
        module="scripts.bench.step",
        arguments=(
            *("--shapes", shape, "--lengths", *map(str, lengths)),
            *"--steps 3 --case-seconds 180".split(),
            *options,
        ),
        is_resumable=name == "table",
    )


STAGES = {
    "first": Stage(
        topics="assumptions that no CPU test covers, most harmful first; each with its range",
        parts=(
            Part(
                name="checks",
                seconds=SECONDS,
                case_seconds=30,
                module="scripts.bench.first_hour",
                arguments=(),
            ),
        ),
    ),
    "kernels": Stage(
        topics="versions; accuracy of cuDNN attention, delta rules, experts and 8-bit products",
        parts=(
            _tests(
                *("tests/gpu/test_kernels.py", "tests/gpu/test_delta_rule.py"),
                "tests/gpu/test_experts.py",
                "tests/gpu/test_float8.py",
            ),
        ),
    ),
    "memory": Stage(
        topics="cuDNN's workspace against the formula; cost of tiles and offloading",
        parts=(
            Part(
                name="workspace",
                seconds=130,
                case_seconds=15,
                module="scripts.bench.workspace",
                arguments=(),
            ),
            Part(
                name="tiles",
                seconds=250,
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
        topics="tokens/s, MFU and memory, compared with Transformers; errors of plans",
        parts=(
            Part(
                name="table",
                seconds=400,
                case_seconds=100,
                module="scripts.bench.peer_transformers",
                arguments=(
                    *"--shapes llama8b-4layers qwen3-0.6b --lengths 32768 131072 8192".split(),
                    *"--steps 3 --case-seconds 180".split(),
                ),
                is_resumable=True,
            ),
            _PLAN_ERRORS,
        ),
    ),
    "hybrid": Stage(
        topics="step times and errors of plans of a model with gated delta nets",
        parts=(_steps("qwen3.5-9b-4layers", 16_384, 131_072), _PLAN_ERRORS),
    ),
    "experts": Stage(
        topics="step times of a model with experts, with both kernels; errors of plans",
        parts=(
            _steps("qwen3-30b-a3b-4layers", 16_384, 65_536, seconds=200),
            _steps(
                *("qwen3-30b-a3b-4layers", 16_384, 65_536),
                name="xla",
                seconds=200,
                options=("--experts-kernel", "xla"),
            ),
            _PLAN_ERRORS,
        ),
    ),
    "options": Stage(
        topics="do memory options change only memory; does a GPU learn as a CPU does?",
        parts=(_tests("tests/gpu/test_memory_options.py", "tests/gpu/test_training.py"),),
    ),
}
