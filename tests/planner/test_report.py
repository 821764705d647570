"""Plans as text."""

import dataclasses
import re

import pytest

from jaxsp.memory import memory_causes
from jaxsp.planner import report, tables
from jaxsp.planner.cost import roofline
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.search import LongestRow, TriedLength
from tests.messages import assert_names, numbers
from tests.planner import example_plans


def test_a_small_model_has_its_own_unit():
    plan = dataclasses.replace(example_plans.make_plan(), device_gib=0.01)
    assert_names(report.format_fit(plan), "10.2 MiB of 72.8 GiB", start="yes")


def test_a_report_has_all_parts_of_a_plan():
    text = report.format_plan(example_plans.make_plan(), model="a model")
    assert_names(
        text,
        "a model",
        "8 x h100-80gb",
        "replica 1 x data 1 x seq 8",
        "8 rows",
        "131,072 tokens",
    )
    assert_names(text, "yes", "30.0 of 72.8 GiB", "device memory")
    assert_names(text, "20.00 other temporaries", memory_causes.CAUSES[memory_causes.OTHER])
    assert_names(text, "2.000 2.000 1.00 0.250 0.125 all-to-all", "2,000 TFLOP", "2,500", "1.25")
    assert_names(
        text,
        "5 s to 6.5 s",
        "209,715 tokens/s",
        "MFU 40 %",
        roofline.MATMULS,
        "ESTIMATE",
    )
    assert_names(text, "2.125 attention")
    assert "host" not in labels(text)
    assert "GPU-hours" not in text


def labels(text):
    """Labels in the first column."""
    return re.findall(r"^\w+", text, re.MULTILINE)


def test_host_memory_is_listed_by_cause_with_the_size_of_its_pool():
    plan = example_plans.make_plan(
        host_gib=100.0,
        host_pool_gib=128.0,
        host_memory={memory_causes.ACTIVATIONS: 60.0, memory_causes.OPTIMIZER: 40.0},
    )
    text = report.format_plan(plan, model="a model")
    assert "host" in labels(text)
    assert_names(text, "128 60.00 saved activations 40.00 optimizer state")


def test_a_single_row_is_singular_and_a_single_strategy_has_no_alternatives():
    text = report.format_plan(
        example_plans.make_plan(rows_per_step=1, strategy="ring of 8", alternative_bytes={}),
        model="a model",
    )
    assert_names(text, "1 row", "131,072 tokens", "ring of 8", "cuDNN", "2.1 MB")
    assert "3.1 MB" not in text
    assert_names(
        report.format_plan(example_plans.make_plan(), model="a model"),
        "Ulysses of 8",
        "2.1 MB",
        "ring of 8 3.1 MB",
    )


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


def test_a_fallback_from_cudnn_has_its_reason():
    text = report.format_plan(
        example_plans.make_plan(
            kernel="blockwise",
            kernel_title="blockwise",
            fallback_reason="cuDNN needs a newer GPU",
        ),
        model="a model",
    )
    assert_names(text, "blockwise", "cuDNN needs a newer GPU")
    requested = report.format_plan(
        example_plans.make_plan(kernel="blockwise", kernel_title="blockwise"), model="a model"
    )
    assert_names(requested, "Ulysses of 8", "blockwise")
    assert "cuDNN" not in requested


def test_bytes_that_leave_nodes_are_printed_only_if_there_are_any():
    plan = example_plans.make_plan()
    assert "leave each node" not in report.format_plan(plan, model="a model")
    (collective,) = plan.collectives
    plan = example_plans.make_plan(collectives=[dataclasses.replace(collective, node_bytes=3e9)])
    assert "3.000 GB leave each node" in report.format_plan(plan, model="a model")


def test_a_plan_without_an_estimate_has_no_time_and_no_cost():
    plan = example_plans.make_plan(
        step_s_estimate=None, tokens_per_s_estimate=None, mfu_estimate=None
    )
    assert_names(report.format_time(plan), "bfloat16", "cuDNN")
    assert numbers(report.format_time(plan)) == []
    assert "GPU-hours" not in report.format_plan(plan, model="a model", tokens=1e9)


def test_a_short_step_has_no_estimate_because_kernel_launches_are_not_counted():
    plan = example_plans.make_plan(step_s_estimate=0.0002, model_flops=3e8, hardware_flops=6e8)
    text = " ".join(report.format_plan(plan, model="a model", tokens=1e9).split())
    assert "kernel launches" in text
    assert "tokens/s" not in text
    assert "GPU-hours" not in text
    assert "0.0003 TFLOP needed per device and step, 0.0006 executed" in text


def test_tokens_to_train_on_give_gpu_hours_and_days():
    """10e9 tokens at 200,000 per second take 50,000 s: 111 GPU-hours on 8 GPUs, up to 1.3 times
    that."""
    plan = example_plans.make_plan(tokens_per_s_estimate=200_000.0)
    words = ["10,000,000,000 tokens", "111 to 144 GPU-hours", "0.58 to 0.75 days"]
    assert_names(report.format_cost(plan, 10e9), *words)
    little = ["1,000,000 tokens", "0.011 to 0.014 GPU-hours", "5.8e-05 to 7.5e-05 days"]
    assert_names(report.format_cost(plan, 1e6), *little)
    assert_names(report.format_plan(plan, model="a model", tokens=10e9), *words)


@pytest.mark.parametrize(
    "cause",
    [
        roofline.ATTENTION,
        roofline.EXPOSED_COLLECTIVES,
        roofline.EXPOSED_HOST_COPIES,
        roofline.MEMORY_BANDWIDTH,
    ],
)
def test_the_cause_that_takes_most_of_the_time_limits_a_step(cause):
    seconds = {roofline.MATMULS: 1.0, roofline.ATTENTION: 0.5, roofline.EXPOSED_COLLECTIVES: 0.2}
    # overlapped transfers are not part of a step's time
    hidden = {roofline.HIDDEN_COLLECTIVES: 9.0, roofline.HIDDEN_HOST_COPIES: 9.0}
    assert roofline.find_bottleneck(seconds | hidden) == roofline.MATMULS
    assert roofline.find_bottleneck(seconds | hidden | {cause: 1.1}) == cause


def cells(text):
    """Rows of a table as dicts by column, and the note below it."""
    head, *rows, note = [
        [cell for cell in re.split(r"  +", line.strip()) if cell] for line in text.splitlines()
    ]
    return [dict(zip(head, row, strict=False)) for row in rows], note[0]


def test_gpus_and_row_lengths_are_compared_in_one_table():
    plans = [
        example_plans.make_plan(tokens_per_s_estimate=200_000.0),
        example_plans.make_plan(
            row_tokens=65536,
            remat="full",
            mlp_tile_tokens=2048,
            step_s_estimate=250.0,
            time_bottleneck=roofline.EXPOSED_COLLECTIVES,
        ),
        example_plans.make_plan(
            device_type="h200-141gb",
            num_devices=4,
            fits=False,
            memory_bottleneck="host",
            host_gib=2100.0,
            tokens_per_s_estimate=1e5,
        ),
        example_plans.make_plan(
            device_type="a100-80gb",
            step_s_estimate=None,
            tokens_per_s_estimate=None,
            mfu_estimate=None,
            time_bottleneck=None,
        ),
    ]
    rows, note = cells(tables.format_comparison(plans, tokens=10e9))
    assert [row["device"] for row in rows] == ["h100-80gb", "h100-80gb", "h200-141gb", "a100-80gb"]
    assert [row["row tokens"] for row in rows] == ["131,072", "65,536", "131,072", "131,072"]
    assert [row["fits"] for row in rows] == ["yes", "yes", "no: host", "yes"]
    assert [row["device GiB"] for row in rows] == ["30.0 of 72.8"] * 4
    assert [row["host GiB"] for row in rows] == ["0", "0", "2,100", "0"]
    assert [row["remat"] for row in rows] == [
        "save_attention",
        "full",
        "save_attention",
        "save_attention",
    ]
    # 131,072 tokens among 8 devices are 16,384, and 65,536 are 8,192
    assert [row["tile"] for row in rows] == ["-", "2,048", "-", "-"]
    assert [row["step*"] for row in rows] == ["5 s", "4 min 10 s", "5 s", "-"]
    assert [row["limited by*"] for row in rows] == [
        "matrix products",
        "waiting for collectives",
        "matrix products",
        "-",
    ]
    assert [row["GPU-hours*"] for row in rows] == ["111", "106", "111", "-"]
    assert_names(note, "1 to 1.3")
    rows, _ = cells(tables.format_comparison(plans, tokens=None))
    assert "GPU-hours*" not in rows[0]


def test_the_longest_row_is_reported_with_the_limit_of_longer_rows():
    fits = TriedLength(row_tokens=1000, plan=example_plans.make_plan(row_tokens=1000), problem="")
    beyond = TriedLength(
        row_tokens=1010,
        plan=example_plans.make_plan(row_tokens=1010, shortage="x", memory_bottleneck="host"),
        problem="x",
    )
    text = report.format_longest(LongestRow(tried=[fits, beyond]), seconds=12.3)
    parts = ("1,000 tokens", "remat save_attention", "1,010", "host memory", "2 lengths", "12 s")
    assert all(part in text for part in parts)
    none = LongestRow(
        tried=[
            TriedLength(
                row_tokens=1024,
                plan=example_plans.make_plan(suggestions=["memory.a=b"]),
                problem="it is full",
            )
        ]
    )
    assert_names(
        report.format_longest(none, seconds=1.0), "1,024 tokens", "it is full", "memory.a=b"
    )


def test_meshes_are_a_table_in_which_refused_ones_have_a_reason():
    mesh = {"replica": 1, "data": 1, "seq": 8}
    plans = [
        MeshPlan(
            mesh=mesh,
            strategy="ulysses",
            attention_fields={"strategy": "ulysses"},
            plan=example_plans.make_plan(),
            problem="",
        ),
        MeshPlan(
            mesh=mesh,
            strategy="ring",
            attention_fields={"strategy": "ring"},
            plan=example_plans.make_plan(fits=False, memory_bottleneck="host"),
            problem="",
        ),
        MeshPlan(
            mesh=mesh,
            strategy="ulysses 4 x ring",
            attention_fields={"strategy": "ring", "ulysses_degree": 4},
            plan=None,
            problem="28 query heads cannot be shared",
        ),
    ]
    text = tables.format_ranking(plans)
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
    rows, _ = cells(tables.format_ranking(plans))
    assert [row["microbatch rows"] for row in rows[:2]] == ["1", "2"]
