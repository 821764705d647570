"""FLOPs by hand, and what the banner says of heads."""

import dataclasses
import json
import re

import numpy as np
import pytest

from jaxsp import attention
from jaxsp.attention import AttentionChoice
from jaxsp.attention.strategies import Strategy
from jaxsp.model import flops
from jaxsp.reporting.metrics import MetricsLine, MetricsWriter
from jaxsp.runtime import jsonl
from tests import batches, messages


def test_flops_are_those_counted_by_hand():
    model = batches.model(
        vocab_size=10,
        hidden_size=4,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=6,
    )
    matrices = (
        3 * (4 * 4 + 2 * 4 + 2 * 4 + 4 * 4 + 3 * 4 * 6) + 10 * 4
    )  # q, k, v, o, MLP; head, the embedding is looked up
    pairs = (1 + 2 + 3) + (
        1 + 2
    )  # pieces of 3 and 2 tokens: each token sees itself and those before
    forward = (
        2 * matrices * 5 + 3 * 2 * (2 * 2 * 2) * pairs
    )  # scores and their sum, 2 per element of a head
    assert flops.step_flops(model, np.array([3, 2])) == 3 * forward

    # with a window of 2, the third token sees itself and the second alone
    near = dataclasses.replace(model, sliding_window=2)
    assert flops.step_flops(near, np.array([3, 2])) == 3 * (forward - 3 * 2 * (2 * 2 * 2))
    assert (
        flops.step_flops(dataclasses.replace(model, sliding_window=3), np.array([3, 2]))
        == 3 * forward
    )


def test_a_device_that_is_known_has_a_peak():
    assert flops.peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert flops.peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert flops.peak_tflops("cpu") is None


def line(step):
    fields = {
        name: 1.0 if "float" in str(kind) else 1
        for name, kind in MetricsLine.__annotations__.items()
    }
    return MetricsLine(**fields | {"step": step, "num_tokens_by_source": {"a": 1}})


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path, from_step=0, tensorboard=False) as writer:
        writer.write_step(line(1))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["num_tokens_total"] == 1


def test_lines_after_the_step_that_a_run_goes_on_from_are_dropped(tmp_path):
    with MetricsWriter(tmp_path, from_step=0, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write_step(line(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed here
    with MetricsWriter(tmp_path, from_step=2, tensorboard=False) as writer:
        writer.write_step(line(3))
    assert [
        json.loads(found)["step"] for found in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


def test_whatever_a_disk_has_made_of_lines_they_are_dropped(tmp_path):
    torn = b'{"step": 1}\n\xff\xfe{"step": 2}\n[3]\n{"step": "2"}\n{"loss": 1}\n{"step": 2}\n{"step": 2'
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    jsonl.truncate_after(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_result_behind_a_line_that_was_cut_short_is_a_line_of_its_own(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    jsonl.append_record(tmp_path / "eval.jsonl", line(3))
    jsonl.append_record(tmp_path / "eval.jsonl", line(4))
    with MetricsWriter(tmp_path, from_step=3, tensorboard=False):
        pass
    assert [
        json.loads(found)["step"] for found in (tmp_path / "eval.jsonl").read_text().splitlines()
    ] == [1, 3]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "seq", "heads"),
    [
        (32, 8, 4, [8, 32, 2, 8]),
        (32, 8, 16, [2, 32, 1, 8]),
        (24, 6, 4, [6, 24, 3, 6]),  # 6 is repeated to 12, the least that 4 divides
        (32, 8, 1, []),  # all heads on each device
    ],
)
def test_the_banner_counts_the_heads_that_a_device_gets(num_heads, num_kv_heads, seq, heads):
    kind = Strategy(seq=seq, ulysses_degree=seq)
    nothing = {
        "fallback_reason": "",
        "workspace_bytes": 0,
        "lse_bytes": 0,
        "window": None,
        "sent_bytes": 0,
        "alternatives": (),
    }
    choice = AttentionChoice(
        strategy=kind, kernel="blockwise", head_chunks=1, capacity_factor=4, **nothing
    )
    said = attention.describe(choice, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert re.search(messages.holding(*heads), said)
    assert bool(re.search(r"\d", said)) == bool(heads)
