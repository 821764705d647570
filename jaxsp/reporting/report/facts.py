"""Facts about runs and their differences, as texts and rows of tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxsp.config import yaml_io
from jaxsp.core import durations, units
from jaxsp.reporting.report import charts
from jaxsp.reporting.report.run_files import RunRecord

MAX_ANSWERS = 5
"""Maximum number of answers to a sample."""

NUM_LAST_LOSSES = 20
"""Number of last losses of which the mean is shown, as in the summary that a run prints."""

UNKNOWN = "-"

START_FIELDS = (
    "time from_step previous_step mesh num_devices device_kind config_changes compile_s host "
    "jaxsp_version jax_version checkpoint"
).split()
"""Fields of starts.jsonl that have a column."""

RESULTS = {
    "loss": ("loss", "{:.4f}"),
    "token_accuracy": ("token accuracy", "{:.1%}"),
    "reward_accuracy": ("reward accuracy", "{:.1%}"),
    "loss_per_doubling": ("loss per doubling", "{:+.4f}"),
    "long_ppl": ("LongPPL", "{:,.2f}"),
    "num_key_tokens": ("key tokens", "{:,.0f}"),
    "exact_rate": ("exact answers", "{:.1%}"),
    "answer_loss": ("answer loss", "{:.4f}"),
    "num_samples": ("samples", "{:,.0f}"),
}
"""Header and format of the columns for an evaluation, by field of eval.jsonl and tasks.jsonl."""

Rows = list[list[str]]


def summarize(run: RunRecord) -> dict[str, str]:
    """Returns label and text of the facts that a reader compares first."""
    start = run.starts[-1] if run.starts else {}
    attention = f"{start.get('strategy') or 'whole rows'}, {start.get('kernel')}"
    model, batch, data = (run.config.get(section) or {} for section in ("model", "batch", "data"))
    available = _find_memory(run).get("device_available") or np.nan
    compiled = sum(_find_memory(run).get("device", {}).values()) or np.nan
    peak = run.metrics["device_peak_gib"].max()
    losses = run.metrics["loss"].dropna()[-NUM_LAST_LOSSES:]
    return {
        f"Loss, mean of the last {NUM_LAST_LOSSES}": _format(losses.mean(), "{:.4f}"),
        "Best evaluation": "; ".join(
            f"{name} {losses.min():.4f} at step {losses.idxmin():,.0f}"
            for name in run.eval_sets
            if (losses := run.evals[name]["loss"]).notna().any()
        )
        or UNKNOWN,
        "Median tokens/s": _format(run.metrics["tokens_per_s"].median(), "{:,.0f}"),
        "Median MFU": _format(run.metrics["mfu"].median(), "{:.1%}"),
        "Mean padding": _format(run.metrics["padding_fraction"].mean(), "{:.1%}"),
        "Mean attention imbalance": _format(run.metrics["attention_imbalance"].mean(), "{:.3f}"),
        "Memory per device, measured": _format(peak, "{:.1f} GiB"),
        "Memory per device, compiled": _format(compiled / units.GIB, "{:.3g} GiB"),
        "Memory per device, available": _format(available / units.GIB, "{:.3g} GiB"),
        "Time": durations.describe(sum(measure_time(run).values())),
        "Status": _describe_status(run),
        "Model": str(model.get("source") or (model.get("config") or {}).get("model_type")),
        "Devices": f"{start.get('num_devices')} x {start.get('device_kind')}" if start else UNKNOWN,
        "Mesh": describe(start.get("mesh") or run.config.get("mesh")),
        "Attention": attention if start else UNKNOWN,
        "Rows per step": f"{batch.get('rows_per_step')} x {data.get('row_tokens')} tokens",
        "Tokens": _format(run.metrics["num_tokens_total"].max(), "{:,.0f}"),
        "Restarts": str(len(run.starts) - 1) if run.starts else "not recorded",
        "Non-finite steps": str(len(run.nonfinite)),
    }


def _format(value: float, form: str) -> str:
    return form.format(value) if np.isfinite(value) else UNKNOWN


def _describe_status(run: RunRecord) -> str:
    """Describes how far a run is."""
    step = int(run.metrics.index.max()) if len(run.metrics) else 0
    steps = [start.get("num_steps") for start in run.starts]
    num_steps = (steps or [(run.config.get("run") or {}).get("steps")])[-1] or 0
    status = "complete" if 0 < num_steps <= step else "ended"
    if run.is_running:
        status = "running"
    return f"{status}: {step:,} of {num_steps or 'unknown'} steps"


def describe(value: Any) -> str:
    """Describes a value of starts.jsonl; of a mesh, the axes with several devices."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict):
        return " x ".join(f"{axis} {size}" for axis, size in value.items() if size != 1)
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _find_memory(run: RunRecord) -> Mapping[str, Any]:
    """Memory of the last start's compiled step; empty if not recorded."""
    return run.starts[-1].get("memory") or {} if run.starts else {}


def list_memory(run: RunRecord, place: str) -> dict[str, float]:
    """GiB by cause, of one device. Args: place: device or host."""
    return {cause: size / units.GIB for cause, size in _find_memory(run).get(place, {}).items()}


def measure_time(run: RunRecord) -> dict[str, float]:
    """Sums the seconds of a run by part. Downtime between starts is not known."""
    step_s = (run.metrics["step_s"] * run.metrics["num_steps"]).sum()
    wait_s = (run.metrics["data_wait_s"] * run.metrics["num_steps"]).sum()
    return {
        "steps, without waits": step_s - wait_s,
        "data wait": wait_s,
        "evaluation": sum((run.evals[name]["seconds"].sum() for name in run.eval_sets), 0.0),
        "checkpoint wait": run.metrics["checkpoint_wait_s"].sum(),
        "compilation": sum((start.get("compile_s") or 0 for start in run.starts), 0.0),
    }


def list_notes(run: RunRecord) -> list[str]:
    """Notes about what is left out or estimated."""
    count = len(run.metrics)
    notes = {
        "There is no step in metrics.jsonl yet.": not count,
        f"Charts show the extremes of {count:,} lines.": count > charts.MAX_POINTS,
        f"{run.num_damaged} lines could not be read, and count for nothing.": run.num_damaged,
        "Starts and memory are not recorded: an older version wrote the run.": not run.starts,
        "Times are estimates: not every step has a line.": (run.metrics["num_steps"] > 1).any(),
    }
    return [f"{run.name}: {note}" for note, is_shown in notes.items() if is_shown]


def list_parts(parts: Sequence[Mapping[str, float]], form: str) -> list[list[Any]]:
    """Rows of a table: part, and for each run its text and its fraction."""
    frame = pd.DataFrame(parts).fillna(0.0)
    fractions = frame.div(frame.sum(axis=1), axis=0).fillna(0.0)
    return [[x, *zip(map(form.format, frame[x]), fractions[x], strict=True)] for x in frame]


def list_results(runs: Sequence[RunRecord], results: Sequence[Mapping[str, pd.DataFrame]]) -> Rows:
    """Rows of a table, after its header: last results of each eval set or task, and run.

    Columns without a number are left out. Args: results: of each run, by eval set or task.
    """
    rows = [
        [name, run.name, f"{of_run[name].index[-1]:,.0f}", *texts]
        for name in dict.fromkeys(name for of_run in results for name in of_run)
        for run, of_run in zip(runs, results, strict=True)
        if name in of_run
        for texts in [[_format(of_run[name][x].iloc[-1], form) for x, (_, form) in RESULTS.items()]]
    ]
    header = ["", "run", "step", *(header for header, _ in RESULTS.values())]
    columns = [x for x in zip(header, *rows, strict=True) if rows and {*x[1:]} != {UNKNOWN}]
    if len(runs) == 1:
        columns = [column for column in columns if column[0] != "run"]
    return [list(row) for row in zip(*columns, strict=True)]


def compare_configs(configs: Sequence[Any], *, is_neutral: Callable[[str], bool]) -> Rows:
    """Rows of a table: field, effect, and values; fields that change the model come first."""
    rows: Rows = []
    for field in dict.fromkeys(field for config in configs for field in config):
        texts = [yaml_io.format_value(config.get(field, UNKNOWN)) for config in configs]
        values = [yaml_io.shorten(text, 200) for text in texts]
        if len(set(values)) > 1 and field not in ("run.directory", "run.resume"):
            rows.append([field, "rounding" if is_neutral(field) else "changes the model", *values])
    return sorted(rows, key=lambda row: row[1])


def compare_losses(first: RunRecord, other: RunRecord) -> str:
    """Describes the differences between the losses of two runs at their common steps."""
    differences = charts.compare_losses(first, other).dropna()
    if not len(differences):
        return f"{other.name} and {first.name} have no common step with a loss."
    size = f"{differences.max():.2g}".replace("e-0", "e-")
    counts = ["num_rows", "num_tokens", "num_loss_tokens"]
    unequal = (other.metrics[counts] - first.metrics[counts]).abs().max(axis=1) > 0
    return (
        f"{other.name} and {first.name}: losses differ by at most {size} (at step "
        f"{differences.idxmax():,.0f}) over {len(differences):,} common steps. Numbers of rows and "
        f"tokens differ in {unequal.sum():,} of them."
    )


def group_samples(run: RunRecord) -> list[tuple[str, str, str, list[tuple[int, str]]]]:
    """Title, prompt and reference of each sample of a run, and its last answers, the last first."""
    groups: dict[tuple[str, Any], list[Mapping[str, Any]]] = {}
    for line in sorted(run.samples, key=lambda line: line["step"]):
        groups.setdefault((str(line.get("data")), line.get("sample")), []).append(line)
    return [
        (
            f"{data}, document {number}",
            str(lines[-1].get("prompt")),
            str(lines[-1].get("reference")),
            [(line["step"], str(line.get("answer"))) for line in lines[: -MAX_ANSWERS - 1 : -1]],
        )
        for (data, number), lines in groups.items()
    ]
