"""Plots of evaluation tasks."""

import importlib.util
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsp.core import files
from jaxsp.training.metric_table import Line

LIGHT_FROM = 0.47
"""Rate from which black text has more contrast to the cell than white."""


def draw_if_possible(path: pathlib.Path, lines: Sequence[Line]) -> str:
    """Draws needles as in `write_heatmap`, if lines have some and matplotlib is installed.

    Returns: the file, or why there is none; empty without needles.
    """
    needles = [line for line in lines if line.get("task") == "needle"]
    if not needles:
        return ""
    if importlib.util.find_spec("matplotlib") is None:
        return f"no {path.name}, which needs matplotlib (pip install 'jaxsp[plan]')"
    write_heatmap(path, needles)
    return str(path)


def write_heatmap(path: pathlib.Path, needles: Sequence[Line]) -> None:
    """Draws the rate of exact answers by length and depth, as PNG.

    Args: needles: lines of tasks.jsonl of the task needle, all of one step.
    """
    from matplotlib import figure

    lengths, depths, _ = tabulate(needles)
    drawn = figure.Figure(
        figsize=(max(6.5, 2.5 + 0.8 * len(lengths)), 2.2 + 0.32 * len(depths)),
        layout="constrained",
    )
    per_cell = sorted({line["num_samples"] // len(line["exact_rate_by_depth"]) for line in needles})
    samples = "1 sample" if per_cell == [1] else f"{per_cell[0]} samples"
    if len(per_cell) > 1:
        samples = f"{per_cell[0]} to {per_cell[-1]} samples"
    panel = drawn.subplots()
    drawn.colorbar(draw_heatmap(panel, needles), label="fraction of exact answers")
    drawn.suptitle(f"Needle at step {needles[0]['step']:,}, {samples} per cell", fontsize=11)
    panel.set_title("exact greedy answers by likelihood, not RULER's score", fontsize=9)
    content = io.BytesIO()
    drawn.savefig(content, dpi=120, format="png")
    files.write_atomic(path, content.getvalue())


def draw_heatmap(panel: Any, needles: Sequence[Line]) -> Any:
    """Draws a heatmap into matplotlib's axes. Args: needles: see `write_heatmap`.

    Returns: the image, for a color bar.
    """
    lengths, depths, rates = tabulate(needles)
    panel.set_facecolor("#dddddd")
    # From dark blue to yellow, which do not depend on telling red from green
    image = panel.imshow(rates, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        text = "none" if np.isnan(rate) else f"{rate:.2f}"
        is_dark = not np.isnan(rate) and rate < LIGHT_FROM
        color = "white" if is_dark else "black"
        panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{100 * float(depth):.3g}%" for depth in depths])
    panel.set_xlabel("length in tokens")
    panel.set_ylabel("depth of the needle\n(0% is the start)")
    return image


def tabulate(needles: Sequence[Line]) -> tuple[list[int], list[str], np.ndarray]:
    """Lengths, depths, and the rate of exact answers of each depth and length, NaN without one."""
    by_length = {line["length"]: line["exact_rate_by_depth"] for line in needles}
    lengths = sorted(by_length)
    depths = sorted({depth for rates in by_length.values() for depth in rates}, key=float)
    rates = [[by_length[length].get(depth, np.nan) for length in lengths] for depth in depths]
    return lengths, depths, np.array(rates, float)
