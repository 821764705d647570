"""Stacked bars of the report, as HTML: memory by cause and time by part. All texts are escaped."""

import html
from collections.abc import Callable, Mapping, Sequence

from jaxsp.core import durations
from jaxsp.reporting.report import facts, tables
from jaxsp.reporting.report.facts import UNKNOWN
from jaxsp.reporting.report.run_files import RunRecord

NUM_PART_COLORS = 8
"""Number of colors of parts of bars in page.css."""

TIME_PARTS = {
    "step": "steps, without waits",
    "data_wait": "data wait",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint wait",
    "compilation": "compilation",
}
"""Labels of the fields of TimeParts."""


def render_memory(runs: Sequence[RunRecord]) -> str:
    """Renders the memory of the compiled steps by cause; empty if no run recorded it."""
    device_bars = []
    host_bars = []
    limits = []
    for run in runs:
        memories = facts.list_memory(run)
        for memory in memories:
            words = [run.name] if len(runs) > 1 else []
            if len(memories) > 1:
                words.append(f"rows of {memory['row_tokens']:,} tokens")
            label = ", ".join(words)
            device_bars.append((label or "Device", memory["device"]))
            limits.append(memory.get("device_available"))
            if memory.get("host"):
                host_bars.append((label or "Host", memory["host"]))
    causes = [cause for _, sizes in device_bars + host_bars for cause in sizes]
    form = facts.format_bytes
    caption = "Device memory by cause"
    text = render_bars(device_bars, form=form, limits=limits, caption=caption, parts=causes)
    if host_bars:
        text += "<h3>Host memory for each device</h3>"
        text += render_bars(host_bars, form=form, caption="Host memory by cause", parts=causes)
    return text


def render_time(runs: Sequence[RunRecord]) -> str:
    """Renders the time of the runs by part; empty if there is none."""
    bars = []
    for run in runs:
        time = facts.measure_time(run)
        parts = {label: getattr(time, field) for field, label in TIME_PARTS.items()}
        if time.total:
            bars.append((run.name if len(runs) > 1 else "Time", parts))
    return render_bars(bars, form=durations.describe, caption="Time by part")


def render_bars(
    bars: Sequence[tuple[str, Mapping[str, float | int]]],
    *,
    form: Callable[[float | int], str],
    caption: str,
    limits: Sequence[float | int | None] = (),
    parts: Sequence[str] = (),
) -> str:
    """Renders stacked bars with a legend, and a table of the same numbers.

    Args: parts: parts in the order of their colors; default: those of the bars.
    """
    if not bars:
        return ""
    names = dict.fromkeys(parts or [name for _, sizes in bars for name in sizes])
    colors = {name: index % NUM_PART_COLORS for index, name in enumerate(names)}
    causes = [name for name in names if any(sizes.get(name) for _, sizes in bars)]
    known_limits = [limit for limit in limits if limit]
    longest = max([*(sum(sizes.values()) for _, sizes in bars), *known_limits]) or 1
    lines = []
    for index, (label, sizes) in enumerate(bars):
        limit = limits[index] if index < len(limits) else None
        lines.append(_render_bar(label, sizes, colors, longest=longest, limit=limit, form=form))
    legend = "".join(
        f'<li><span class="swatch part{colors[cause]}"></span>{html.escape(cause)}</li>'
        for cause in causes
    )
    rows = [
        [
            label,
            *(form(sizes[cause]) if sizes.get(cause) else UNKNOWN for cause in causes),
            form(sum(sizes.values())),
        ]
        for label, sizes in bars
    ]
    table = tables.render_table(["", *causes, "Total"], rows, caption=caption)
    return f'<ul class="legend">{legend}</ul><div class="bars">{"".join(lines)}</div>{table}'


def _render_bar(
    label: str,
    sizes: Mapping[str, float | int],
    colors: Mapping[str, int],
    *,
    longest: float | int,
    limit: float | int | None,
    form: Callable[[float | int], str],
) -> str:
    total = sum(sizes.values())
    segments = ""
    for cause, color in colors.items():
        size = sizes.get(cause, 0)
        if not size:
            continue
        fraction = size / longest
        text = facts.format_percent(size / total) if fraction > 0.12 else ""
        title = html.escape(f"{cause}: {form(size)} ({facts.format_percent(size / total)})")
        segments += (
            f'<span class="part{color}" style="width:{100 * fraction:.3f}%" title="{title}">'
            f"{text}</span>"
        )
    marker = ""
    if limit:
        title = html.escape(f"available: {form(limit)}")
        marker = (
            f'<span class="limit" style="left:{100 * limit / longest:.3f}%" title="{title}"></span>'
        )
    text = f"{form(total)}" + (f" of {form(limit)} available" if limit else "")
    return (
        f'<div class="bar-label"><span>{html.escape(label)}</span><span>{html.escape(text)}</span>'
        f'</div><div class="bar">{segments}{marker}</div>'
    )
