"""Charts of a report, as JSON for plotly. The page adds colors and the chosen x axis."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxsp.reporting import task_plots
from jaxsp.reporting.report.run_files import POSITION_LOSSES, RunRecord
from jaxsp.training.metric_table import METRICS

MAX_POINTS = 1000
"""Maximum number of points of a line. Of longer runs, the extremes of neighbors are drawn."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

_FROM_ZERO = {"rangemode": "tozero"}
_FRACTION = {"tickformat": ".3~%", **_FROM_ZERO}
_SECONDS = {"ticksuffix": " s", **_FROM_ZERO}

_RETRIEVAL_NOTE = (
    "Answers that greedy decoding would write exactly, by likelihood; not RULER's score."
)

_LOGP_NOTE = "Sum over an answer's tokens; with objective.type=reward, the score."

CHARTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "loss": ("Loss", "Mean over the loss tokens, or the pairs, of each step.", {}),
    "eval_loss": ("Evaluation loss", "Mean over the loss tokens, or the pairs, of a set.", {}),
    "difference": ("Difference of the losses", "From the first run, at the same step.", _FROM_ZERO),
    "loss_by_position": (
        "Loss by position in the document",
        "Falls if the model makes use of its context. Thin: first evaluation. Dashed: documents "
        "that fill the bucket.",
        {},
    ),
    "loss_per_doubling": (
        "Loss per doubling of the position",
        "Below 0 if the model makes use of its context.",
        _FROM_ZERO,
    ),
    "long_ppl": ("LongPPL", "Perplexity of tokens that depend on far context.", {}),
    "exact_rate": ("Retrieval: exact answers", _RETRIEVAL_NOTE, _FRACTION),
    "token_accuracy": ("Token accuracy", "Top-1, of the loss tokens.", {"tickformat": ".3~%"}),
    "reward_accuracy": (
        "Reward accuracy",
        "Pairs whose chosen answer has the higher reward.",
        {"tickformat": ".3~%"},
    ),
    "reward_margin": ("Reward margin", "Chosen minus rejected.", {}),
    "chosen_reward": ("Reward of chosen answers", "", {}),
    "rejected_reward": ("Reward of rejected answers", "", {}),
    "chosen_logp": ("Log-probability or score of chosen answers", _LOGP_NOTE, {}),
    "rejected_logp": ("Log-probability or score of rejected answers", _LOGP_NOTE, {}),
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

_BY_SET = {"eval_loss": "loss"} | {name: name for name in ("loss_per_doubling", "long_ppl")}
"""Field of eval.jsonl of the charts with a line for each eval set."""

_FIRST_PLACE = 64
"""Place of the first bucket of positions on a logarithmic axis: its middle."""

_POSITION_AXIS = {
    "type": "log",
    "title": {"text": "First position of the bucket", "standoff": 4},
    "tickvals": [_FIRST_PLACE << bucket for bucket in range(20)],
    "ticktext": "0 128 256 512 1k 2k 4k 8k 16k 32k 64k 128k 256k 512k 1M 2M 4M 8M 16M 32M".split(),
}

_LABELS_PER_ROW = 2
"""Estimated number of labels in a row of a chart's legend."""

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
"""Markers of eval sets and tasks."""

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
        num_labels = sum(trace.get("showlegend", False) for trace in traces)
        if num_labels > 2 * _LABELS_PER_ROW:
            charts[-1]["height"] = 220 + 20 * (num_labels // _LABELS_PER_ROW)
        if traces and field == "loss_by_position":
            charts[-1]["x_axis"] = _POSITION_AXIS
        if field == "exact_rate":
            charts += [_draw_needles(run, len(runs) > 1) for run in runs if run.needles]
    return charts


def _draw(runs: Sequence[RunRecord], index: int, field: str) -> list[dict[str, Any]]:
    """Draws a run: values, their running average, and events of the run."""
    run = runs[index]
    if field in _BY_SET:
        return _draw_groups(runs, index, run.evals, _BY_SET[field])
    if field == "exact_rate":
        return _draw_groups(runs, index, run.tasks, field)
    if field == "loss_by_position":
        return _draw_positions(runs, index)
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


def _draw_groups(
    runs: Sequence[RunRecord], index: int, groups: Mapping[str, pd.DataFrame], field: str
) -> list[dict[str, Any]]:
    """Draws a field of each eval set, or of each task with its settings (color and marker) and
    length (dash)."""
    parts = {name: (name, name) for name in groups}
    if field == "exact_rate":  # `needle 64, float32 compute`
        for name in groups:
            task, comma, settings = name.partition(", ")
            kind, _, size = task.rpartition(" ")
            parts[name] = (kind + comma + settings, size)
    kinds = list(dict.fromkeys(kind for kind, _ in parts.values()))
    sizes = list(dict.fromkeys(size for _, size in parts.values()))
    traces = []
    for name, (kind, size) in parts.items():
        if groups[name][field].notna().any():
            color, style = _style_group(runs, index, kinds.index(kind), name)
            style["line"] = {"width": 2, "dash": _DASHES[sizes.index(size) % len(_DASHES)]}
            traces.append(_trace(runs[index], color, groups[name][field], **style))
    return traces


def _style_group(
    runs: Sequence[RunRecord], index: int, number: int, name: str
) -> tuple[int, dict[str, Any]]:
    """Color and style of an eval set: a color for each run, or for each set of a single run."""
    is_single = len(runs) == 1
    style = {
        "name": name if is_single else f"{runs[index].name}: {name}",
        "mode": "lines+markers",
        "showlegend": True,
        "cliponaxis": False,
        "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
    }
    return number if is_single else index, style


def _draw_positions(runs: Sequence[RunRecord], index: int) -> list[dict[str, Any]]:
    """Draws the loss by position of each eval set, of the first evaluation and of the last."""
    traces = []
    every, filled = POSITION_LOSSES
    for number, (name, by_step) in enumerate(runs[index].positions.items()):
        if not by_step:
            continue
        first = min(by_step)
        last = max(by_step)
        # of a single evaluation, the second entry replaces the first
        lines = {(first, every): (1, "solid"), (last, every): (2, "solid")}
        lines[last, filled] = (2, "dash")
        for (step, field), (width, dash) in lines.items():
            values = by_step[step][field].dropna()
            if not len(values):
                continue
            label = f"{name}, step {step:,}{', filled' if field == filled else ''}"
            color, style = _style_group(runs, index, number, label)
            style["line"] = {"width": width, "dash": dash}
            style["marker"]["size"] = 3 + 2 * width
            style["showlegend"] = (step, field) == (last, every)
            trace = _trace(runs[index], color, values, legendgroup=f"{index}: {name}", **style)
            # the chart has an x axis of its own
            traces.append({**trace, "x": to_json(np.maximum(values.index, _FIRST_PLACE))})
    return traces


def _draw_needles(run: RunRecord, is_named: bool) -> dict[str, Any]:
    """Draws a heatmap of the last step's needles. Args: is_named: adds the run's name."""
    lengths, depths, rates = task_plots.tabulate(run.needles)
    axis = {"type": "category", "fixedrange": True, "showgrid": False}
    cells = {
        "type": "heatmap",
        "x": [f"{length:,}" for length in lengths],
        "y": [f"{100 * float(depth):.3g}%" for depth in depths],
        "texttemplate": "%{z:.2f}",
        "hovertemplate": "%{x} tokens, depth %{y}: %{z:.1%}<extra></extra>",
        "hoverongaps": False,
        "showscale": False,
        "meta": {"run": run.name, "color": "--run0"},
        **{"colorscale": "Cividis", "zmin": 0, "zmax": 1, "xgap": 2, "ygap": 2},
    }
    is_dark = rates < task_plots.LIGHT_FROM
    traces = [
        {**cells, "z": [to_json(row) for row in shown], "textfont": {"color": color}}
        for shown, color in (
            (np.where(is_dark, rates, np.nan), "white"),
            (np.where(is_dark, np.nan, rates), "black"),
        )
    ]
    return {
        "title": f"Needles: exact answers{f', {run.name}' if is_named else ''}",
        "note": f"Step {run.needles[0]['step']:,}. {_RETRIEVAL_NOTE}",
        "x_axis": {**axis, "title": {"text": "Length in tokens", "standoff": 4}},
        "y_axis": {**axis, "title": {"text": "Depth (0%: start)"}, "autorange": "reversed"},
        "height": max(220, 80 + 20 * len(depths)),
        "traces": traces,
    }


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
