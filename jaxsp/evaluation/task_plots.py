"""Plots of evaluation tasks."""

import importlib.util
import io
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxsp.core import files
from jaxsp.training.metric_table import Line

LIGHT_FROM = 0.47
"""Rate from which black text has more contrast to the cell than white."""


def draw_if_possible(path: pathlib.Path, lines: Sequence[Line]) -> str:
    """Draws needles, if lines have some, beside the file of results or in a run's directory.

    Returns: the file, or why there is none; empty without needles.
    """
    needles = [line for line in lines if line.get("task") == "needle"]
    if not needles:
        return ""
    plot = path.with_name(f"{path.stem}-needle.png")
    if path.is_dir():
        plot = path / "needle.png"
    if importlib.util.find_spec("matplotlib") is None:
        return f"no {plot.name}, which needs matplotlib (pip install 'jaxsp[plan]')"
    write_heatmap(plot, needles)
    return str(plot)


def write_heatmap(path: pathlib.Path, needles: Sequence[Line]) -> None:
    """Draws the rate of exact answers by length and depth, as PNG, of needles of one step."""
    from matplotlib import figure

    by_length = {line["length"]: line["exact_rate_by_depth"] for line in needles}
    lengths = sorted(by_length)
    depths = sorted({depth for rates in by_length.values() for depth in rates}, key=float)
    rates = np.array([[by_length[x].get(y, np.nan) for x in lengths] for y in depths], float)
    size = (max(6.5, 2.5 + 0.8 * len(lengths)), 2.2 + 0.32 * len(depths))
    drawn = figure.Figure(figsize=size, layout="constrained")
    panel = drawn.subplots()
    panel.set_facecolor("#dddddd")
    # From dark blue to yellow, which do not depend on telling red from green
    image = panel.imshow(rates, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        text = "none" if np.isnan(rate) else f"{rate:.2f}"
        color = "white" if rate < LIGHT_FROM else "black"
        panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{100 * float(depth):.3g}%" for depth in depths])
    panel.set_xlabel("length in tokens")
    panel.set_ylabel("depth of the needle\n(0% is the start)")
    panel.set_title("exact greedy answers by likelihood, not RULER's score", fontsize=9)
    counts = sorted({line["num_samples"] // len(line["exact_rate_by_depth"]) for line in needles})
    samples = "1 sample" if counts == [1] else f"{counts[0]} samples"
    if len(counts) > 1:
        samples = f"{counts[0]} to {counts[-1]} samples"
    drawn.suptitle(f"Needle at step {needles[0]['step']:,}, {samples} per cell", fontsize=11)
    drawn.colorbar(image, label="fraction of exact answers")
    content = io.BytesIO()
    drawn.savefig(content, dpi=120, format="png")
    files.write_atomic(path, content.getvalue())
