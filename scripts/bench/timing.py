"""Runs cases of a training step, and makes their results and the records of a results file."""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxsp.hf import model_config
from jaxsp.model import flops
from scripts.bench import cases, isolation, report, results
from scripts.bench.cases import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedResult:
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


def run_isolated(module: str, case: Case, result_type: type, *, seconds: float) -> Any:
    """Times a case in a process of its own. Args: result_type: a TimedResult."""
    began = time.monotonic()
    result = isolation.run_isolated(module, case, result_type, seconds=seconds)
    return dataclasses.replace(result, wall_s=time.monotonic() - began)


def run_cases(
    args: argparse.Namespace,
    contents: dict[str, Any],
    run: Callable[[Case, Sequence[str]], dict[str, Any]],
    *,
    sides: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Runs all cases. Adds the record of each to `contents`, and writes the file.

    Args:
        contents: contents of the results file.
        run: runs a case on some of the sides and returns its record. It gets no side if time is up.
        sides: from report.SIDES. With --until-it-fails, a side drops out when it fails.
    """
    earlier = _read_earlier(args.resume, contents)
    began = time.monotonic()
    queue = collections.deque((case, sides) for case in cases.expand_cases(args))
    while queue:
        case, case_sides = queue.popleft()
        record = _find_finished(case, earlier)
        if record is None:
            is_in_time = time.monotonic() - began < args.seconds
            record = run(case, case_sides if is_in_time else ())
        contents["cases"].append(record)
        yield record
        results.write(args.out, contents)
        passed_sides = [
            side for side in case_sides if report.get_side(record, side)["status"] == report.OK
        ]
        if args.until_it_fails and passed_sides and case.row_tokens >= max(args.lengths):
            queue.append((dataclasses.replace(case, row_tokens=2 * case.row_tokens), passed_sides))


def _read_earlier(path: pathlib.Path | None, contents: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the records of an earlier file. Copies its device and versions into `contents`."""
    if path is None:
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    unknown = [name for name, value in contents.items() if value is None]
    contents.update({name: earlier[name] for name in unknown if name in earlier})
    return earlier["cases"]


def _find_finished(case: Case, earlier: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Finds the record of a case that every side has finished."""
    fields = dataclasses.asdict(case)
    for record in earlier:
        sides = [record, record.get("transformers", record)]
        is_final = all(side["status"] in report.FINAL for side in sides)
        if is_final and fields == {name: record.get(name) for name in fields}:
            return record
    return None


def make_record(case: Case, result: Any) -> dict[str, Any]:
    """The record of a case in the file: its fields, the model's, and its result."""
    fields = dataclasses.asdict(result)
    del fields["device"], fields["runtime"]  # of the whole file
    return {
        **dataclasses.asdict(case),
        "num_documents": cases.NUM_DOCUMENTS[case.documents],
        "max_segments": cases.MAX_SEGMENTS[case.documents],
        "rows_per_step": 1,
        "num_devices": 1,
        "compute_dtype": "bfloat16",
        "optimizer": cases.OPTIMIZER["name"],
        **fields,
        "model": cases.SHAPES[case.shape],
    }


def make_figures(
    case: Case, seconds: Sequence[float], loss: float, device_kind: str
) -> dict[str, Any]:
    """Fields of a result from the times of all steps, warm-up included, and the last loss."""
    lengths = np.array([len(document) for document in cases.make_documents(case)])
    model = model_config.parse_model_config(cases.SHAPES[case.shape], field=case.shape)
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
