"""Plots of plans: memory by cause and estimated time, one bar for each plan."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxsp.core import durations, errors
from jaxsp.core.errors import UserError
from jaxsp.memory import memory_causes
from jaxsp.planner.planning import RESERVED, Plan

_COLORS = {
    memory_causes.WEIGHTS: "#1b3a5c",
    memory_causes.OPTIMIZER: "#2f6690",
    memory_causes.GRADIENTS: "#5b8fb9",
    memory_causes.ACTIVATIONS: "#c8553d",
    memory_causes.WORKSPACE: "#f5dfa5",
    memory_causes.OTHER: "#e08e45",
    RESERVED: "#dddddd",
}
"""Colors: causes that do not grow with the row in blue, the others in warm colors."""

_FORMATS = (".png", ".svg", ".pdf")


def check_output(file: pathlib.Path) -> None:
    """Checks the name of a plot. Raises: UserError for another format, or without matplotlib."""
    if file.suffix not in _FORMATS:
        raise UserError(
            f"--plot = {file}: must be an image file. Use a name that ends with "
            f"{errors.format_choices(_FORMATS)}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"--plot = {file}: plots need matplotlib, which is not installed. "
            "Use pip install matplotlib."
        )


def plot_plans(plans: Mapping[str, Plan], file: pathlib.Path, *, title: str) -> None:
    """Draws device memory, and host memory and time if there are any.

    Args: plans: plans by their labels, from top to bottom.
    """
    from matplotlib import figure

    labels = {
        label if plan.fits else f"{label} (does not fit)": plan for label, plan in plans.items()
    }
    has_host = any(plan.host_gib >= 0.05 for plan in plans.values())
    times = [plan.step_s_estimate or 0.0 for plan in plans.values()]
    num_panels = 1 + has_host + any(times)
    drawn = figure.Figure(
        figsize=(5.5 * num_panels + 3, 2 + 0.3 * len(plans)), layout="constrained"
    )
    panels = drawn.subplots(1, num_panels, squeeze=False, sharey=True)[0]
    last = list(plans.values())[-1]
    _draw_memory(
        panels[0],
        {label: plan.memory for label, plan in labels.items()},
        limit=last.device_limit_gib + last.memory[RESERVED],
        title=f"GiB of each {last.device_type} at its peak",
    )
    if has_host:
        _draw_memory(
            panels[1],
            {label: plan.host_memory for label, plan in labels.items()},
            limit=last.host_limit_gib,
            title="GiB of each node's memory at its peak",
        )
    if any(times):
        bars = panels[-1].barh(list(labels), times, color="#2f6690")
        words = [durations.describe(seconds) if seconds else "no estimate" for seconds in times]
        panels[-1].bar_label(bars, words, padding=3, fontsize=8)
        panels[-1].margins(x=0.2)
        panels[-1].set_xlabel("estimated seconds of a step; nothing was measured")
    panels[0].invert_yaxis()
    handles: dict[str, Any] = {}
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    drawn.legend(handles.values(), handles, loc="outside right center", frameon=False)
    drawn.suptitle(title, fontsize=11)
    drawn.savefig(file, dpi=120)


def _draw_memory(
    panel: Any, memories: Mapping[str, Mapping[str, float]], *, limit: float, title: str
) -> None:
    """Draws bars of stacked causes, and a line at the limit."""
    begins = [0.0] * len(memories)
    for cause, color in _COLORS.items():
        sizes = [sizes.get(cause, 0.0) for sizes in memories.values()]
        if max(sizes) < 0.005:
            continue
        panel.barh(list(memories), sizes, left=begins, color=color, label=cause)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    panel.axvline(limit, color="black", linewidth=1.5)
    # how much plans that do not fit exceed the memory does not matter
    panel.set_xlim(0, min(1.35 * limit, 1.1 * max(limit, *begins)))
    panel.set_xlabel(f"{title}; line: limit")
