"""Plots of evaluation tasks."""

import importlib.util
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxsp.core.errors import UserError

_COLORS = "cividis"
"""Colors from dark blue (0) to yellow (1), which do not depend on telling red from green."""

_LIGHT_FROM = 0.47
"""Rate from which black text has more contrast to the cell than white."""


def check_matplotlib(field: str) -> None:
    """Raises: UserError about a field that asks for plots if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{field}: plots need matplotlib, which is not installed. Use pip install matplotlib."
        )


def write_heatmap(path: pathlib.Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Draws the rate of exact answers of the task needle, by length and depth, as PNG.

    Args:
        results: lines of tasks.jsonl. Other tasks are left out, and so are steps before the last
            one. At least one is of a needle.
    """
    from matplotlib import figure

    needles = [result for result in results if result["task"] == "needle"]
    step = max(result["step"] for result in needles)
    needles = [result for result in needles if result["step"] == step]
    lengths = sorted({result["length"] for result in needles})
    depths = sorted({result["depth"] for result in needles})
    rates = np.full((len(depths), len(lengths)), np.nan)
    for result in needles:
        cell = (depths.index(result["depth"]), lengths.index(result["length"]))
        rates[cell] = result["exact_rate"]
    drawn = figure.Figure(
        figsize=(max(6.5, 2.5 + 0.8 * len(lengths)), 2.2 + 0.32 * len(depths)),
        layout="constrained",
    )
    panel = drawn.subplots()
    panel.set_facecolor("#dddddd")
    image = panel.imshow(rates, cmap=_COLORS, vmin=0, vmax=1, aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        text = "none" if np.isnan(rate) else f"{rate:.2f}"
        is_dark = not np.isnan(rate) and rate < _LIGHT_FROM
        color = "white" if is_dark else "black"
        panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{100 * depth:.3g}%" for depth in depths])
    panel.set_xlabel("length in tokens")
    panel.set_ylabel("depth of the needle\n(0% is the start)")
    drawn.colorbar(image, label="fraction of exact answers")
    drawn.suptitle(f"Needle at step {step:,}, {_describe_samples(needles)}", fontsize=11)
    panel.set_title("exact greedy answers by likelihood, not RULER's score", fontsize=9)
    drawn.savefig(path, dpi=120, format="png")


def _describe_samples(results: Iterable[Mapping[str, Any]]) -> str:
    """Number of samples of a cell, for the title."""
    numbers = sorted({result["num_samples"] for result in results})
    text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {'sample' if numbers == [1] else 'samples'} per cell"
