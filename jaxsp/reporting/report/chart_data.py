"""Data of the charts, as JSON that is safe inside a page."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsp.reporting.report import comparison, downsampling, facts
from jaxsp.reporting.report.downsampling import Groups
from jaxsp.reporting.report.run_files import RunRecord, to_number

SERIES = (
    "loss",
    "token_accuracy",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "mfu",
    "tflops_per_device",
    "step_s",
    "data_wait_s",
    "checkpoint_wait_s",
    "padding_fraction",
    "attention_imbalance",
    "device_peak_gib",
)
"""Fields of metrics.jsonl that have a chart."""

EVAL_SERIES = ("loss", "perplexity", "token_accuracy")

DIFFERENCE = "loss_difference"
"""Series of the absolute difference from the first run's loss."""

MAX_POINTS = 2000
"""Maximum number of points of a line."""

MIN_POINTS = 250
"""Number of points that each run may have, whatever the number of runs."""

TOTAL_POINTS = 8000
"""Number of points of all runs together, so that a page stays below a few MB."""

MAX_MARKERS = 500
"""Maximum number of markers of non-finite steps in a chart."""


def choose_groups(runs: Sequence[RunRecord]) -> list[Groups]:
    """Chooses which lines each point of a run's charts stands for."""
    max_points = max(MIN_POINTS, min(MAX_POINTS, TOTAL_POINTS // max(1, len(runs))))
    return [downsampling.group_lines(run.num_lines, max_points=max_points) for run in runs]


def build_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Returns the data of all charts."""
    return {
        "runs": [
            _build_run(run, groups, first=runs[0] if run is not runs[0] else None)
            for run, groups in zip(runs, choose_groups(runs), strict=True)
        ]
    }


def _build_run(run: RunRecord, groups: Groups, *, first: RunRecord | None) -> dict[str, Any]:
    columns = {name: run.columns[name] for name in SERIES}
    if first is not None:
        columns[DIFFERENCE] = _difference_column(first, run)
    reduced = {name: groups.reduce(column) for name, column in columns.items()}
    steps = run.columns["step"]
    restarts = [int(start["from_step"]) for start in run.starts[1:] if _has_step(start)]
    nonfinite = [int(line["step"]) for line in run.nonfinite[:MAX_MARKERS]]
    return {
        "name": run.name,
        "x": {
            name: downsampling.to_json(groups.take_last(column))
            for name, column in _x_columns(run).items()
        },
        "first_steps": None if groups.is_exact else downsampling.to_json(steps[groups.starts]),
        "series": {name: series for name, series in reduced.items() if series is not None},
        "evals": _build_evals(run),
        "restarts": _locate(run, restarts),
        "nonfinite": _locate(run, nonfinite),
    }


def _x_columns(run: RunRecord) -> dict[str, np.ndarray]:
    """Choices of the x axis: step, tokens and seconds of steps since the beginning of the run."""
    return {
        "step": run.columns["step"],
        "tokens": run.columns["num_tokens_total"],
        "time": facts.elapsed_s(run),
    }


def _locate(run: RunRecord, steps: Sequence[int]) -> dict[str, list[Any]]:
    """Places of steps on each x axis; between two lines they are interpolated."""
    own_steps = run.columns["step"]
    places = {}
    for name, column in _x_columns(run).items():
        is_known = np.isfinite(column)
        if name == "step" or not is_known.any():
            places[name] = list(steps)
            continue
        known_steps = np.append(0.0, own_steps[is_known])
        values = np.append(0.0, column[is_known])
        places[name] = downsampling.to_json(np.interp(np.array(steps, float), known_steps, values))
    return places


def _build_evals(run: RunRecord) -> list[dict[str, Any]]:
    by_set: dict[str, list[Any]] = {}
    for line in run.evals:
        by_set.setdefault(str(line.get("data")), []).append(line)
    return [
        {
            "name": name,
            "x": _locate(run, [int(line["step"]) for line in lines]),
            "series": {
                field: downsampling.to_json(
                    np.array([to_number(line.get(field)) for line in lines])
                )
                for field in EVAL_SERIES
            },
        }
        for name, lines in by_set.items()
    ]


def _difference_column(first: RunRecord, run: RunRecord) -> np.ndarray:
    """Absolute difference from the first run's loss in each line of a run; NaN if unknown."""
    column = np.full(run.num_lines, np.nan)
    difference = comparison.compare_losses(first, run)
    if difference is not None:
        column[np.searchsorted(run.columns["step"], difference.steps)] = difference.differences
    return column


def _has_step(start: Any) -> bool:
    return isinstance(start.get("from_step"), int)


def to_script(data: Any) -> str:
    """Returns JSON for a script element: without characters that could end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
