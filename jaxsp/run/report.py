"""The page of a report: one HTML file that needs no network, also for runs that still train."""

import dataclasses
import datetime
import html
import importlib.resources
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import plotly.offline

from jaxsp.checkpoint.run_paths import CONFIG_FILE
from jaxsp.config import config_file, yaml_io
from jaxsp.core import files, units
from jaxsp.core.errors import UserError
from jaxsp.run import comparison, metrics
from jaxsp.training.metric_table import METRICS, Line

MAX_POINTS = 1000
"""Maximum number of points of a line. Of longer runs, the extremes of neighbors are drawn."""

COLORS = ("#1453ab", "#c2410c", "#0a9060", "#c63ad6", "#b87a00", "#787d8c")

_FROM_ZERO = {"rangemode": "tozero"}
_FRACTION = {"tickformat": ".3~%"}

CHARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "loss": ("Training loss", {}),
    "learning_rate": ("Learning rate", {"exponentformat": "e", **_FROM_ZERO}),
    "tokens_per_s": ("Tokens per second, all devices", _FROM_ZERO),
    "device_peak_gib": ("Peak memory of a device (GiB)", _FROM_ZERO),
    "grad_norm": ("Gradient norm before clipping", {"type": "log"}),
    "mfu": ("Model FLOPs utilization", _FRACTION | _FROM_ZERO),
    "token_accuracy": ("Token accuracy", _FRACTION),
    "reward_accuracy": ("Reward accuracy", _FRACTION),
    "chosen_logp": ("Log-probability of chosen answers", {}),
    "rejected_logp": ("Log-probability of rejected answers", {}),
}
"""Title and y axis of charts by field of metrics.jsonl. Other means of METRICS have their name."""

Chart = dict[str, Any]
"""Title, and traces and axes of plotly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of a run directory."""

    name: str
    config: Mapping[str, Any]
    steps: Sequence[Line]
    """Lines of metrics.jsonl by step."""
    results: Mapping[str, Sequence[Line]]
    """Lines of evaluations by step, by what was evaluated with settings that are not the run's."""
    starts: Sequence[Line]
    num_nonfinite: int


def read_run(directory: pathlib.Path) -> RunRecord:
    """Reads a run directory. Raises: UserError if it is none."""
    if not (directory / CONFIG_FILE).is_file():
        raise UserError(f"RUN = {directory}: has no {CONFIG_FILE}. Name the folder of a run.")
    results = [x for name in comparison.RESULT_FILES for x in _read_lines(directory / name)]
    return RunRecord(
        name=str(directory),
        config=config_file.read(directory / CONFIG_FILE),
        steps=_sort(_read_lines(directory / metrics.METRICS_FILE)),
        results={name: _sort(lines) for name, lines in comparison.group(results).items()},
        starts=_read_lines(directory / metrics.STARTS_FILE, key="from_step"),
        num_nonfinite=len(_read_lines(directory / metrics.NONFINITE_FILE)),
    )


def _read_lines(path: pathlib.Path, *, key: str = "step") -> list[Line]:
    """Records of a file that have a step; the last line may be incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = [files.parse_json(line) or {} for line in lines]
    return [record for record in records if type(record.get(key)) is int]


def _sort(lines: Iterable[Line]) -> list[Line]:
    """Lines by step; of several lines for a step, the last one."""
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def render(runs: Sequence[RunRecord]) -> str:
    """Renders the report of runs, side by side if there are several."""
    template = importlib.resources.files(__package__).joinpath("report.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True)
    configs = [dict(yaml_io.flatten(run.config)) for run in runs]
    texts = [{name: yaml_io.format_value(x) for name, x in config.items()} for config in configs]
    results = [
        {
            f"{name}: {field}": comparison.format_number(value)
            for name, lines in run.results.items()
            for field, value in comparison.list_numbers(lines[-1]).items()
        }
        for run in runs
    ]
    return environment.from_string(template).render(
        names=[run.name for run in runs],
        created=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        summary=_tabulate(map(_summarize, runs)),
        differences=[x for x in _tabulate(texts) if len({*x[1:]}) > 1 and x[0] != "run.directory"],
        charts=draw(runs),
        results=_tabulate(results),
        memory=_tabulate(map(_list_memory, runs)),
        configs=[(run.name, yaml_io.dump(dict(run.config))) for run in runs],
        plotly=plotly.offline.get_plotlyjs(),
    )


def _summarize(run: RunRecord) -> dict[str, str]:
    start = run.starts[-1] if run.starts else {}
    mesh = " x ".join(f"{x} {size}" for x, size in start.get("mesh", {}).items() if size != 1)
    texts = {
        "Steps": f"{(run.steps or [{}])[-1].get('step', 0):,} of {start.get('num_steps', '?')}"
    }
    for label, form, reduce, field in (
        ("Loss, mean of the last 20 lines", "{:.4f}", lambda x: statistics.fmean(x[-20:]), "loss"),
        ("Tokens/s, median", "{:,.0f}", statistics.median, "tokens_per_s"),
        ("MFU, median", "{:.1%}", statistics.median, "mfu"),
        ("Padding, mean", "{:.1%}", statistics.fmean, "padding_fraction"),
        ("Peak memory of a device", "{:.1f} GiB", max, "device_peak_gib"),
        ("Tokens", "{:,}", max, "num_tokens_total"),
    ):
        _, values = _read_numbers(run.steps, field)
        texts[label] = form.format(reduce(values)) if values else "-"
    return texts | {
        "Devices": f"{start.get('num_devices')} x {start.get('device_kind')}, {mesh or 'no mesh'}",
        "Attention": f"{start.get('strategy') or 'whole rows'}, {start.get('kernel')}",
        "Starts": str(len(run.starts)),
        "Non-finite steps": str(run.num_nonfinite),
    }


def _list_memory(run: RunRecord) -> dict[str, str]:
    """GiB of the last start's compiled step, by cause."""
    memory = run.starts[-1].get("memory") or {} if run.starts else {}
    sizes = {f"host: {cause}": size for cause, size in memory.get("host", {}).items()}
    sizes = {**memory.get("device", {}), "available": memory.get("device_available"), **sizes}
    return {cause: f"{size / units.GIB:.3g}" for cause, size in sizes.items() if size}


def _tabulate(columns: Iterable[Mapping[str, str]]) -> list[list[str]]:
    """Rows of a table: label, and the text of each run."""
    columns = [*columns]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "-") for column in columns)] for label in labels]


def draw(runs: Sequence[RunRecord]) -> list[Chart]:
    """Returns the charts that have a number, the losses first; long series also as means over a
    twentieth of their points."""
    charts: dict[str, Chart] = {}
    means = [name for name in METRICS if not name.startswith("num_")]
    for index, run in enumerate(runs):
        for field in dict.fromkeys([*CHARTS, *means]):
            title, axis = CHARTS.get(field, (field, {}))
            if (run.config.get("objective") or {}).get("type") == "reward":
                title = title.replace("Log-probability", "Score")
            x, y = _read_numbers(run.steps, field)
            options = {"mode": "lines", "line": {"color": COLORS[index % len(COLORS)]}}
            window = len(y) // 20
            if window > 1 and field != "learning_rate":
                _add(charts, title, run.name, x, y, y_axis=axis, opacity=0.3, **options)
                sums = [0.0] * window + np.cumsum(y).tolist()
                y = [(sums[i + window] - sums[i]) / min(i + 1, window) for i in range(len(y))]
            _add(charts, title, run.name, x, y, y_axis=axis, **options)
        for name, lines in run.results.items():
            label = f"{run.name}: {name}"
            for field in comparison.COMPARED:
                _add(charts, f"Evaluation: {field}", label, *_read_numbers(lines, field))
            losses = lines[-1].get("loss_by_position") or {}
            # on a logarithmic axis, the first bucket is drawn at its middle
            x = [max(64, int(position)) for position in losses]
            title = "Loss by position in the document, last evaluation"
            axis = {"type": "log", "dtick": math.log10(2), "tickfont": {"size": 10}}
            _add(charts, title, label, x, [*losses.values()], x_axis=axis)
    return sorted(charts.values(), key=lambda chart: "loss" not in chart["title"].lower())


def _add(charts: dict[str, Chart], title: str, name: str, x: Any, y: Any, **options: Any) -> None:
    """Adds a line to a chart; of many points, the extremes of neighbors."""
    if not y:
        return
    if len(y) > MAX_POINTS:
        parts = np.array_split(np.arange(len(y)), MAX_POINTS // 2)
        extremes = {int(f(part, key=y.__getitem__)) for part in parts for f in (min, max)}
        x, y = ([values[place] for place in sorted(extremes)] for values in (x, y))
    axes = {axis: options.pop(axis, {}) for axis in ("x_axis", "y_axis")}
    traces = charts.setdefault(title, {"title": title, "traces": [], **axes})["traces"]
    color = COLORS[len(traces) % len(COLORS)]
    # plotly draws tags in names
    trace = {"name": html.escape(name), "x": x, "y": y, "line": {"color": color}}
    traces.append({**trace, "showlegend": "opacity" not in options, **options})


def _read_numbers(lines: Sequence[Line], field: str) -> tuple[list[int], list[float]]:
    """Returns the steps whose field is a finite number, and these numbers."""
    pairs = [
        (line["step"], line[field])
        for line in lines
        if isinstance(line.get(field), int | float) and math.isfinite(line[field])
    ]
    return [step for step, _ in pairs], [number for _, number in pairs]
