"""Summary of a run: the numbers that a reader compares first."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsp.core import durations
from jaxsp.reporting.report.run_files import RunRecord, to_number

NUM_LAST_LOSSES = 20
"""Number of last losses of which the mean is shown, as in the summary that a run prints."""

MEAN_LOSS = f"Loss, mean of the last {NUM_LAST_LOSSES}"

UNKNOWN = "-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds of a run by part, in the order of the chart. Downtime between starts is not known."""

    step: float
    """Steps, without their waits for data."""
    data_wait: float
    evaluation: float
    checkpoint: float
    compilation: float
    """Compilation of the step in all starts; 0 if it was not recorded."""
    is_estimate: bool
    """True if not every step has a line: each line then stands for the steps before it."""

    @property
    def total(self) -> float:
        parts = (self.step, self.data_wait, self.evaluation, self.checkpoint, self.compilation)
        return sum(parts)


def measure_time(run: RunRecord) -> TimeParts:
    """Sums the seconds of a run by part."""
    weights = steps_per_line(run)
    step_s = _sum(run.columns["step_s"] * weights)
    data_wait = _sum(run.columns["data_wait_s"] * weights)
    return TimeParts(
        step=max(0.0, step_s - data_wait),
        data_wait=data_wait,
        evaluation=_sum(np.array([to_number(line.get("seconds")) for line in run.evals])),
        checkpoint=_sum(run.columns["checkpoint_wait_s"]),
        compilation=_sum(np.array([to_number(line.get("compile_s")) for line in run.starts])),
        is_estimate=bool((weights > 1).any()),
    )


def steps_per_line(run: RunRecord) -> np.ndarray:
    """Number of steps that each line of metrics.jsonl stands for: those since the line before."""
    return np.diff(run.columns["step"], prepend=0.0)


def elapsed_s(run: RunRecord) -> np.ndarray:
    """Seconds of steps from the beginning of the run to the end of each line's step."""
    return np.cumsum(np.nan_to_num(run.columns["step_s"]) * steps_per_line(run))


def _sum(values: np.ndarray) -> float:
    return float(np.nansum(values)) if len(values) else 0.0


def summarize(run: RunRecord) -> dict[str, str]:
    """Returns label and text of the rows of the table that compares runs."""
    time = measure_time(run)
    about = "about " if time.is_estimate else ""
    total = f"{about}{durations.describe(time.total)}" if run.num_lines else UNKNOWN
    return {
        "Status": describe_status(run),
        "Mesh": describe_mesh(run),
        "Attention": _describe_attention(run),
        "Devices": _describe_devices(run),
        "Rows per step": _describe_rows(run),
        "Tokens per step": _describe_step_tokens(run),
        "Tokens": _format(_last(run.columns["num_tokens_total"]), format_count),
        MEAN_LOSS: _describe_mean_loss(run),
        "Best evaluation": describe_best_eval(run),
        "Median tokens/s": _format(_median(run.columns["tokens_per_s"]), format_count),
        "Median MFU": _format(_median(run.columns["mfu"]), format_percent),
        "Mean padding": _format(_mean(run.columns["padding_fraction"]), format_percent),
        "Mean attention imbalance": _format(
            _mean(run.columns["attention_imbalance"]), lambda value: f"{value:.3f}"
        ),
        "Peak memory per device": describe_peak_memory(run),
        "Time": total,
        "Restarts": str(len(run.starts) - 1) if run.starts else "not recorded",
        "Non-finite steps": str(len(run.nonfinite)),
    }


def describe_status(run: RunRecord) -> str:
    """Describes how far a run is."""
    of_steps = f" of {run.num_steps:,}" if run.num_steps is not None else ""
    progress = f"{run.last_step:,}{of_steps} steps"
    if run.is_running:
        return f"running: {progress}"
    is_complete = run.num_steps is not None and run.last_step >= run.num_steps
    return f"complete: {progress}" if is_complete else f"ended: {progress}"


def describe_mesh(run: RunRecord) -> str:
    """Describes the mesh of the last start. Axes of size 1 are left out, except for seq."""
    mesh = run.starts[-1].get("mesh") if run.starts else run.get("mesh")
    if not isinstance(mesh, Mapping):
        return UNKNOWN
    sizes = {axis: mesh.get(axis) for axis in ("replica", "data", "seq")}
    shown = [
        f"{axis} {size}"
        for axis, size in sizes.items()
        if axis != "replica" or size not in (1, None)
    ]
    return " x ".join(shown)


def _describe_attention(run: RunRecord) -> str:
    if run.starts:
        start = run.starts[-1]
        strategy = start.get("strategy") or "whole rows"
        return f"{strategy}, {start.get('kernel')}"
    return f"{run.get('attention', 'strategy') or UNKNOWN} (as configured)"


def _describe_devices(run: RunRecord) -> str:
    if run.starts:
        start = run.starts[-1]
        text = f"{start.get('num_devices')} x {start.get('device_kind')}"
        if (start.get("num_processes") or 1) > 1:
            text += f", {start['num_processes']} processes"
        return text
    ratio = run.columns["tokens_per_s"] / np.maximum(run.columns["tokens_per_s_per_device"], 1e-30)
    return _format(_median(ratio), lambda value: str(round(value)))


def _describe_rows(run: RunRecord) -> str:
    rows = run.get("batch", "rows_per_step")
    longest = _longest_row(run)
    if not isinstance(rows, int) or longest is None:
        return UNKNOWN
    return f"{rows:,} of {longest:,} tokens"


def _describe_step_tokens(run: RunRecord) -> str:
    rows = run.get("batch", "rows_per_step")
    longest = _longest_row(run)
    if not isinstance(rows, int) or longest is None:
        return UNKNOWN
    return f"{rows * longest:,}"


def _longest_row(run: RunRecord) -> int | None:
    lengths = run.get("data", "row_tokens")
    numbers = [length for length in np.ravel(lengths).tolist() if isinstance(length, int)]
    return max(numbers, default=None)


def _describe_mean_loss(run: RunRecord) -> str:
    losses = last_losses(run)
    if not len(losses):
        return UNKNOWN
    return f"{losses.mean():.4f}"


def last_losses(run: RunRecord) -> np.ndarray:
    """The last losses that are not null, at most NUM_LAST_LOSSES."""
    losses = run.columns["loss"]
    return losses[np.isfinite(losses)][-NUM_LAST_LOSSES:]


def describe_best_eval(run: RunRecord) -> str:
    """Describes the lowest loss of each eval set, with its step."""
    best: dict[str, tuple[float, int]] = {}
    for line in run.evals:
        loss = to_number(line.get("loss"))
        name = str(line.get("data"))
        if math.isfinite(loss) and (name not in best or loss < best[name][0]):
            best[name] = (loss, line["step"])
    texts = [f"{name} {loss:.4f} at step {step:,}" for name, (loss, step) in best.items()]
    return "; ".join(texts) or UNKNOWN


def describe_peak_memory(run: RunRecord) -> str:
    """Describes the measured peak, or else the memory of the compiled step."""
    peaks = run.columns["device_peak_gib"]
    if np.isfinite(peaks).any():
        return f"{np.nanmax(peaks):.1f} GiB measured"
    totals = [sum(memory["device"].values()) for memory in list_memory(run)]
    return f"{format_bytes(max(totals))} compiled" if totals else UNKNOWN


def list_memory(run: RunRecord) -> list[dict[str, Any]]:
    """Memory of the compiled step for each row length, of the last start that recorded it."""
    for start in reversed(run.starts):
        entries = start.get("memory")
        valid = [entry for entry in entries if _is_memory(entry)] if entries else []
        if valid:
            return valid
    return []


def _is_memory(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    sizes = entry.get("device")
    return isinstance(sizes, dict) and all(isinstance(size, int) for size in sizes.values())


def _last(values: np.ndarray) -> float:
    present = values[np.isfinite(values)]
    return float(present[-1]) if len(present) else math.nan


def _median(values: np.ndarray) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _format(value: float, form: Any) -> str:
    return form(value) if math.isfinite(value) else UNKNOWN


def format_count(value: float) -> str:
    """Formats a count or a rate in four digits at most: `812`, `12,345`, `1.23 M`, `4.56 B`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 1000 * unit else f"{value / unit:,.0f} T"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_small(value: float) -> str:
    """Formats a difference in two digits: `0`, `1.2e-6`, `0.53`."""
    return f"{value:.2g}".replace("e-0", "e-")


def format_percent(fraction: float) -> str:
    """Formats a fraction as a percentage: `0.06 %`, `41.3 %`."""
    percent = 100 * fraction
    if percent and abs(percent) < 1:
        return f"{percent:.2g} %"
    return f"{percent:.1f} %"


def format_bytes(size: float | int) -> str:
    """Formats bytes: `8.7 MiB`, `1.5 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit / 10:
            digits = 0 if size >= 1000 * unit else 1
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size / 1024:,.1f} KiB"
