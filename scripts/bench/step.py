"""Times the training step that `python -m jaxsp.train` would run, on one device, for models and row lengths by name.

    python -m scripts.bench.step --out scripts/bench/results/today.json
    python -m scripts.bench.step --shapes qwen3-0.6b --lengths 32768 --compare scripts/bench/results/yesterday.json
    python -m scripts.bench.step --documents one --lengths 8192 --until-it-fails --remat save_attention full
    python -m scripts.bench.step --mlp-tile-tokens auto 8192 --xla-option xla_gpu_autotune_level=0 xla_gpu_autotune_level=4

Each case (a model, a row length, a row of one document or of 16, memory options and XLA options) runs in a process of its own,
so that its memory starts empty and a crash does not stop the other cases. A step is one row, forward, backward and AdamW, in
bfloat16 from random weights; its time is the median of steps that are each waited for.

Shapes are published models, except llama8b-4layers: Llama-3.1-8B with 4 of its 32 layers and an eighth of its vocabulary
(16,032 of 128,256). Embedding and head shrink with the layers, so layers, head and optimizer have the same proportions as in
the whole model, and the MFU is comparable. With the whole vocabulary, the head would take 38 % of the arithmetic in matrix
products instead of 7 %.
"""

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.model import flops
from jaxsp.runtime import jax_platform
from scripts.bench import machine, report

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b-4layers": {
        **LLAMA,
        "vocab_size": 128256 * 4 // 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama3.2-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Fields of Hugging Face's config.json. Llama 3's stretched rotation is left out: it is a table, and costs no time."""

SHAPES["too-big"] = {**SHAPES["tiny"], "intermediate_size": 10**9 + 7}
"""MLPs of 3.8e11 weights fit on no device: shows how running out of memory is recorded."""

GPU_SHAPES = ("llama8b-4layers", "qwen3-0.6b", "llama3.2-1b")

NUM_PIECES = {"one": 1, "packed": 16}
"""Documents in a row: one that fills it, or ragged ones that fill it together."""

MAX_PIECES = {"one": 1, "packed": 64}
"""data.max_segments_per_row; with 1, kernels need not tell documents apart, and 64 is its default."""

LEVERS = ("remat", "offload_activations", "offload_optimizer")
"""Fields of the config's group memory that cases differ in."""

OPTIMIZER = {"name": "adamw", "learning_rate": 1e-5}
"""Fields of the config's group optimizer; the others have their defaults."""

WARM_UP_STEPS = 2

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""How XLA says that memory ran out."""

CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""Event that JAX records if a program comes from its compilation cache."""

MODULE = "scripts.bench.step"

ALONE, RESULT = "--alone", "result.json"
"""Word and file between the benchmark and the process of a case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed."""

    shape: str
    row_tokens: int
    documents: str
    """A word of NUM_PIECES."""
    kernel: str
    """As asked for in attention.kernel."""
    steps: int
    remat: str = "auto"
    """This and the following as in the config's group memory."""
    offload_activations: str = "none"
    offload_optimizer: str = "none"
    mlp_tile_tokens: int | str = report.AUTO
    loss_tile_tokens: int | str = report.AUTO
    xla_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """run.xla_options of the config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a case; numbers are null where it did not get so far, or the device does not tell."""

    status: str
    message: str | None = None
    """The first line of what went wrong."""
    kernel_used: str | None = None
    why_not_cudnn: str | None = None
    """What made `auto` take another kernel."""
    remat_used: str | None = None
    """What `auto` has become."""
    memory_used: str | None = None
    """Description of the compiled step's memory options."""
    compile_s: float | None = None
    from_cache: bool | None = None
    """True if the step came from JAX's compilation cache; compile_s is then the time to load it."""
    step_s: float | None = None
    """Median."""
    slowest_step_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_device: float | None = None
    """Arithmetic that was needed, as in metrics.jsonl: causal, piece by piece, recomputation not counted."""
    mfu: float | None = None
    peak_gib: float | None = None
    planned_gib: float | None = None
    """What the compiled step says that it takes of the device, and what the attention kernel is estimated to take beside it."""
    workspace_gib: float | None = None
    """The largest workspace of cuDNN's attention in the compiled step."""
    host_gib: float | None = None
    """What the compiled step says that it takes of the host."""
    memory_limit_gib: float | None = None
    """What JAX may use of the device: runtime.memory_limits.GPU_MEMORY_FRACTION of it unless XLA_CLIENT_MEM_FRACTION says
    otherwise."""
    loss: float | None = None
    loss_finite: bool | None = None
    device: str | None = None
    """JAX's name of its kind."""
    runtime: str | None = None
    """JAX's words for what drives it: of a GPU, the version of CUDA."""
    wall_s: float | None = None
    """Time of the case's process, from its start to its end."""


def main(arguments: list[str]) -> int:
    """The command; 1 if a case failed or took too long. One that does not fit, or is refused with a reason, has told what it
    was asked.
    """
    parser = options(MODULE, __doc__)
    parser.add_argument(
        "--compare", type=pathlib.Path, metavar="OLD.json", help="prints ratios to an earlier file"
    )
    given = parser.parse_args(arguments)
    cases, found = collections.deque(asked(given)), opened(MODULE, arguments, given.commit)
    earlier = resumed(given.resume, found)
    print(report.HEADER, flush=True)
    began = time.monotonic()
    while cases:
        case = cases.popleft()
        came = finished(case, earlier)
        if came is None:
            in_time = time.monotonic() - began < given.seconds
            result = (
                apart(case, seconds=given.case_seconds)
                if in_time
                else Result(status=report.NOT_RUN)
            )
            found["device"], found["runtime"] = (
                found["device"] or result.device,
                found["runtime"] or result.runtime,
            )
            came = record(case, result)
        found["cases"].append(came)
        print(report.row(came), flush=True)
        if (
            given.until_it_fails
            and case.row_tokens >= max(given.lengths)
            and came["status"] == report.OK
        ):
            cases.append(dataclasses.replace(case, row_tokens=2 * case.row_tokens))
        write(given.out, found)
    if given.compare:
        print(report.comparison(json.loads(given.compare.read_text(encoding="utf-8")), found))
    return int(any(case["status"] in (report.FAILED, report.TIMED_OUT) for case in found["cases"]))


def options(module: str, description: str | None) -> argparse.ArgumentParser:
    """What can be asked of a benchmark of steps: which cases, in what time, and where to write what comes of them."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=GPU_SHAPES,
        metavar="NAME",
        help=", ".join(SHAPES),
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=(8192, 32768), metavar="TOKENS", help="of a row"
    )
    parser.add_argument(
        "--documents", nargs="+", choices=NUM_PIECES, default=tuple(NUM_PIECES), help="of a row"
    )
    parser.add_argument(
        "--until-it-fails",
        action="store_true",
        help="doubles the longest row while a case has numbers",
    )
    parser.add_argument(
        "--kernel", choices=_values("attention", "kernel"), default="auto", help="attention.kernel"
    )
    for lever in LEVERS:
        parser.add_argument(
            f"--{lever.replace('_', '-')}",
            nargs="+",
            choices=_values("memory", lever),
            default=None,
            help=f"memory.{lever}",
        )
    for tile in report.TILES:
        parser.add_argument(
            f"--{tile.replace('_', '-')}",
            nargs="+",
            type=_tile,
            default=[report.AUTO],
            metavar="TOKENS",
            help=f"memory.{tile}",
        )
    parser.add_argument(
        "--xla-option",
        nargs="+",
        action="extend",
        type=_xla_option,
        default=[],
        metavar="NAME=VALUE",
        help="run.xla_options; several values of one name are separate cases",
    )
    parser.add_argument("--steps", type=int, default=10, help="timed, after warm-up")
    parser.add_argument(
        "--case-seconds", type=float, default=300, help="a case that takes longer is ended"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, help="cases that would begin later are not run"
    )
    parser.add_argument("--commit", help="for the file, where this is no git repository")
    parser.add_argument(
        "--resume",
        type=pathlib.Path,
        metavar="OLD.json",
        help="reuses finished cases of an earlier file from the same machine",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    return parser


def asked(given: argparse.Namespace) -> Iterator[Case]:
    """The cases that `options` were given: every combination, shape by shape, each in the order of the command line."""
    levers = {name: getattr(given, name) or [getattr(Case, name)] for name in LEVERS}
    memory = levers | {name: getattr(given, name) for name in report.TILES}
    values_of: dict[str, list[Any]] = {}
    for name, value in given.xla_option:
        values_of.setdefault(name, []).append(value)
    for shape, length, documents in itertools.product(given.shapes, given.lengths, given.documents):
        for pulled, options in itertools.product(_combinations(memory), _combinations(values_of)):
            how = {"kernel": given.kernel, "steps": given.steps, **pulled, "xla_options": options}
            yield Case(shape=shape, row_tokens=length, documents=documents, **how)


def _combinations(values_of: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value for each name."""
    return [
        dict(zip(values_of, values, strict=True))
        for values in itertools.product(*values_of.values())
    ]


def _tile(text: str) -> int | str:
    return text if text == report.AUTO else int(text)


def _xla_option(text: str) -> tuple[str, Any]:
    """Splits NAME=VALUE; the value is a JSON number, true or false, and text otherwise."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def opened(module: str, arguments: list[str], commit: str | None) -> dict[str, Any]:
    """A benchmark's file before its first case."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or machine.commit(),
        "command": shlex.join(["python", "-m", module, *arguments]),
        "device": None,
        "runtime": None,
        **machine.versions(),
        "cases": [],
    }


def resumed(old: pathlib.Path | None, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cases of an earlier file, and copies its device into `found`."""
    if old is None:
        return []
    earlier = json.loads(old.read_text(encoding="utf-8"))
    found.update(
        {name: value for name, value in earlier.items() if name in found and found[name] is None}
    )
    return earlier["cases"]


def finished(case: Case, earlier: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Finds the record of a case among earlier ones; None if it is missing or unfinished on a
    side."""
    fields = dataclasses.asdict(case)
    for came in earlier:
        statuses = [
            report.of(came, side)["status"]
            for side in report.SIDES
            if side == "jaxsp" or side in came
        ]
        if set(statuses) <= set(report.FINAL) and fields == {
            name: came.get(name) for name in fields
        }:
            return came
    return None


def write(out: pathlib.Path | None, found: dict[str, Any]) -> None:
    """Writes the file, if one was asked for. After each case: whoever ends this process has the cases before."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def record(case: Case, result: Result) -> dict[str, Any]:
    """A case of the file: what was asked, the model's fields, what came of it."""
    found = dataclasses.asdict(result)
    del found["device"], found["runtime"]
    pieces = {"num_pieces": NUM_PIECES[case.documents], "max_pieces": MAX_PIECES[case.documents]}
    fixed = {
        "rows_per_step": 1,
        "num_devices": 1,
        "compute_dtype": "bfloat16",
        "optimizer": "adamw",
    }
    return {**dataclasses.asdict(case), **pieces, **fixed, **found, "model": SHAPES[case.shape]}


def _values(group: str, field: str) -> tuple[str, ...]:
    """What a field of the config may be."""
    return get_args(Config.model_fields[group].annotation.model_fields[field].annotation)


# What a case's own process does


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Compiles a case's step and times it; `folder` is for its documents and caches."""
    import jax

    from jaxsp.attention.kernels import cudnn_calls
    from jaxsp.core import errors
    from jaxsp.reporting import metrics
    from jaxsp.training import memory_formula, memory_options, train_state

    jax_platform.choose_platform(virtual_cpu_devices=None)
    device = jax.devices()[0]
    found = Result(
        status=report.OK,
        device=device.device_kind,
        runtime=" ".join(device.client.platform_version.split()),
    )
    try:
        try:
            program, material, (rows, counts) = prepared(case, folder, device)
        except errors.UserError as error:
            return dataclasses.replace(
                found, status=report.REFUSED, message=str(error).splitlines()[0]
            )
        choice = material.attention_choice
        found = dataclasses.replace(found, why_not_cudnn=choice.fallback_reason or None)
        events: list[str] = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
        began = time.perf_counter()
        try:
            ready = memory_options.compile_fitting_step(
                program, workspace_bytes=choice.settings.workspace_bytes
            )
        except errors.UserError as error:
            return dataclasses.replace(
                found, status=report.OUT_OF_MEMORY, message=str(error).splitlines()[0]
            )
        compile_s = time.perf_counter() - began
        text = ready.executable.as_text() or ""
        workspace = cudnn_calls.read_workspace_bytes(text)
        found = dataclasses.replace(
            found,
            compile_s=compile_s,
            kernel_used=kernel_used(text, choice.kernel.name),
            workspace_gib=None if workspace is None else workspace / memory_formula.GIB,
            from_cache=CACHE_HIT in events,
            remat_used=ready.program.remat_policy.remat,
            memory_used=memory_options.describe(ready.program),
            planned_gib=ready.memory_use.device_total / memory_formula.GIB,
            host_gib=ready.memory_use.host / memory_formula.GIB,
        )
        memory_options.reserve_host_memory(program, ready.memory_use.host)
        state = train_state.init_state(program, material.make_weights())
        times = []
        for _ in range(WARM_UP_STEPS + case.steps):
            began = time.perf_counter()
            state, numbers = jax.block_until_ready(ready.executable(state, rows))
            times.append(time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        return dataclasses.replace(
            found, status=report.OUT_OF_MEMORY, message=str(error).splitlines()[0]
        )
    times = times[WARM_UP_STEPS:]
    step_s, peak = statistics.median(times), flops.peak_tflops(device.device_kind)
    tflops = flops.step_flops(program.model, counts.segment_lengths) / step_s / 1e12
    loss, limit = float(numbers.loss), (device.memory_stats() or {}).get("bytes_limit")
    return dataclasses.replace(
        found,
        step_s=step_s,
        slowest_step_s=max(times),
        tokens_per_s=int(numbers.num_tokens) / step_s,
        tflops_per_device=tflops,
        mfu=None if peak is None else tflops / peak,
        peak_gib=metrics.peak_gib([device]),
        memory_limit_gib=None if limit is None else limit / 2**30,
        loss=loss if np.isfinite(loss) else None,
        loss_finite=bool(np.isfinite(loss)),
    )


def prepared(case: Case, folder: pathlib.Path, device: Any) -> tuple[Any, Any, Any]:
    """The program of a case, its training.inputs.RunInputs as the train command makes it, and the first step's rows with
    their counts.
    """
    from jaxsp.run import build

    documents = folder / "documents.jsonl"
    lines = [json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in random_documents(case)]
    documents.write_text("".join(lines), encoding="utf-8")
    config = settings_of(case, source=documents, directory=folder / "run")
    program, material = build.build_training(config, devices=[device])
    ((rows, counts),) = material.train_set.make_loader(
        config,
        program.mesh,
        material.train_set.make_schedule(config, num_steps=1),
        layout_degree=program.attend.layout_degree,
    ).batches()
    full = (
        counts.segment_lengths.sum() == case.row_tokens
        and len(counts.segment_lengths) == NUM_PIECES[case.documents]
    )
    assert full, "one row, filled by all documents"
    return program, material, (rows, counts)


def settings_of(case: Case, *, source: pathlib.Path, directory: pathlib.Path) -> Config:
    """The config of a case."""
    steps = WARM_UP_STEPS + case.steps
    return config_file.parse(
        {
            "run": {"directory": str(directory), "steps": steps, "xla_options": case.xla_options},
            "model": {"config": SHAPES[case.shape], "compute_dtype": "bfloat16"},
            "attention": {"kernel": case.kernel},
            "memory": {name: getattr(case, name) for name in (*LEVERS, *report.TILES)},
            "data": {
                "train": [{"source": str(source), "format": "tokens"}],
                "row_tokens": case.row_tokens,
                "max_segments_per_row": MAX_PIECES[case.documents],
            },
            "batch": {"rows_per_step": 1},
            "optimizer": OPTIMIZER,
        }
    )


def random_documents(case: Case) -> list[np.ndarray]:
    """Token ids of documents that fill a row together, the same in every run."""
    rng = np.random.default_rng(0)
    cuts = np.sort(
        rng.choice(np.arange(1, case.row_tokens), NUM_PIECES[case.documents] - 1, replace=False)
    )
    return np.split(rng.integers(0, SHAPES[case.shape]["vocab_size"], case.row_tokens), cuts)


def case_flops(case: Case) -> float:
    """Floating-point operations that a case's step needs, as in metrics.jsonl."""
    from jaxsp.hf import families

    lengths = np.array([len(document) for document in random_documents(case)])
    return flops.step_flops(
        families.parse_model_config(SHAPES[case.shape], field=case.shape), lengths
    )


def kernel_used(program: str, chosen: str) -> str:
    """The attention kernel in a compiled program, which has to be the one that was chosen: cuDNN's are calls by name."""
    from jaxsp.attention.registry import KERNELS

    for name, kernel in KERNELS.items():
        if kernel.custom_call_prefix:
            is_called = kernel.custom_call_prefix in program
            assert is_called == (name == chosen), (
                f"{chosen} was chosen, and {name} is {'' if is_called else 'not '}called"
            )
    return chosen


# What the process around them does


def apart(case: Case, *, seconds: float, module: str = MODULE, kind: type[Any] = Result) -> Any:
    """What a module's `measure` makes of a case, in a process of its own, ended after so many seconds. kind: its Result."""
    began = time.monotonic()
    result = _apart(case, seconds=seconds, module=module, kind=kind)
    return dataclasses.replace(result, wall_s=time.monotonic() - began)


def _apart(case: Case, *, seconds: float, module: str, kind: type[Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as name:
        written = pathlib.Path(name) / RESULT
        command = [sys.executable, "-m", module, ALONE, json.dumps(dataclasses.asdict(case)), name]
        environment = {**os.environ, "HF_DATASETS_CACHE": f"{name}/cache"}
        try:
            done = subprocess.run(
                command,
                cwd=machine.REPO,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return kind(status=report.TIMED_OUT, message=f"ended after {seconds:.0f} s")
        if written.exists():
            return kind(**json.loads(written.read_text(encoding="utf-8")))
    return ended(done.returncode, done.stderr, kind)


def ended(code: int, printed: str, kind: type[Any] = Result) -> Any:
    """The result of a process that ended without one, by its exit code and what it printed of errors."""
    lines = [line for line in printed.splitlines() if line.strip()]
    exhausted = next((line for line in lines if EXHAUSTED in line), None)
    if exhausted is not None:
        return kind(status=report.OUT_OF_MEMORY, message=exhausted)
    sys.stderr.write(printed)
    last = lines[-1] if lines else "without a word"
    return kind(status=report.FAILED, message=f"exit code {code}: {last}")


def alone(case: str, folder: str, *, measure: Callable[[Case, pathlib.Path], Any]) -> None:
    """The process of one case, from its words on the command line."""
    result = measure(Case(**json.loads(case)), pathlib.Path(folder))
    (pathlib.Path(folder) / RESULT).write_text(
        json.dumps(dataclasses.asdict(result), allow_nan=False), encoding="utf-8"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [ALONE]:
        alone(*sys.argv[2:], measure=measure)
    else:
        sys.exit(main(sys.argv[1:]))
