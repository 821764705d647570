"""Plans as text."""

import re

from jaxsp.planning import descriptions, report, step_time
from tests.messages import assert_names
from tests.planning import example_plans


def test_a_report_has_all_parts_of_a_plan():
    text = report.format_plan(example_plans.make_plan(), model="a model")
    assert_names(
        text, "a model", "8 x h100-80gb", "replica 1 x data 1 x seq 8", "8 rows", "131,072 tokens"
    )
    assert_names(text, "yes", "30.0 of 72.8 GiB", "device memory")
    assert_names(text, "20.00 other temporaries", descriptions.CAUSES[descriptions.OTHER])
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
