"""Tables and bars of the report, as HTML. All texts are escaped."""

import html
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxsp.core import durations
from jaxsp.reporting.report import facts
from jaxsp.reporting.report.comparison import ConfigDifference, LossDifference
from jaxsp.reporting.report.facts import UNKNOWN
from jaxsp.reporting.report.run_files import RunRecord

MAX_SHORT_CHARS = 40
"""Length of texts that stay on one line in a table of records."""


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, has_numbers: bool = True
) -> str:
    """Renders a table whose first column names the row.

    Args: has_numbers: all other columns are short, and aligned to the right.
    """
    head = "".join(
        f'<th scope="col"{_cell_class(text, has_numbers and index > 0)}>{html.escape(text)}</th>'
        for index, text in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + f'<th scope="row">{_escape_name(row[0])}</th>'
        + "".join(
            f"<td{_cell_class(text, has_numbers and index > 0)}>{html.escape(text)}</td>"
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


def _cell_class(text: str, is_number: bool) -> str:
    """Attribute of a cell."""
    if is_number:
        return ' class="number"'
    return ' class="long"' if len(text) > MAX_SHORT_CHARS else ""


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Renders the table of the runs' summaries, one column for each run."""
    summaries = [facts.summarize(run) for run in runs]
    rows = [[label, *(summary[label] for summary in summaries)] for label in summaries[0]]
    header = ["", *(run.name for run in runs)]
    return render_table(header, rows, caption="Summary of the runs", has_numbers=False)


TILES = (
    facts.MEAN_LOSS,
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
        f'<div class="tile"><dt>{html.escape(label)}</dt>'
        f"<dd>{_emphasize(summary[label])}</dd></div>"
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
        has_numbers=False,
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


def render_sources(runs: Sequence[RunRecord]) -> str:
    """Renders the tokens of each source; empty if no run has recorded any."""
    names = list(dict.fromkeys(name for run in runs for name in run.source_tokens))
    if not names:
        return ""
    header = ["Source"]
    columns = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        sums = {name: float(np.nansum(tokens)) for name, tokens in run.source_tokens.items()}
        total = sum(sums.values()) or 1.0
        fractions = {name: tokens / total for name, tokens in sums.items()}
        weights = _find_weights(run)
        header += [f"{prefix}tokens", f"{prefix}fraction"] if prefix else ["Tokens", "Fraction"]
        columns += [_format_column(sums, "{:,.0f}"), _format_column(fractions, "{:.1%}")]
        if weights:
            header.append(f"{prefix}weight" if prefix else "Weight")
            columns.append(_format_column(weights, "{:g}"))
    rows = [[name, *(column.get(name, UNKNOWN) for column in columns)] for name in names]
    return render_table(header, rows, caption="Tokens by source")


def _format_column(numbers: Mapping[str, float | int], form: str) -> dict[str, str]:
    return {name: form.format(number).replace("%", " %") for name, number in numbers.items()}


def _find_weights(run: RunRecord) -> dict[str, float | int]:
    """Weights of the config's sources, by name; empty if they have none."""
    sources = run.get("data", "train")
    return {
        str(source.get("name") or source.get("source")): source["weight"]
        for source in (sources if isinstance(sources, list) else ())
        if isinstance(source, dict) and isinstance(source.get("weight"), int | float)
    }


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
                    " x ".join(map(str, (start.get("mesh") or {}).values())),
                    f"{start.get('num_devices')} x {start.get('device_kind')}",
                    "; ".join(map(str, start.get("config_changes") or ())) or "none",
                    _seconds(start.get("compile_s")),
                    str(start.get("host", UNKNOWN)),
                    f"{start.get('jaxsp_version') or UNKNOWN}, {start.get('jax_version')}",
                    str(start.get("checkpoint") or UNKNOWN),
                ]
            )
    header = "Start|Time|From step|Mesh|Devices|Changes|Compilation|Host|jaxsp, jax|Checkpoint"
    return render_table(header.split("|"), rows, caption="Starts of the runs", has_numbers=False)


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
