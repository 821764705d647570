"""The page of a report: one HTML file that needs no network."""

import base64
import datetime
import gzip
from collections.abc import Sequence

import jinja2
from plotly import offline

from jaxsp.config import yaml_io
from jaxsp.reporting.report import charts, facts
from jaxsp.reporting.report.run_files import RunRecord


def render(runs: Sequence[RunRecord], differences: facts.Rows) -> str:
    """Renders the report of one run, or of several side by side, with what their configs differ."""
    loader = jinja2.PackageLoader(__package__, "")
    environment = jinja2.Environment(loader=loader, autoescape=True)
    summaries = [facts.summarize(run) for run in runs]
    names = [run.name for run in runs]
    return environment.get_template("page.html").render(
        names=names,
        created=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        summary=[[label, *(texts[label] for texts in summaries)] for label in summaries[0]],
        findings=[facts.compare_losses(runs[0], run) for run in runs[1:]],
        differences=differences,
        notes=[note for run in runs for note in facts.list_notes(run)],
        charts=charts.build(runs),
        eval_sets=facts.list_results(runs, [run.evals for run in runs]),
        tasks=facts.list_results(runs, [run.tasks for run in runs]),
        start_fields=facts.START_FIELDS,
        memory=facts.list_parts([facts.list_memory(run, "device") for run in runs], "{:.3g}"),
        host_memory=facts.list_parts([facts.list_memory(run, "host") for run in runs], "{:.3g}"),
        times=facts.list_parts([facts.measure_time(run) for run in runs], "{:,.1f}"),
        sources=facts.list_parts([run.source_tokens for run in runs], "{:,.0f}"),
        samples=[(run.name, facts.group_samples(run)) for run in runs if run.samples],
        starts=[
            [run.name, *(facts.describe(start.get(field)) for field in facts.START_FIELDS)]
            for run in runs
            for start in run.starts
        ],
        texts=[(f"{run.name}: config.yaml", yaml_io.dump(dict(run.config))) for run in runs]
        + [(f"{run.name}: banner.txt", run.banner) for run in runs if run.banner],
        plotly=base64.b64encode(gzip.compress(offline.get_plotlyjs().encode(), mtime=0)).decode(),
    )
