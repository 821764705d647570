"""Tables and bars of the report, as HTML. All texts are escaped."""

import html
import re
from collections.abc import Callable, Mapping, Sequence

from jaxsp.core import durations
from jaxsp.reporting.report import facts
from jaxsp.reporting.report.comparison import ConfigDifference, LossDifference
from jaxsp.reporting.report.facts import UNKNOWN
from jaxsp.reporting.report.run_files import RunRecord

TIME_PARTS = {
    "step": "steps, without waits",
    "data_wait": "data wait",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint wait",
    "compilation": "compilation",
}
"""Labels of the fields of TimeParts."""


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, numbers_from: int = 1
) -> str:
    """Renders a table whose first column names the row.

    Args: numbers_from: index of the first column that is aligned to the right.
    """
    head = "".join(
        f'<th scope="col"{_align(index, numbers_from)}>{html.escape(text)}</th>'
        for index, text in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + f'<th scope="row">{_escape_name(row[0])}</th>'
        + "".join(
            f"<td{_align(index, numbers_from)}>{html.escape(text)}</td>"
            for index, text in enumerate(row[1:], 1)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f'<table><caption class="hidden">{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _escape_name(name: str) -> str:
    """Name of a row, which may be broken after dots and underscores."""
    return re.sub("([._/])", r"\1<wbr>", html.escape(name))


def _align(index: int, numbers_from: int) -> str:
    return ' class="number"' if index >= numbers_from else ""


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Renders the table of the runs' summaries, one column for each run."""
    summaries = [facts.summarize(run) for run in runs]
    rows = [[label, *(summary[label] for summary in summaries)] for label in summaries[0]]
    header = ["", *(run.name for run in runs)]
    return render_table(header, rows, caption="Summary of the runs", numbers_from=99)


TILES = (
    "Final loss",
    "Best evaluation",
    "Median tokens/s",
    "Median MFU",
    "Mean padding",
    "Mean attention imbalance",
    "Peak memory per device",
    "Time",
)
"""Rows of the summary that a report of one run shows as tiles."""


def render_tiles(run: RunRecord) -> str:
    """Renders the summary of one run: the most important numbers as tiles."""
    summary = facts.summarize(run)
    tiles = "".join(
        f'<div class="tile"><dt>{html.escape(label)}</dt><dd>{_emphasize(summary[label])}</dd></div>'
        for label in TILES
        if summary[label] != UNKNOWN
    )
    others = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(text)}</dd></div>"
        for label, text in summary.items()
        if label not in TILES
    )
    return f'<dl class="tiles">{tiles}</dl><dl class="facts">{others}</dl>'


def _emphasize(text: str) -> str:
    """Text of a tile: the number is large, and what follows it is small."""
    if text[:1].isdigit() and text.endswith((" s", " min", " h")):
        return f"<b>{html.escape(text)}</b>"
    first, *others = text.split("; ")
    words = first.split(" ")
    index = next((i for i, word in enumerate(words) if word[:1].isdigit()), None)
    if index is None:
        return html.escape(text)
    end = index + 1
    if words[end : end + 1] and words[end] in ("%", "KiB", "MiB", "GiB", "M", "B", "T"):
        end += 1
    before = html.escape(" ".join(words[:index]))
    number = html.escape(" ".join(words[index:end]))
    after = html.escape("; ".join([" ".join(words[end:]), *others]).strip())
    return f"<small>{before}</small> <b>{number}</b> <small>{after}</small>"


def render_config_differences(
    differences: Sequence[ConfigDifference], runs: Sequence[RunRecord]
) -> str:
    """Renders the config fields that differ between runs."""
    if not differences:
        return "<p>The configs are equal, except for the run directory.</p>"
    changing = [difference.field for difference in differences if not difference.is_neutral]
    if changing:
        note = (
            f"{_count(len(changing), 'field')} below change what is learned, so different losses "
            "are expected. They come first, in bold."
        )
        if len(changing) == 1:
            note = "The field in bold changes what is learned: different losses are expected."
    else:
        note = "None of these fields changes what is learned, except for rounding."
    rows = [
        [difference.field, *(value or UNKNOWN for value in difference.values)]
        for difference in differences
    ]
    table = render_table(
        ["Field", *(run.name for run in runs)],
        rows,
        caption="Config fields that differ",
        numbers_from=99,
    )
    for field in changing:
        name = _escape_name(field)
        cell = f'<th scope="row">{name}</th>'
        bold = f'<th scope="row"><strong>{name}</strong></th>'
        table = table.replace(cell, bold, 1)
    return f"<p>{html.escape(note)}</p>{table}"


def render_loss_differences(
    differences: Sequence[LossDifference | None], runs: Sequence[RunRecord]
) -> str:
    """Renders the differences between the losses of the first run and of each other run."""
    rows = []
    for run, difference in zip(runs[1:], differences, strict=True):
        if difference is None:
            rows.append([run.name, "0", *[UNKNOWN] * 4])
            continue
        counts = "equal"
        if difference.num_unequal_counts:
            counts = f"differ in {_count(difference.num_unequal_counts, 'step')}"
        rows.append(
            [
                run.name,
                f"{difference.num_steps:,}",
                facts.format_small(difference.max_difference),
                facts.format_small(difference.max_relative),
                f"{difference.max_step:,}",
                counts,
            ]
        )
    return render_table(
        [
            f"Compared with {runs[0].name}",
            "Common steps",
            "Largest difference",
            "Relative",
            "At step",
            "Rows, tokens, loss tokens",
        ],
        rows,
        caption="Differences of the losses",
    )


def render_memory(runs: Sequence[RunRecord]) -> str:
    """Renders the memory of the compiled steps by cause; empty if no run recorded it."""
    bars = []
    for run in runs:
        memories = facts.list_memory(run)
        for memory in memories:
            label = run.name if len(runs) > 1 else "Device"
            if len(memories) > 1:
                label += f", rows of {memory['row_tokens']:,}"
            bars.append((label, memory["device"], memory.get("device_available")))
            if memory.get("host"):
                host_label = f"{label}: host" if len(runs) > 1 else "Host"
                bars.append((host_label, memory["host"], None))
    return render_bars(
        [(label, sizes) for label, sizes, _ in bars],
        form=facts.format_bytes,
        limits=[limit for _, _, limit in bars],
        caption="Memory by cause",
    )


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
    bars: Sequence[tuple[str, Mapping[str, float]]],
    *,
    form: Callable[[float], str],
    caption: str,
    limits: Sequence[float | None] = (),
) -> str:
    """Renders stacked bars with a legend, and a table of the same numbers."""
    if not bars:
        return ""
    causes = list(dict.fromkeys(cause for _, sizes in bars for cause in sizes))
    causes = [cause for cause in causes if any(sizes.get(cause) for _, sizes in bars)]
    known_limits = [limit for limit in limits if limit]
    longest = max([*(sum(sizes.values()) for _, sizes in bars), *known_limits]) or 1
    lines = []
    for index, (label, sizes) in enumerate(bars):
        limit = limits[index] if index < len(limits) else None
        lines.append(_render_bar(label, sizes, causes, longest=longest, limit=limit, form=form))
    legend = "".join(
        f'<li><span class="swatch part{index % 8}"></span>{html.escape(cause)}</li>'
        for index, cause in enumerate(causes)
    )
    rows = [
        [
            label,
            *(form(sizes[cause]) if sizes.get(cause) else UNKNOWN for cause in causes),
            form(sum(sizes.values())),
        ]
        for label, sizes in bars
    ]
    table = render_table(["", *causes, "Total"], rows, caption=caption)
    return f'<ul class="legend">{legend}</ul><div class="bars">{"".join(lines)}</div>{table}'


def _render_bar(
    label: str,
    sizes: Mapping[str, float],
    causes: Sequence[str],
    *,
    longest: float,
    limit: float | None,
    form: Callable[[float], str],
) -> str:
    total = sum(sizes.values())
    segments = ""
    for index, cause in enumerate(causes):
        size = sizes.get(cause, 0)
        if not size:
            continue
        fraction = size / longest
        text = facts.format_percent(size / total) if fraction > 0.12 else ""
        title = html.escape(f"{cause}: {form(size)} ({facts.format_percent(size / total)})")
        segments += (
            f'<span class="part{index % 8}" style="width:{100 * fraction:.3f}%" title="{title}">'
            f"{text}</span>"
        )
    marker = ""
    if limit:
        title = html.escape(f"available: {form(limit)}")
        marker = f'<span class="limit" style="left:{100 * limit / longest:.3f}%" title="{title}"></span>'
    text = f"{form(total)}" + (f" of {form(limit)} available" if limit else "")
    return (
        f'<div class="bar-label"><span>{html.escape(label)}</span><span>{html.escape(text)}</span>'
        f'</div><div class="bar">{segments}{marker}</div>'
    )


def render_sources(runs: Sequence[RunRecord]) -> str:
    """Renders the tokens of each source; empty if no run has recorded any."""
    names = list(dict.fromkeys(name for run in runs for name in run.source_tokens))
    if not names:
        return ""
    header = ["Source"]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        header += [f"{prefix}tokens", f"{prefix}share"]
    totals = [
        {name: float(tokens[tokens > 0].sum()) for name, tokens in run.source_tokens.items()}
        for run in runs
    ]
    rows = []
    for name in names:
        row = [name]
        for by_source in totals:
            all_tokens = sum(by_source.values())
            tokens = by_source.get(name)
            row += [
                UNKNOWN if tokens is None else f"{tokens:,.0f}",
                UNKNOWN if not tokens else facts.format_percent(tokens / all_tokens),
            ]
        rows.append(row)
    return render_table(header, rows, caption="Tokens by source")


def render_starts(runs: Sequence[RunRecord]) -> str:
    """Renders the starts of the runs."""
    rows = []
    for run in runs:
        for number, start in enumerate(run.starts, 1):
            rows.append(
                [
                    f"{run.name}, start {number}" if len(runs) > 1 else f"Start {number}",
                    str(start.get("time", UNKNOWN)).replace("T", " "),
                    _describe_from_step(start),
                    f"{start.get('num_devices')} × {start.get('device_kind')}",
                    " × ".join(map(str, (start.get("mesh") or {}).values())),
                    str(start.get("host", UNKNOWN)),
                    f"{start.get('jaxsp_version') or UNKNOWN}, {start.get('jax_version')}",
                    _seconds(start.get("compile_s")),
                    "; ".join(map(str, start.get("config_changes") or ())) or "none",
                    str(start.get("checkpoint") or UNKNOWN),
                ]
            )
    header = "Start|Time|From step|Devices|Mesh|Host|jaxsp, jax|Compilation|Changes|Checkpoint"
    return render_table(
        header.split("|"), rows, caption="Starts of the runs", numbers_from=99
    )


def _describe_from_step(start: Mapping[str, object]) -> str:
    step = start.get("from_step")
    previous = start.get("previous_step")
    if not isinstance(step, int):
        return UNKNOWN
    if isinstance(previous, int) and previous > step:
        return f"{step:,} ({_count(previous - step, 'step')} repeated)"
    return f"{step:,}"


def _seconds(value: object) -> str:
    return durations.describe(value) if isinstance(value, int | float) else UNKNOWN


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
