"""Times the training step that `python -m jaxsp.train` would run, on one device.

    python -m scripts.bench.step --out scripts/bench/results/today.json
    python -m scripts.bench.step --shapes qwen3-0.6b --lengths 32768 --compare yesterday.json
    python -m scripts.bench.step --documents one --lengths 8192 --until-it-fails --remat full
    python -m scripts.bench.step --mlp-tile-tokens auto 8192 --xla-option xla_gpu_autotune_level=0

scripts/bench/cases.py describes the cases. Each one runs in a separate process. Its time is the
median over steps; each step is finished before the next is dispatched.
"""

import json
import pathlib
import time
from typing import Any

import jax

from jaxsp.attention.kernels import cudnn_calls
from jaxsp.attention.selection import KERNELS
from jaxsp.core import units
from jaxsp.core.errors import UserError
from jaxsp.planning import fit
from jaxsp.run import build, metrics
from jaxsp.system import jax_platform
from jaxsp.training import train_state
from scripts.bench import cases, report, results, timing
from scripts.bench.cases import Case
from scripts.bench.timing import Result

MODULE = "scripts.bench.step"

CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""Event that JAX records if a program comes from its compilation cache."""


def main(arguments: list[str]) -> int:
    """Runs the command.

    Returns: 1 if a case failed or took too long, else 0. Cases that run out of memory or that
        jaxsp refuses with a reason are not failures.
    """
    parser = cases.make_parser(MODULE, __doc__)
    parser.add_argument(
        "--compare", type=pathlib.Path, metavar="OLD.json", help="prints ratios to an earlier file"
    )
    options = parser.parse_args(arguments)
    output = results.open_gpu_results(MODULE, arguments, commit=options.commit)
    print(report.HEADER, flush=True)
    run = lambda case: timing.run_case(MODULE, case, seconds=options.case_seconds)
    for record in timing.run_cases(options, output, run):
        print(report.format_case(record), flush=True)
    if options.compare:
        old = json.loads(options.compare.read_text(encoding="utf-8"))
        print(report.compare_results(old, output))
    return int(any(case["status"] in report.FAILURES for case in output["cases"]))


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Compiles and times a case in this process.

    Args: folder: where its documents and run directory are written.
    """
    jax_platform.choose_platform(virtual_cpu_devices=None)
    device = jax.devices()[0]
    fields: dict[str, Any] = {
        "device": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }
    try:
        spec, inputs, batch = build_case(case, folder, device)
    except UserError as error:
        return Result(status=report.REFUSED, message=_first_line(error), **fields)
    choice = spec.attention
    fields["fallback_reason"] = choice.fallback_reason or None
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    began = time.perf_counter()
    try:
        fitted = fit.compile_fitting_step(spec)
        fields |= {"compile_s": time.perf_counter() - began, "from_cache": CACHE_HIT in events}
        fields |= describe_step(fitted, choice.kernel.name)
        fit.reserve_host_memory(spec, fitted.memory_use.host)
        state = train_state.init_state(spec, inputs.weights.make())
        seconds = []
        for _ in range(cases.WARM_UP_STEPS + case.steps):
            began = time.perf_counter()
            state, results = jax.block_until_ready(fitted.executable(state, batch))
            seconds.append(time.perf_counter() - began)
    except (UserError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and timing.EXHAUSTED not in str(error):
            raise
        return Result(status=report.OUT_OF_MEMORY, message=_first_line(error), **fields)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Result(
        status=report.OK,
        **fields,
        **timing.make_figures(case, seconds, float(results["loss"]), device.device_kind),
        peak_gib=metrics.peak_gib([device]),
        memory_limit_gib=None if limit is None else limit / units.GIB,
    )


def build_case(case: Case, folder: pathlib.Path, device: jax.Device) -> tuple[Any, Any, Any]:
    """Builds the steps and inputs of a case as the train command does, and its batch."""
    source = folder / "documents.jsonl"
    cases.write_documents(case, source)
    config = cases.make_config(case, source=source, directory=folder / "run")
    inputs = build.build_training(config, devices=[device])
    spec = inputs.spec
    ((batch, counts),) = inputs.train_set.make_loader(
        inputs.train_set.make_schedule(config.batch.rows_per_step, num_steps=1),
        spec.placement,
    ).batches()
    assert counts.segment_lengths.sum() == case.row_tokens
    assert len(counts.segment_lengths) == cases.NUM_DOCUMENTS[case.documents]
    return spec, inputs, batch


def describe_step(fitted: Any, kernel: str) -> dict[str, Any]:
    """Fields of a result from a compiled step. Args: kernel: name of the chosen kernel."""
    text = fitted.executable.as_text() or ""
    workspace = cudnn_calls.read_workspace_bytes(text)
    return {
        "kernel_used": find_kernel(text, kernel),
        "workspace_gib": None if workspace is None else workspace / units.GIB,
        "remat_used": fitted.spec.remat_policy.remat,
        "memory_used": fit.describe(fitted.spec),
        "planned_gib": fitted.memory_use.device_total / units.GIB,
        "host_gib": fitted.memory_use.host / units.GIB,
    }


def find_kernel(program: str, chosen: str) -> str:
    """Returns the chosen attention kernel; asserts that the compiled program calls no other one."""
    for name, kernel in KERNELS.items():
        if kernel.custom_call_prefix:
            is_called = kernel.custom_call_prefix in program
            verb = "is called" if is_called else "is not called"
            assert is_called == (name == chosen), f"{chosen} was chosen, and {name} {verb}"
    return chosen


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


if __name__ == "__main__":
    timing.start(main, measure)
