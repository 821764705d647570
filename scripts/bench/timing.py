"""Runs the cases of scripts/bench/step.py in processes of their own, and makes their records.

The memory of each process starts empty, a crash does not stop the other cases, and a case can be
ended after a time.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxsp.hf import model_config
from jaxsp.model import flops
from scripts.bench import cases, machine, report, results
from scripts.bench.cases import Case

CASE_OPTION = "--case"
"""First argument of the process of a case; the case as JSON and a folder follow."""

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""XLA's error code for running out of memory."""

_RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a case. Figures are None if it ended earlier or the device does not report them."""

    status: str
    """A status of report.py."""
    message: str | None = None
    """First line of the error."""
    step_s: float | None = None
    """Median."""
    slowest_step_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_device: float | None = None
    """Needed arithmetic, as in metrics.jsonl: causal, per document, without recomputation."""
    mfu: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    """Loss of the last step."""
    loss_finite: bool | None = None
    wall_s: float | None = None
    """Duration of the case's process."""
    kernel_used: str | None = None
    fallback_reason: str | None = None
    """Reason that `auto` chose another kernel."""
    remat_used: str | None = None
    """Value of memory.remat in the compiled step; never `auto`."""
    memory_used: str | None = None
    """Description of the compiled step's memory options."""
    compile_s: float | None = None
    from_cache: bool | None = None
    """True if the step came from JAX's compilation cache; compile_s is then the time to load it."""
    planned_gib: float | None = None
    """Device memory of the compiled step, with the estimate for the attention workspace."""
    workspace_gib: float | None = None
    """Largest workspace of cuDNN attention in the compiled step."""
    host_gib: float | None = None
    """Host memory of the compiled step."""
    memory_limit_gib: float | None = None
    """Device memory that JAX may use (system/hardware.py)."""
    device: str | None = None
    """JAX's name for the type of device."""
    runtime: str | None = None
    """JAX's platform version; for a GPU, the version of CUDA."""


def run_case(module: str, case: Case, *, seconds: float) -> Result:
    """Times a case in a new process, which is ended after `seconds`.

    Args: module: its main calls `start`.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as folder:
        file = pathlib.Path(folder) / _RESULT_FILE
        words = [CASE_OPTION, json.dumps(dataclasses.asdict(case)), folder]
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *words],
                cwd=machine.REPO,
                env={**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache"},
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            result = Result(status=report.TIMED_OUT, message=f"ended after {seconds:.0f} s")
        else:
            result = explain_exit(done.returncode, done.stderr)
            if file.exists():
                result = Result(**json.loads(file.read_text(encoding="utf-8")))
            elif result.status == report.FAILED:
                sys.stderr.write(done.stderr)
    return dataclasses.replace(result, wall_s=time.monotonic() - began)


def explain_exit(code: int, stderr: str) -> Result:
    """The result of a process that ended without one."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    exhausted = next((line for line in lines if EXHAUSTED in line), None)
    if exhausted is not None:
        return Result(status=report.OUT_OF_MEMORY, message=exhausted)
    last = lines[-1] if lines else "no output"
    return Result(status=report.FAILED, message=f"exit code {code}: {last}")


def start(
    main: Callable[[list[str]], int], measure: Callable[[Case, pathlib.Path], Result]
) -> None:
    """Runs a benchmark's command, or measures a case if this is the process of one."""
    if sys.argv[1:2] != [CASE_OPTION]:
        sys.exit(main(sys.argv[1:]))
    case, folder = sys.argv[2:]
    result = measure(Case(**json.loads(case)), pathlib.Path(folder))
    text = json.dumps(dataclasses.asdict(result), allow_nan=False)
    pathlib.Path(folder, _RESULT_FILE).write_text(text, encoding="utf-8")


def run_cases(
    args: argparse.Namespace, contents: dict[str, Any], run: Callable[[Case], Result]
) -> Iterator[dict[str, Any]]:
    """Runs all cases. Adds the record of each to `contents`, and writes the file.

    Args: contents: contents of the results file; the first case adds device and runtime.
    """
    earlier = _read_earlier(args.resume, contents)
    began = time.monotonic()
    queue = collections.deque(cases.expand_cases(args))
    while queue:
        case = queue.popleft()
        record = _find_finished(case, earlier)
        if record is None:
            result = Result(status=report.NOT_RUN)
            if time.monotonic() - began < args.seconds:
                result = run(case)
            for name in ("device", "runtime"):
                contents[name] = contents[name] or getattr(result, name)
            record = make_record(case, result)
        contents["cases"].append(record)
        yield record
        results.write(args.out, contents)
        has_passed = record["status"] == report.OK
        if args.until_it_fails and has_passed and case.row_tokens >= max(args.lengths):
            queue.append(dataclasses.replace(case, row_tokens=2 * case.row_tokens))


def _read_earlier(path: pathlib.Path | None, contents: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the records of an earlier file. Copies its device and versions into `contents`."""
    if path is None:
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    unknown = [name for name, value in contents.items() if value is None]
    contents.update({name: earlier[name] for name in unknown if name in earlier})
    return earlier["cases"]


def _find_finished(case: Case, earlier: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Finds the record of a case that was finished."""
    fields = dataclasses.asdict(case)
    for record in earlier:
        is_same = fields == {name: record.get(name) for name in fields}
        if is_same and record["status"] in report.FINAL:
            return record
    return None


def make_record(case: Case, result: Result) -> dict[str, Any]:
    """The record of a case in the file: its fields, the model's, and its result."""
    fields = dataclasses.asdict(result)
    del fields["device"], fields["runtime"]  # of the whole file
    return {
        **dataclasses.asdict(case),
        "num_documents": cases.NUM_DOCUMENTS[case.documents],
        "max_segments": cases.MAX_SEGMENTS[case.documents],
        "rows_per_step": 1,
        "num_devices": 1,
        "optimizer": cases.OPTIMIZER["name"],
        **fields,
        "model": cases.SHAPES[case.shape],
    }


def make_figures(
    case: Case, seconds: Sequence[float], loss: float, device_kind: str
) -> dict[str, Any]:
    """Fields of a result from the times of all steps, warm-up included, and the last loss."""
    lengths = np.array([len(document) for document in cases.make_documents(case)])
    model = model_config.parse_model_config(cases.SHAPES[case.shape])
    timed = seconds[cases.WARM_UP_STEPS :]
    step_s = statistics.median(timed)
    tflops = flops.step_flops(model, lengths) / step_s / 1e12
    peak = flops.peak_tflops(device_kind)
    return {
        "step_s": step_s,
        "slowest_step_s": max(timed),
        "tokens_per_s": case.row_tokens / step_s,
        "tflops_per_device": tflops,
        "mfu": None if peak is None else tflops / peak,
        "loss": loss if math.isfinite(loss) else None,
        "loss_finite": math.isfinite(loss),
    }
