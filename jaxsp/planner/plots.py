"""Plans as pictures: memory by cause over the row's length, and meshes side by side."""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxsp.core import axes, errors
from jaxsp.planner import budget, plans, shapes

_COLORS = {
    budget.WEIGHTS: "#1b3a5c",
    budget.OPTIMIZER: "#2f6690",
    budget.GRADIENTS: "#5b8fb9",
    budget.GATHERS: "#a3c4dc",
    budget.RESIDUALS: "#c8553d",
    budget.ATTENTION: "#e08e45",
    budget.STATISTIC: "#f2c078",
    budget.WORKSPACE: "#f5dfa5",
    budget.LAYER: "#588157",
    budget.LOSS: "#a3b18a",
    budget.OTHER: "#999999",
    budget.RESERVED: "#dddddd",
}
"""What does not grow with the row in blues, attention and what it leaves in warm colours."""

_FORMATS = (".png", ".svg", ".pdf")


def check(file: pathlib.Path) -> None:
    """Raises: UserError where this is no picture's name, or nothing to draw it with is installed."""
    if file.suffix not in _FORMATS:
        raise errors.UserError(f"--plot = {file}: is no picture's name. Use one that ends with {errors.choices(_FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.UserError(
            f"--plot = {file}: pictures are drawn by matplotlib, which is not installed. Use pip install matplotlib."
        )


def lengths(found: Sequence[plans.Plan], file: pathlib.Path, *, title: str) -> None:
    """Memory of a device and of a node, by cause, over the row's length, against what there is.

    Args:   found: plans that differ in row_tokens.
    Raises: UserError where there is but one.
    """
    ordered = sorted(found, key=lambda plan: plan.row_tokens)
    if len(ordered) < 2:
        raise errors.UserError(
            f"--plot = {file}: rows of other lengths cannot be planned, so there is no line to draw. Leave it out."
        )
    last = ordered[-1]
    hosts = max(plan.host_gib for plan in ordered) >= 0.05
    figure, panels = _panels(2 if hosts else 1)
    x = [plan.row_tokens / 1000 for plan in ordered]
    _stacked(panels[0], x, [plan.memory for plan in ordered])
    whole = last.room_gib + last.memory[budget.RESERVED]
    panels[0].axhline(whole, color="black", linewidth=1.5)
    panels[0].annotate(f"{last.device}: {whole:.1f} GiB", (x[0], whole), xytext=(4, 4), textcoords="offset points")
    panels[0].set_ylabel("GiB of each device, when it is fullest")
    # what runs beyond the device is no news
    panels[0].set_ylim(0, min(1.35 * whole, 1.1 * max(whole, *(sum(plan.memory.values()) for plan in ordered))))
    if hosts:
        _stacked(panels[1], x, [plan.host_memory for plan in ordered])
        panels[1].axhline(last.host_room_gib, color="black", linewidth=1.5)
        panels[1].annotate(
            f"host: {last.host_room_gib:,.0f} GiB", (x[0], last.host_room_gib), xytext=(4, 4), textcoords="offset points"
        )
        panels[1].set_ylabel("GiB of each node's memory, when it is fullest")
    for plan, before in zip(ordered[1:], ordered, strict=False):
        if plan.remat != before.remat:
            for panel in panels:
                panel.axvline(plan.row_tokens / 1000, color="black", linewidth=0.7, linestyle=":")
            top = (plan.row_tokens / 1000, panels[0].get_ylim()[1])
            panels[0].annotate(f"remat {plan.remat}", top, xytext=(3, -8), textcoords="offset points", fontsize=8)
    for panel in panels:
        panel.set_xlabel("tokens of a row, thousands")
        panel.set_xlim(x[0], x[-1])
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _save(figure, panels, file, title=title)


def meshes(found: Sequence[shapes.Shape], file: pathlib.Path, *, title: str) -> None:
    """Memory by cause and expected time of a step on each mesh that can be planned, the best on top."""
    there = [(shape, shape.plan) for shape in reversed(found) if shape.plan is not None]
    if not there:
        raise errors.UserError(
            f"--plot = {file}: no mesh could be planned, so there is nothing to draw. Read why in the table."
        )
    figure, panels = _panels(2)
    # lines of a mesh differ by their kinds of attention
    names = [" x ".join(str(shape.mesh[axis]) for axis in axes.ALL) + f"  {shapes.name(shape.kind)}" for shape, _ in there]
    left = [0.0] * len(there)
    for cause in budget.CAUSES:
        sizes = [plan.memory.get(cause, 0.0) for _, plan in there]
        if max(sizes) >= 0.005:
            panels[0].barh(names, sizes, left=left, color=_COLORS[cause], label=cause)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    plan = there[0][1]
    panels[0].axvline(plan.room_gib + plan.memory[budget.RESERVED], color="black", linewidth=1.5)
    panels[0].set_xlabel(f"GiB of each {plan.device}, when it is fullest; line: all that it has")
    panels[0].set_ylabel("replica x data x seq, attention")
    times = [plan.step_s_estimate or 0.0 for _, plan in there]
    colors = ["#2f6690" if plan.fits else "#cccccc" for _, plan in there]
    bars = panels[1].barh(names, times, color=colors)
    words = [
        f"{plan.step_s_estimate:.3g} s" + " (does not fit)" * (not plan.fits) if plan.step_s_estimate else "no estimate"
        for _, plan in there
    ]
    panels[1].bar_label(bars, words, padding=3, fontsize=8)
    panels[1].set_xlim(0, 1.35 * max(times, default=1.0) or 1.0)
    panels[1].set_xlabel("seconds of a step, by estimate: nothing was measured")
    _save(figure, panels, file, title=title)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many panels side by side, drawn without a screen."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(6.5 * count + 2.2, 4.8), layout="constrained")
    panels = drawn.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return drawn, list(panels)


def _stacked(panel: Any, x: list[float], parts: Sequence[Any]) -> None:
    """Areas by cause, one upon another, those that do not grow at the bottom."""
    shown = [cause for cause in _COLORS if max(part.get(cause, 0.0) for part in parts) >= 0.005]
    heights = [[part.get(cause, 0.0) for part in parts] for cause in shown]
    panel.stackplot(x, heights, colors=[_COLORS[cause] for cause in shown], labels=shown)
    panel.plot(x, [0.0] * len(x), "|", color="black", clip_on=False, markersize=8)  # where it was compiled


def _save(figure: Any, panels: list[Any], file: pathlib.Path, *, title: str) -> None:
    entries: dict[str, Any] = {}
    for panel in panels:
        entries |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    names = [cause for cause in _COLORS if cause in entries]
    figure.legend([entries[name] for name in reversed(names)], list(reversed(names)), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=120)
