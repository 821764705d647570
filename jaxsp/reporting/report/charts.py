"""Charts of a report, as JSON for plotly. The page adds colors and the chosen x axis."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxsp.reporting.report.run_files import RunRecord
from jaxsp.training.metric_table import METRICS

MAX_POINTS = 1000
"""Maximum number of points of a line. Of longer runs, the extremes of neighbors are drawn."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

_FROM_ZERO = {"rangemode": "tozero"}
_FRACTION = {"tickformat": ".3~%", **_FROM_ZERO}
_SECONDS = {"ticksuffix": " s", **_FROM_ZERO}

CHARTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "loss": ("Loss", "Mean over the loss tokens, or the pairs, of each step.", {}),
    "eval_loss": ("Evaluation loss", "Mean over the loss tokens, or the pairs, of a set.", {}),
    "difference": ("Difference of the losses", "From the first run, at the same step.", _FROM_ZERO),
    "token_accuracy": ("Token accuracy", "Top-1, of the loss tokens.", {"tickformat": ".3~%"}),
    "reward_accuracy": (
        "Reward accuracy",
        "Pairs whose chosen answer has the higher reward.",
        {"tickformat": ".3~%"},
    ),
    "reward_margin": ("Reward margin", "Chosen minus rejected.", {}),
    "chosen_reward": ("Reward of chosen answers", "", {}),
    "rejected_reward": ("Reward of rejected answers", "", {}),
    "chosen_logp": ("Log-probability of chosen answers", "Sum over an answer's tokens.", {}),
    "rejected_logp": ("Log-probability of rejected answers", "Sum over an answer's tokens.", {}),
    "grad_norm": ("Gradient norm", "Before clipping.", {"type": "log"}),
    "learning_rate": ("Learning rate", "", {"exponentformat": "e", **_FROM_ZERO}),
    "tokens_per_s": ("Tokens per second", "All devices.", {"tickformat": ".3~s", **_FROM_ZERO}),
    "router_max_load": (
        "Busiest expert",
        "Tokens relative to the mean over experts, in the layer where that is most.",
        _FROM_ZERO,
    ),
    "router_entropy": ("Entropy of routers", "1: all experts are equally likely.", _FROM_ZERO),
    "router_aux_loss": ("Load-balancing loss", "Before its factor.", {}),
    "router_z_loss": ("Routers' z-loss", "Before its factor.", {}),
    "mfu": ("Model FLOPs utilization (MFU)", "Without recomputation.", _FRACTION),
    "tflops_per_device": ("TFLOP/s per device", "Without recomputation.", _FROM_ZERO),
    "step_s": ("Time per step", "Without evaluations and checkpoints.", _SECONDS),
    "data_wait_s": ("Data wait", "Part of each step's time.", _SECONDS),
    "checkpoint_wait_s": ("Checkpoint wait", "Delay of steps by checkpoints.", _SECONDS),
    "padding_fraction": ("Padding", "Token slots that no document fills.", _FRACTION),
    "attention_imbalance": ("Attention imbalance", "Busiest group relative to the mean.", {}),
    "device_peak_gib": ("Peak memory", "Of process 0.", {"ticksuffix": " GiB", **_FROM_ZERO}),
}
"""Title, note and plotly's y axis of charts, most of them by field of metrics.jsonl. Other means
among METRICS get a chart with their name."""

_STEADY = ("difference", "learning_rate", "checkpoint_wait_s", "device_peak_gib")
"""Charts without a running average."""


def build(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns all charts; those without a value are left out."""
    charts = []
    means = [name for name in METRICS if not name.startswith("num_")]
    for field in dict.fromkeys([*CHARTS, *means]):
        title, note, y_axis = CHARTS.get(field, (field, "", {}))
        traces = [trace for i in range(len(runs)) for trace in _draw(runs, i, field)]
        if traces:
            charts.append({"title": title, "note": note, "y_axis": y_axis, "traces": traces})
    return charts


def _draw(runs: Sequence[RunRecord], index: int, field: str) -> list[dict[str, Any]]:
    """Draws a run: values, their running average, and events of the run."""
    run = runs[index]
    if field == "eval_loss":
        return _draw_evals(runs, index)
    if field == "difference":
        values = compare_losses(runs[0], run)[: len(run.metrics) * min(index, 1)]
    else:
        values = run.metrics[field]
    if not values.notna().any():
        return []
    traces = _mark_events(run) if field in ("loss", "grad_norm") else []
    mode = "markers" if field == "checkpoint_wait_s" else "lines"
    window = len(values) // 20
    if field in _STEADY or window < 2:
        return [_trace(run, index, values, mode=mode), *traces]
    averages = values.rolling(window, min_periods=1).mean()
    return [
        _trace(run, index, values, opacity=0.4, line={"width": 1}),
        _trace(run, index, averages, name=f"{run.name}, average of {window} lines"),
        *traces,
    ]


def _draw_evals(runs: Sequence[RunRecord], index: int) -> list[dict[str, Any]]:
    """Draws the loss of each eval set: a color for each run, or for each set of a single run."""
    traces = []
    for number, (name, frame) in enumerate(runs[index].evals.items()):
        text = f"{runs[index].name}: {name}" if len(runs) > 1 else name
        color = index if len(runs) > 1 else number
        style = {"name": text, "mode": "lines+markers", "showlegend": True}
        style["line"] = {"width": 2, "dash": _DASHES[number % len(_DASHES)]}
        traces.append(_trace(runs[index], color, frame["loss"], **style))
    return traces


def _mark_events(run: RunRecord) -> list[dict[str, Any]]:
    """Draws lines at restarts and crosses at non-finite steps, on a y axis from 0 to 1."""
    style = {"yaxis": "y2", "meta": {"run": run.name, "color": "--alert"}, "hoverinfo": "name"}
    steps = np.repeat([start["from_step"] for start in run.starts[1:]], 3)
    heights = pd.Series(np.resize([0, 1, np.nan], len(steps)), steps)
    line = {"width": 1.5, "dash": "dot"}
    lines = _trace(run, 0, heights, name=f"{run.name}, restart", line=line, **style)
    heights = pd.Series(0.04, [line["step"] for line in run.nonfinite])
    style |= {"mode": "markers", "marker": {"symbol": "x", "size": 8}}
    crosses = _trace(run, 0, heights, name=f"{run.name}, not finite", **style)
    return [trace for trace in (lines, crosses) if trace["y"]]


def _trace(run: RunRecord, index: int, values: pd.Series, **options: Any) -> dict[str, Any]:
    """Returns a line of a chart, with its places on each of the x axes."""
    if len(values) > MAX_POINTS:
        present = values.dropna()
        groups = present.groupby(np.arange(len(present)) * MAX_POINTS // 2 // len(present))
        values = present[sorted({*groups.idxmin(), *groups.idxmax()})]
    steps = values.index.to_numpy(float)
    own = run.metrics.index.to_numpy(float)
    minutes = (run.metrics["step_s"].fillna(0) * run.metrics["num_steps"]).cumsum() / 60
    x = {"step": to_json(steps)}
    for axis, places in (("tokens", run.metrics["num_tokens_total"]), ("time", minutes.round(4))):
        # between two lines, places are interpolated
        known = places.notna()
        x[axis] = to_json(np.interp(steps, [0, *own[known]], [0, *places[known]]))
    line = {"width": 2, "dash": _DASHES[index % len(_DASHES)]}
    meta = {"run": run.name, "color": f"--run{index % 6}"}
    trace = {"name": run.name, "mode": "lines", "line": line, "meta": meta, **options}
    return {**trace, "name": html.escape(trace["name"]), "x": x, "y": to_json(values)}


def compare_losses(first: RunRecord, other: RunRecord) -> pd.Series:
    """Absolute difference from the first run's loss for each line of a run; NaN if unknown."""
    return (other.metrics["loss"] - first.metrics["loss"]).abs().reindex(other.metrics.index)


def to_json(values: Any) -> list[float | None]:
    """Numbers as in JSON, with null for NaN."""
    return [None if value != value else value for value in np.asarray(values, float).tolist()]
