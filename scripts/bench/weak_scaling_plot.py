"""Draws the results of scripts/bench/weak_scaling.py: memory, bytes sent and estimated MFU.

    python -m scripts.bench.weak_scaling_plot RESULTS.json FILE.png

Needs matplotlib.
"""

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxsp.planner.compile import memory
from scripts.bench import weak_scaling

_BLUE = "#0072b2"
_ORANGE = "#e69f00"
_GREEN = "#009e73"
_GREY = "#999999"
"""Okabe and Ito's colors, which differ for color-blind readers too."""

_BARS: dict[str, tuple[str, Sequence[str]]] = {
    "weights, gradients, Adam": (_BLUE, weak_scaling.MODEL_STATE),
    "layer inputs": (_ORANGE, (memory.SAVED_ACTIVATIONS,)),
}
"""Color and categories of memory by label; the rest is drawn last."""

_LABELS = {
    "document": "longer rows, one document",
    "packed": "longer rows, documents of 262,144",
    "groups": "more replicas, rows of 262,144",
}

_Case = dict[str, Any]


def draw(cases: Sequence[_Case], file: pathlib.Path) -> None:
    """Draws the figure. Args: cases: those of a results file."""
    from matplotlib import figure

    series = {
        name: [case for case in cases if case["series"] == name and case["strategy"] and is_auto]
        for name in weak_scaling.SERIES
        for is_auto in [True]
    }
    drawn = figure.Figure(figsize=(11, 3.6), layout="constrained", facecolor="white")
    memory_panel, bytes_panel, mfu_panel = drawn.subplots(1, 3)
    _draw_memory(memory_panel, series["document"])
    _draw_bytes(bytes_panel, series)
    _draw_mfu(mfu_panel, series)
    for panel in (memory_panel, bytes_panel, mfu_panel):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("H100s, in nodes of 8")
        panel.legend(frameon=False, fontsize=8, loc="best")
    drawn.savefig(file, dpi=100)
