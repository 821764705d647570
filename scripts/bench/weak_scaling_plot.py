"""Draws the results of scripts/bench/weak_scaling.py: memory, bytes sent and estimated MFU.

    python -m scripts.bench.weak_scaling_plot RESULTS.json FILE.png

Needs matplotlib.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.memory import memory_causes
from scripts.bench import weak_scaling

BLUE = "#0072b2"
ORANGE = "#e69f00"
VERMILION = "#d55e00"
GREEN = "#009e73"
GREY = "#bbbbbb"
"""Okabe and Ito's colors, which differ for color-blind readers too."""

Cases = Mapping[str, Sequence[Mapping[str, Any]]]
"""Cases with the strategy that `auto` chose, by their series."""


def draw(cases: Sequence[Mapping[str, Any]], file: pathlib.Path) -> None:
    """Draws the figure. Args: cases: those of a results file."""
    from matplotlib import figure

    series = {
        name: [
            case
            for case in cases
            if case["series"] == name and case["requested_strategy"] == "auto"
        ]
        for name in weak_scaling.SERIES
    }
    drawn = figure.Figure(figsize=(11, 3.7), layout="constrained", facecolor="white")
    panels = drawn.subplots(1, 3)
    for panel, draw_panel in zip(panels, (_draw_memory, _draw_bytes, _draw_mfu), strict=True):
        draw_panel(panel, series)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xticks(
            range(len(weak_scaling.DEVICES)), map(str, weak_scaling.DEVICES), fontsize=9
        )
        panel.set_xlabel("H100s, in nodes of 8")
        panel.title.set_fontsize(10)
    drawn.savefig(file, dpi=100, pil_kwargs={"optimize": True})


def _draw_memory(panel: Any, series: Cases) -> None:
    """Draws bars of memory: sharded model state, layer inputs, and the rest."""
    cases = series["document"]
    inputs = [case["memory"][memory_causes.ACTIVATIONS] for case in cases]
    state = [case["state_gib"] for case in cases]
    rest = [case["device_gib"] - a - b for case, a, b in zip(cases, inputs, state, strict=True)]
    bottoms = [0.0] * len(cases)
    for sizes, color, label in (
        (inputs, BLUE, "layer inputs"),
        (rest, ORANGE, "attention, MLP, loss"),
        (state, GREY, "weights, gradients, Adam"),
    ):
        panel.bar(range(len(cases)), sizes, bottom=bottoms, color=color, label=label, width=0.7)
        bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]
    panel.axvline(2.5, color="black", linewidth=0.8, linestyle=":")
    panel.text(2.4, 36.2, "Ulysses", ha="right", fontsize=8)
    panel.text(2.6, 36.2, "Ulysses of 8 x ring", ha="left", fontsize=8)
    panel.set_ylim(0, 38)
    panel.set_ylabel("GiB per H100, of 79")
    panel.set_title("memory, one row on all devices")
    panel.legend(
        framealpha=1, edgecolor="white", fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.93)
    )


def _draw_bytes(panel: Any, series: Cases) -> None:
    """Draws the bytes that a device sends in a step, inside its node and to other nodes."""
    for name, label, color in (
        ("document", "one row", VERMILION),
        ("groups", "replicas", GREEN),
    ):
        cases = series[name]
        sent = [sum(sent["bytes"] for sent in case["collectives"]) for case in cases]
        away = [
            sum(sent["node_bytes"] for sent in case["collectives"]) / weak_scaling.NODE_DEVICES
            for case in cases
        ]
        inside = [(a - b) / 1e9 for a, b in zip(sent, away, strict=True)]
        panel.plot(inside, "--o", color=color, markersize=4, label=f"{label}: inside nodes")
        # one node has no other nodes
        places = range(1, len(cases))
        panel.plot(
            places,
            [size / 1e9 for size in away[1:]],
            "-s",
            color=color,
            markersize=4,
            label=f"{label}: between nodes",
        )
    panel.set_yscale("log")
    panel.set_ylim(1, 10000)
    panel.set_yticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
    panel.set_ylabel("GB sent per H100 and step")
    panel.set_title("communication")
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_mfu(panel: Any, series: Cases) -> None:
    """Draws the estimated MFU."""
    for name, label, color, style in (
        ("groups", "replicas, rows of 262,144", GREEN, "-^"),
        ("document", "one row, one document", VERMILION, "-o"),
        ("packed", "one row, documents of 262,144", BLUE, "-s"),
    ):
        percents = [100 * case["mfu"] for case in series[name]]
        panel.plot(percents, style, color=color, markersize=4, label=label)
    panel.set_ylim(0, 60)
    panel.set_ylabel("estimated MFU, %")
    panel.set_title("speed, estimated")
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    results, file = map(pathlib.Path, arguments)
    draw(json.loads(results.read_text(encoding="utf-8"))["cases"], file)


if __name__ == "__main__":
    main(sys.argv[1:])
