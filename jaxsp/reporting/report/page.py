"""The page of a report: one HTML file that needs no network."""

import datetime
import html
import pathlib
from collections.abc import Callable, Sequence

from jaxsp.config import yaml_io
from jaxsp.reporting.report import bars, chart_data, comparison, facts, tables
from jaxsp.reporting.report.downsampling import Groups
from jaxsp.reporting.report.run_files import RunRecord

MAX_TITLE_CHARS = 60
"""Length of names that are listed in the title."""

FOLDER = pathlib.Path(__file__).parent


def render(runs: Sequence[RunRecord], *, is_neutral: Callable[[str], bool]) -> str:
    """Renders the report of one run, or of several side by side.

    Args: is_neutral: True for names of config fields that change what is learned by rounding at
        most.
    """
    names = ", ".join(run.name for run in runs)
    if len(names) > MAX_TITLE_CHARS and len(runs) > 1:
        names = f"{runs[0].name} and {len(runs) - 1} other runs"
    created = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    parts = {
        "title": html.escape(names),
        "subtitle": html.escape(_describe_runs(runs, created)),
        "style": _read("page.css"),
        "summary": _render_summary(runs, is_neutral),
        "notes": _render_notes(runs),
        "sections": _render_sections(runs),
        "data": chart_data.to_script(chart_data.build_data(runs)),
        "script": "".join(map(_read, ("numbers.js", "charts.js", "page.js"))),
    }
    # In one pass, so that {{data}} in a run's name stays as it is
    first, *others = _read("page.html").split("{{")
    page = first
    for part in others:
        name, _, text = part.partition("}}")
        page += parts[name] + text
    return page


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _describe_runs(runs: Sequence[RunRecord], created: str) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs, {created}"
    run = runs[0]
    model = run.get("model", "source") or run.get("model", "config", "model_type")
    words = [facts.describe_status(run), str(model), created] if model else [created]
    return ", ".join(words)


def _render_summary(runs: Sequence[RunRecord], is_neutral: Callable[[str], bool]) -> str:
    if len(runs) == 1:
        return tables.render_tiles(runs[0])
    differences = [comparison.compare_losses(runs[0], run) for run in runs[1:]]
    configs = comparison.compare_configs(runs, is_neutral=is_neutral)
    return "".join(
        [
            f'<p class="finding">{html.escape(comparison.describe_difference(runs))}</p>',
            tables.render_comparison(runs),
            "<h2>Differences of the configs</h2>",
            tables.render_config_differences(configs, runs),
            "<h2>Differences of the losses</h2>",
            tables.render_loss_differences(differences, runs),
        ]
    )


def _render_notes(runs: Sequence[RunRecord]) -> str:
    """Notes about what is left out or estimated."""
    notes = []
    for run, groups in zip(runs, chart_data.choose_groups(runs), strict=True):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        notes += [f"{prefix}{note}" for note in _list_notes(run, groups)]
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


def _list_notes(run: RunRecord, groups: Groups) -> list[str]:
    """Notes about one run, each with a capital letter."""
    notes = []
    if not run.num_lines:
        notes.append("There is no step in metrics.jsonl yet.")
    if not groups.is_exact:
        notes.append(
            f"Each point of a chart stands for up to {groups.lines_per_point:,} of "
            f"{run.num_lines:,} lines of metrics.jsonl. Lines are means, bands reach from the "
            "minimum to the maximum."
        )
    if run.num_damaged:
        lines = "1 line" if run.num_damaged == 1 else f"{run.num_damaged:,} lines"
        notes.append(f"{lines} of the run's files could not be read, and count for nothing.")
    if not run.starts:
        notes.append("Starts and memory by cause are not recorded: an older version wrote the run.")
    if facts.measure_time(run).is_estimate:
        notes.append(
            "Not every step has a line (run.log_every). In times, each line stands for the steps "
            "since the line before it."
        )
    return notes


def _render_sections(runs: Sequence[RunRecord]) -> str:
    """Renders the sections after the charts; those without content are left out."""
    sections = [
        (
            "Memory by cause",
            "Each device's memory in the compiled step. Weights, optimizer state and totals are "
            "exact, gradients and saved activations are formulas, and temporaries are the rest.",
            bars.render_memory(runs),
        ),
        (
            "Time by part",
            "Evaluations include those of jaxsp.eval. Downtime between starts, steps that a "
            "restart repeated, and loading are left out.",
            bars.render_time(runs),
        ),
        ("Sources", "Tokens in the steps that have a line.", tables.render_sources(runs)),
        (
            "Starts",
            "Each time that training began, new or from a checkpoint.",
            f'<div class="records">{tables.render_starts(runs)}</div>'
            if any(run.starts for run in runs)
            else "",
        ),
        ("Configs", "", "".join(map(_render_config, runs))),
    ]
    return "".join(
        f"<section><h2>{title}</h2><p>{html.escape(text)}</p>{content}</section>"
        for title, text, content in sections
        if content
    )


def _render_config(run: RunRecord) -> str:
    text = yaml_io.dump(dict(run.config))
    banner = ""
    if run.banner:
        banner = (
            f"<details><summary>{html.escape(run.name)}: banner.txt</summary>"
            f'<pre tabindex="0">{html.escape(run.banner)}</pre></details>'
        )
    return (
        f"<details><summary>{html.escape(run.name)}: config.yaml</summary>"
        f'<pre tabindex="0">{html.escape(text)}</pre></details>{banner}'
    )
