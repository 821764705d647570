"""Plans as text."""

import dataclasses
import re

from jaxsp.planning import fit, report, searches, step_time
from jaxsp.planning.searches import MeshPlan
from tests.messages import assert_names
from tests.planning import example_plans


def test_a_report_has_all_parts_of_a_plan():
    text = report.format_plan(example_plans.make_plan(), model="a model")
    assert_names(
        text, "a model", "8 x h100-80gb", "replica 1 x data 1 x seq 8", "8 rows", "131,072 tokens"
    )
    assert_names(text, "yes", "30.0 of 72.8 GiB", "device memory")
    assert_names(text, "20.00 other temporaries", fit.CAUSES[fit.OTHER])
    assert_names(text, "2.000 0.250 0.125 all-to-all", "2,000 TFLOP", "2,500", "1.25")
    assert_names(
        text, "5 s to 6.5 s", "209,715 tokens/s", "MFU 40 %", step_time.MATMULS, "ESTIMATE"
    )
    assert_names(text, "2.125 attention")
    assert "host" not in labels(text)
    assert "GPU-hours" not in text


def labels(text):
    """Labels in the first column."""
    return re.findall(r"^\w+", text, re.MULTILINE)


def test_a_step_that_does_not_fit_has_the_full_memory_and_suggestions():
    plan = example_plans.make_plan(
        fits=False,
        shortage="much",
        memory_bottleneck="host",
        host_gib=2100.0,
        suggestions=["memory.remat=full", "memory.x=y", "shorter rows"],
    )
    suggestions = "memory.remat=full, memory.x=y or shorter rows"
    sizes = ["30.0 of 72.8 GiB", "2,100 of 1,960 GiB"]
    assert_names(report.format_fit(plan), *sizes, "host memory", suggestions, start="NO")


def cells(text):
    """Rows of a table as dicts by column, and the note below it."""
    head, *rows, note = [
        [cell for cell in re.split(r"  +", line.strip()) if cell] for line in text.splitlines()
    ]
    return [dict(zip(head, row, strict=False)) for row in rows], note[0]


def test_meshes_are_a_table_in_which_refused_ones_have_a_reason():
    mesh = {"replica": 1, "data": 1, "seq": 8}
    of_host = example_plans.make_plan(fits=False, memory_bottleneck="host")
    plans = [
        MeshPlan(mesh=mesh, strategy=strategy, attention_fields={}, plan=plan, problem=problem)
        for strategy, plan, problem in (
            ("ulysses", example_plans.make_plan(), ""),
            ("ring", of_host, ""),
            ("ulysses 4 x ring", None, "28 query heads cannot be shared"),
        )
    ]
    plans = searches.sort_by_rank(plans)
    text = report.format_ranking(plans)
    rows, note = cells(text)
    assert list(rows[0].values()) == [
        *"118",
        "ulysses",
        "yes",
        "30.0",
        "0",
        "save_attention",
        "cudnn",
        "5 s",
        "209,715",
        "40",
        "1",
    ]
    assert rows[1]["fits"] == "no: host"
    assert rows[1]["rank"] == "-"
    assert list(rows[2].values()) == [*"118", "ulysses 4 x ring", "28 query heads cannot be shared"]
    head, first, *_ = text.splitlines()
    assert first.index("yes") + 3 == head.index("fits") + 4, "columns end under their heads"
    assert_names(note, "5 %", "seq")
    plans[1] = dataclasses.replace(plans[1], plan=example_plans.make_plan(rows_per_microbatch=2))
    rows, _ = cells(report.format_ranking(plans))
    assert [row["microbatch rows"] for row in rows[:2]] == ["1", "2"]
