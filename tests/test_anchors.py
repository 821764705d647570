"""scripts/bench/anchors.py compares plans, here made up, with published runs."""

import dataclasses
import json
import re

import pytest

from jaxsp.planner.compile import gpus
from scripts.bench import anchors, configs, published_runs
from tests import messages
from tests.planner import example_plans

RUN = dataclasses.replace(
    published_runs.RUNS[0],
    name="a run",
    row_tokens=1000,
    rows_per_step=16,
    num_devices=8,
    measured=(4.0, 10.0),
    unit=published_runs.SECONDS,
    kernel=published_runs.CUDNN,
)

PLAN = example_plans.make_plan(
    num_devices=8, step_s_estimate=5.0, tokens_per_s_estimate=16000 / 5.0
)


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda run: run.name)
def test_a_run_names_its_source_and_fills_its_mesh(run):
    assert re.fullmatch(r"https://(github\.com/[^/]+/[^/]+/\S+|arxiv\.org/abs/\S+)", run.source)
    assert run.checked in (published_runs.READ, published_runs.SECOND_HAND)
    assert run.unit in (published_runs.SECONDS, published_runs.TOKENS_PER_S)
    assert run.kernel in (published_runs.CUDNN, published_runs.FLASH2)
    assert run.note
    assert run.device in gpus.GPUS
    assert run.data * run.seq == run.num_devices
    assert run.rows_per_step % (run.data * run.rows_per_microbatch) == 0


def test_names_are_unique():
    assert len({run.name for run in published_runs.RUNS}) == len(published_runs.RUNS)


def test_a_ratio_is_estimated_over_measured_time():
    anchor = anchors.compare(RUN, PLAN)
    assert anchor.estimate == anchor.estimate_s == 5.0
    assert anchor.measured_s == (4.0, 10.0)
    assert anchor.ratios == (0.5, 1.25)


def test_a_rate_becomes_a_time():
    """16,000 tokens a step on 8 GPUs are 2,000 per GPU: 4 s at 500 tokens/s, 10 s at 200."""
    run = dataclasses.replace(RUN, measured=(200.0, 500.0), unit=published_runs.TOKENS_PER_S)
    anchor = anchors.compare(run, PLAN)
    assert anchor.measured_s == (4.0, 10.0)
    assert anchor.ratios == (0.5, 1.25)
    assert anchor.estimate == pytest.approx(2000 / 5.0)


def test_the_summary_keeps_kernels_apart():
    other = dataclasses.replace(RUN, kernel=published_runs.FLASH2, measured=(20.0,))
    both = [anchors.compare(RUN, PLAN), anchors.compare(other, PLAN)]
    numbers = [re.findall(r"\d+\.\d+", anchors.summarize(group)) for group in (both[:1], both)]
    assert numbers == [["0.800", "2.00"], ["0.800", "2.00", "4.00"]]


def test_the_table_marks_other_kernels_and_plans_that_do_not_fit():
    other = dataclasses.replace(RUN, kernel=published_runs.FLASH2)
    does_not_fit = dataclasses.replace(PLAN, fits=False)
    both = [anchors.compare(RUN, PLAN), anchors.compare(other, does_not_fit)]
    lines = anchors.format_table(both).splitlines()
    assert re.search(messages.containing("4.00", "10.0", "0.500", "1.25", RUN.checked), lines[1])
    assert [published_runs.FLASH2 in line for line in lines[1:3]] == [False, True]
    # one note each, of the same run
    assert lines[-2].endswith(RUN.note)
    assert re.search(messages.containing(RUN.note, "fit"), lines[-1])


FIGURES = [(6455, "6,455"), (364.4, "364"), (15.57, "15.6"), (0.5529, "0.553")]


@pytest.mark.parametrize(("value", "text"), FIGURES)
def test_figures_have_three_digits_or_are_whole(value, text):
    assert anchors.format_figure(value) == text


def test_the_command_writes_every_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(configs, "prepare_to_plan", lambda: None)
    monkeypatch.setattr(anchors, "make_plan", lambda run: PLAN)
    assert anchors.main(["--out", str(tmp_path / "anchors.json")]) == 0
    actual = json.loads((tmp_path / "anchors.json").read_text())
    names = [run.name for run in published_runs.RUNS]
    assert [run["name"] for run in actual["runs"]] == names
    assert [anchor["name"] for anchor in actual["cases"]] == names
    assert actual["summary"] in capsys.readouterr().out
