"""Plots of plans: memory by category over the row length, and meshes side by side."""

import dataclasses
import importlib.util
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxsp.core import axes, durations, errors
from jaxsp.core.errors import UserError
from jaxsp.planner import search
from jaxsp.planner.compile import memory
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan

_COLORS = {
    memory.WEIGHTS: "#1b3a5c",
    memory.OPTIMIZER: "#2f6690",
    memory.GRADIENTS: "#5b8fb9",
    memory.GATHERED_WEIGHTS: "#a3c4dc",
    memory.SAVED_ACTIVATIONS: "#c8553d",
    memory.ATTENTION: "#e08e45",
    memory.SOFTMAX_STATISTICS: "#f2c078",
    memory.CUDNN_WORKSPACE: "#f5dfa5",
    memory.LAYER_TEMPORARIES: "#588157",
    memory.LOGITS: "#a3b18a",
    memory.OTHER: "#999999",
    memory.RESERVED: "#dddddd",
}
"""Colors: constant categories in blue, attention and saved activations in warm colors."""

_TEXT_BACKGROUND = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
"""Background of text on colored areas."""

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


def plot_lengths(found: Sequence[Plan], file: pathlib.Path, *, title: str) -> None:
    """Draws memory of a device and of a node, by cause, over the row's length.

    Where different programs were compiled for two lengths, memory between them is drawn as a cliff
    and not as a slope.

    Args:   found: plans that differ in row_tokens.
    Raises: UserError if there are fewer than two.
    """
    ordered = sorted(found, key=lambda plan: plan.row_tokens)
    if len(ordered) < 2:
        raise UserError(
            f"--plot = {file}: rows of other lengths cannot be planned, so there is no line to "
            "draw. Leave it out."
        )
    last = ordered[-1]
    has_host = max(plan.host_gib for plan in ordered) >= 0.05
    figure, panels = _make_panels(2 if has_host else 1)
    cliffs = _find_program_changes(ordered)
    _draw_stacked_areas(panels[0], ordered, cliffs, lambda plan: plan.memory)
    whole = last.device_limit_gib + last.memory[memory.RESERVED]
    peak = max(sum(plan.memory.values()) for plan in ordered)
    _draw_limit(panels[0], whole, f"{last.device_type}: {whole:.1f} GiB", peak=peak)
    panels[0].set_ylabel("GiB per device, at its peak")
    if has_host:
        _draw_stacked_areas(panels[1], ordered, cliffs, lambda plan: plan.host_memory)
        room, peak = last.host_limit_gib, max(plan.host_gib for plan in ordered)
        _draw_limit(panels[1], room, f"host: {room:,.0f} GiB", peak=peak)
        panels[1].set_ylabel("GiB of each node's memory, at its peak")
    for panel in panels:
        panel.set_xlim(ordered[0].row_tokens, last.row_tokens)
        panel.set_xlabel("tokens per row")
        panel.xaxis.set_major_formatter(lambda value, _: format_tokens(value))
    _mark_longest(panels, ordered)
    notes = ["Triangles: compiled lengths; between them, memory is interpolated."]
    if cliffs:
        notes[0] += " Dotted lines: the program changes to:"
    notes += _mark_program_changes(panels, cliffs)
    figure.set_figheight(figure.get_figheight() + 0.17 * len(notes))
    figure.supxlabel("\n".join(notes), fontsize=9, color="#444444")
    _save(figure, panels, file, title=title)


def format_tokens(number: float | int) -> str:
    """Formats a number of tokens. Examples: `512`, `131K`, `3.67M`."""
    if number < 1000:
        return f"{number:.3g}"
    if number < 999_500:
        return f"{number / 1e3:.3g}K"
    return f"{number / 1e6:.3g}M"


def describe_changes(before: Plan, after: Plan) -> list[str]:
    """Lists in what the program of a plan differs from that of a shorter row.

    The sizes of tiles are left out, because they follow from the length and change with most rows.
    """
    found = []
    if after.kernel != before.kernel:
        found.append(after.kernel)
    if after.remat != before.remat:
        found.append(f"remat {after.remat}")
    if after.head_chunks != before.head_chunks:
        found.append(f"{after.head_chunks} head chunk{'s' * (after.head_chunks > 1)}")
    for name, tile in (("MLP", "mlp_tile_tokens"), ("loss", "loss_tile_tokens")):
        is_tiled = _is_tiled(after, tile)
        if is_tiled != _is_tiled(before, tile):
            found.append(f"{name} in tiles" if is_tiled else f"no {name} tiles")
    return found


def _is_tiled(plan: Plan, name: str) -> bool:
    """True if a tile is smaller than all tokens of a device."""
    return getattr(plan, name) * plan.mesh[axes.SEQ] < plan.row_tokens * plan.rows_per_microbatch


def _scale_memory(
    plan: Plan, parts: Mapping[str, float], row_tokens: float | int
) -> dict[str, float]:
    """Memory by cause for a row of another length: an estimate for the same program."""
    factor = row_tokens / plan.row_tokens
    constant = (*search.CONSTANT_CATEGORIES, memory.RESERVED)
    return {cause: size if cause in constant else factor * size for cause, size in parts.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ProgramChange:
    """A change of the program between two compiled lengths."""

    before: Plan
    after: Plan
    row_tokens: float
    """Position in the picture."""
    changes: list[str]


def _find_program_changes(ordered: Sequence[Plan]) -> list[_ProgramChange]:
    """Changes of the program, from short rows to long ones.

    Each is drawn where the program of shorter rows would need all of the device, because jaxsp
    chooses another one only if a step does not fit; or in the middle, if that is not between the
    two compiled lengths.
    """
    found = []
    for before, after in itertools.pairwise(ordered):
        words = describe_changes(before, after)
        if not words:
            continue
        constant = sum(_scale_memory(before, before.memory, 0).values())
        growing = sum(before.memory.values()) - constant
        whole = before.device_limit_gib + before.memory[memory.RESERVED]
        place = before.row_tokens * (whole - constant) / growing if growing > 0 else 0.0
        if not before.row_tokens < place < after.row_tokens:
            place = (before.row_tokens + after.row_tokens) / 2
        found.append(_ProgramChange(before=before, after=after, row_tokens=place, changes=words))
    return found


def _mark_program_changes(panels: Sequence[Any], cliffs: Sequence[_ProgramChange]) -> list[str]:
    """Marks and numbers changes of the program. Returns a line about each."""
    notes: list[str] = []
    raised, last_place = False, -math.inf
    for number, cliff in enumerate(cliffs, 1):
        left, right = panels[0].get_xlim()
        # neighbors must not overlap
        raised = not raised and cliff.row_tokens - last_place < 0.03 * (right - left)
        last_place = cliff.row_tokens
        for panel in panels:
            panel.axvline(cliff.row_tokens, color="black", linewidth=0.8, linestyle=":")
            panel.annotate(
                str(number),
                (cliff.row_tokens, 1.0),
                xycoords=panel.get_xaxis_transform(),
                xytext=(0, 13 if raised else 2),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        place = (
            f"{format_tokens(cliff.before.row_tokens)} and {format_tokens(cliff.after.row_tokens)}"
        )
        notes.append(f"{number} (between {place}): {', '.join(cliff.changes)}")
    return notes


def _mark_longest(panels: Sequence[Any], ordered: Sequence[Plan]) -> None:
    """Marks the longest row that fits, if a longer one does not."""
    fitting = [plan.row_tokens for plan in ordered if plan.fits]
    if not fitting or ordered[-1].fits:
        return
    for panel in panels:
        panel.axvline(fitting[-1], color="black", linewidth=1.2, zorder=4)
    panels[0].annotate(
        f"longest: {format_tokens(fitting[-1])}",
        (fitting[-1], 0.06),
        xycoords=panels[0].get_xaxis_transform(),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        bbox=_TEXT_BACKGROUND,
    )


def _draw_limit(panel: Any, gib: float, words: str, *, peak: float) -> None:
    """Draws the memory that there is, and sets the height of the panel."""
    panel.axhline(gib, color="black", linewidth=1.5)
    panel.annotate(
        words,
        (1.0, gib),
        xycoords=panel.get_yaxis_transform(),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        bbox=_TEXT_BACKGROUND,
    )
    # how far rows that do not fit exceed the memory does not matter
    panel.set_ylim(0, min(1.35 * gib, 1.1 * max(gib, peak)))


def plot_meshes(found: Sequence[MeshPlan], file: pathlib.Path, *, title: str) -> None:
    """Memory by cause and expected time of a step on each mesh that can be planned, the best on top."""
    there = [(shape, shape.plan) for shape in reversed(found) if shape.plan is not None]
    if not there:
        raise UserError(
            f"--plot = {file}: no mesh could be planned, so there is nothing to draw. The table has "
            "the reasons."
        )
    figure, panels = _make_panels(2)
    # lines of a mesh differ by their kinds of attention
    names = [
        " x ".join(str(shape.mesh[axis]) for axis in axes.ALL) + f"  {shape.strategy}"
        for shape, _ in there
    ]
    left = [0.0] * len(there)
    for cause in memory.CATEGORIES:
        sizes = [plan.memory.get(cause, 0.0) for _, plan in there]
        if max(sizes) >= 0.005:
            panels[0].barh(names, sizes, left=left, color=_COLORS[cause], label=cause)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    plan = there[0][1]
    panels[0].axvline(
        plan.device_limit_gib + plan.memory[memory.RESERVED], color="black", linewidth=1.5
    )
    panels[0].set_xlabel(
        f"GiB of each {plan.device_type}, when it is fullest; line: all that it has"
    )
    panels[0].set_ylabel("replica x data x seq, attention")
    times = [plan.step_s_estimate or 0.0 for _, plan in there]
    colors = ["#2f6690" if plan.fits else "#cccccc" for _, plan in there]
    bars = panels[1].barh(names, times, color=colors)
    words = [
        durations.describe(plan.step_s_estimate) + " (does not fit)" * (not plan.fits)
        if plan.step_s_estimate
        else "no estimate"
        for _, plan in there
    ]
    panels[1].bar_label(bars, words, padding=3, fontsize=8)
    panels[1].set_xlim(0, 1.35 * max(times, default=1.0) or 1.0)
    panels[1].set_xlabel("seconds of a step, by estimate: nothing was measured")
    _save(figure, panels, file, title=title)


def _make_panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many panels side by side, drawn without a screen."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(6.5 * count + 2.2, 4.8), layout="constrained")
    panels = drawn.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return drawn, list(panels)


def _draw_stacked_areas(
    panel: Any,
    ordered: Sequence[Plan],
    cliffs: Sequence[_ProgramChange],
    memory: Callable[[Plan], Mapping[str, float]],
) -> None:
    """Draws areas by cause, stacked, those that do not grow at the bottom."""
    points = [(float(plan.row_tokens), memory(plan)) for plan in ordered]
    for cliff in cliffs:
        for plan in (cliff.before, cliff.after):
            points.append((cliff.row_tokens, _scale_memory(plan, memory(plan), cliff.row_tokens)))
    points.sort(key=lambda point: point[0])  # stable: the side of shorter rows stays first
    parts = [part for _, part in points]
    shown = [cause for cause in _COLORS if max(part.get(cause, 0.0) for part in parts) >= 0.005]
    heights = [[part.get(cause, 0.0) for part in parts] for cause in shown]
    colors = [_COLORS[cause] for cause in shown]
    panel.stackplot([place for place, _ in points], heights, colors=colors, labels=shown)
    compiled = [plan.row_tokens for plan in ordered]
    height = 0.012
    panel.plot(
        compiled,
        [height] * len(compiled),
        "^",
        color="black",
        markeredgecolor="white",
        markersize=7,
        clip_on=False,
        transform=panel.get_xaxis_transform(),
    )


def _save(figure: Any, panels: list[Any], file: pathlib.Path, *, title: str) -> None:
    entries: dict[str, Any] = {}
    for panel in panels:
        entries |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    names = [cause for cause in _COLORS if cause in entries]
    figure.legend(
        [entries[name] for name in reversed(names)],
        list(reversed(names)),
        loc="outside right center",
        frameon=False,
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=120)
