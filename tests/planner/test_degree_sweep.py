"""Meshes for several row lengths: what is planned, and which choice is the fastest."""

import pytest

from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.planner import degree_report, degree_sweep, planning
from jaxsp.planner.compile import compiled
from jaxsp.planner.data_rows import DataRows, LengthData
from jaxsp.planner.degree_sweep import DegreeSweep
from tests.messages import assert_names
from tests.planner import example_plans, programs

SHORT = 8192
LONG = 65536

FITS = {1: False, 2: True, 4: True, 8: True}
"""True if the longest rows fit, by the number of devices that share a row."""

SECONDS = {
    SHORT: {1: 2.0, 2: 3.0, 4: 6.0, 8: 12.0},
    LONG: {1: 1.0, 2: 10.0, 4: 8.0, 8: 9.0},
}
"""Seconds of a step."""


def make_data(row_tokens):
    """Makes the estimate of data with 90 steps of short rows and 10 of long ones."""
    num_steps = 90 if row_tokens == SHORT else 10
    return example_plans.make_data(
        num_steps=num_steps,
        num_tokens=0.5 * num_steps * 8 * LONG,
        unpacked_steps=4 * num_steps,
        unpacked_tokens=0.5 * num_steps * 8 * LONG,
        unpacked_step_s=SECONDS[row_tokens][2],
    )


@pytest.fixture
def sweep(monkeypatch):
    """Runs a sweep with SECONDS, and returns its results and the configs that were planned."""

    def run(*words, data=None, fits=FITS):
        planned = []

        def plan_step(config, *, model, cluster, document_tokens, data):
            planned.append(config)
            row_tokens = config.data.max_row_tokens
            degree = config.mesh.degree
            if config.mesh.replica > 1:
                raise UserError("batch.rows_per_step = 8: no")
            seconds = SECONDS[row_tokens][degree]
            return example_plans.make_plan(
                mesh={"replica": 1, "data": 8 // degree, "seq": degree},
                row_tokens=row_tokens,
                rows_per_microbatch=config.batch.rows_per_microbatch,
                fits=row_tokens == SHORT or fits[degree],
                step_s_estimate=seconds,
                tokens_per_s_estimate=(0.5 if data else 1.0) * 8 * LONG / seconds,
                data=make_data(row_tokens) if data else None,
            )

        monkeypatch.setattr(planning, "plan_step", plan_step)
        config = programs.settings(
            f"data.row_tokens=[{SHORT}, {LONG}]",
            "batch.rows_per_step=8",
            "attention.strategy=ulysses",
            *words,
        )
        results = DegreeSweep(
            config,
            model=model_config.parse_model_config(programs.LLAMA, field="model.config"),
            cluster=compiled.make_cluster("h100-80gb", 8),
            row_lengths=[SHORT, LONG],
            data=data,
        ).run()
        return results, planned

    return run


def test_shorter_rows_are_planned_only_with_what_fits_the_longest_and_each_step_once(sweep):
    _, planned = sweep()
    keys = [
        (config.data.row_tokens, config.mesh.degree, config.batch.rows_per_microbatch)
        for config in planned
        if config.mesh.replica == 1
    ]
    long = [(LONG, degree, 1) for degree in (8, 4, 2, 1)]
    # 4 devices share the longest rows in the shortest time, and no shorter row has more
    with_fastest = [(SHORT, degree, 2 * degree) for degree in (4, 2, 1)]
    # as many rows as tokens of one of the longest
    with_same = [(SHORT, degree, 8) for degree in (8, 2)]
    assert sorted(keys) == sorted([*long, *with_fastest, *with_same])
    assert len(planned) == len({config.model_dump_json() for config in planned})


def test_meshes_with_more_on_each_device_than_one_that_is_too_small_are_left_out(sweep):
    fits = {8: True, 4: False, 2: True, 1: True}
    _, planned = sweep(fits=fits)
    long = [
        (config.mesh.replica, config.mesh.degree)
        for config in planned
        if config.data.row_tokens == LONG
    ]
    assert long == [(1, 8), (1, 4)], "2 replicas of 4 have more weights on each device"


def test_a_degree_per_length_is_the_fastest_of_each_and_one_degree_fits_all(sweep):
    results, _ = sweep()
    one = degree_sweep.choose_one_degree(results, [SHORT, LONG])
    several = degree_sweep.choose_degrees(results, [SHORT, LONG])
    assert one.degrees == {SHORT: 2, LONG: 2}, "3 + 10 s instead of 6 + 8 and 12 + 9"
    assert several.degrees == {SHORT: 1, LONG: 4}
    step_tokens = 8 * LONG
    assert one.tokens_per_s == pytest.approx(2 * step_tokens / (3 + 10))
    assert several.tokens_per_s == pytest.approx(2 * step_tokens / (2 + 8))
    assert several.length_tokens_per_s == pytest.approx(
        {SHORT: step_tokens / 2, LONG: step_tokens / 8}
    )
    assert several.strategy == "ulysses"
    assert several.unpacked_tokens_per_s is None


def test_data_weights_the_lengths_by_their_steps(sweep):
    rows = {
        row_tokens: LengthData(
            packed=DataRows(
                row_tokens=row_tokens,
                num_rows=8,
                num_steps=1,
                num_tokens=8.0,
                num_segments=8.0,
                steps=(),
            ),
            unpacked=None,
        )
        for row_tokens in (SHORT, LONG)
    }
    results, _ = sweep(data=rows)
    several = degree_sweep.choose_degrees(results, [SHORT, LONG])
    tokens = 100 * 0.5 * 8 * LONG
    assert several.degrees == {SHORT: 1, LONG: 4}
    assert several.tokens_per_s == pytest.approx(tokens / (90 * 2 + 10 * 8))
    assert several.unpacked_tokens_per_s == pytest.approx(tokens / (4 * (90 * 3 + 10 * 10)))


def test_rows_that_fit_nowhere_leave_no_choice(sweep):
    results, _ = sweep(fits=dict.fromkeys(FITS, False))
    assert degree_sweep.choose_one_degree(results, [SHORT, LONG]) is None
    several = degree_sweep.choose_degrees(results, [SHORT, LONG])
    assert several is None
    text = degree_report.format_choices(None, several, config=programs.settings(), data=None)
    assert text.startswith("no mesh")


def test_the_summary_has_the_changes_of_the_config_in_its_own_order(sweep):
    words = [f"data.row_tokens=[{LONG}, {SHORT}]", "attention.strategy=auto"]
    results, _ = sweep(*words)
    config = programs.settings(*words)
    one, several = (
        choose(results, [SHORT, LONG])
        for choose in (degree_sweep.choose_one_degree, degree_sweep.choose_degrees)
    )
    text = degree_report.format_choices(one, several, config=config, data=None)
    assert "mesh.seq='[4, 1]' attention.strategy=ulysses" in text
    assert "mesh.seq=2 attention.strategy=ulysses" in text
    assert_names(text, "equal numbers of tokens", "1.30 times")
    assert "one document per row" not in text
