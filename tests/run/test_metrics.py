"""FLOPs, metrics.jsonl and eval.jsonl, and the heads in the banner."""

import dataclasses
import json
import re

import numpy as np

from jaxsp.model import flops
from jaxsp.run.metrics import MetricsWriter
from jaxsp.system import jsonl
from tests import batches, messages


def set_window(model, window):
    layer = dataclasses.replace(model.layers[0], window=window)
    return dataclasses.replace(model, layers=(layer,) * model.num_layers)


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
    # q, k, v, o and MLP of 3 layers; LM head. The embedding is a lookup
    matrices = 3 * (4 * 4 + 2 * 4 + 2 * 4 + 4 * 4 + 3 * 4 * 6) + 10 * 4
    # segments of 3 and 2 tokens: each token attends to itself and to earlier tokens
    pairs = (1 + 2 + 3) + (1 + 2)
    # scores and weighted values: 2 FLOPs per pair and element of a head each
    forward = 2 * matrices * 5 + 3 * 2 * (2 * 2 * 2) * pairs
    assert flops.step_flops(model, np.array([3, 2])) == 3 * forward

    # with a window of 2, the third token attends only to itself and to the second
    near = set_window(model, 2)
    assert flops.step_flops(near, np.array([3, 2])) == 3 * (forward - 3 * 2 * (2 * 2 * 2))
    assert flops.step_flops(set_window(model, 3), np.array([3, 2])) == 3 * forward


def line(step):
    return {"step": step, "loss": 1.0, "num_tokens_by_source": {"a": 1}}


def read_steps(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path, from_step=0) as writer:
        writer.write("metrics.jsonl", line(1))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1


def test_lines_after_the_step_that_a_run_resumes_from_are_removed(tmp_path):
    with MetricsWriter(tmp_path, from_step=0) as writer:
        for step in (1, 2, 3):
            writer.write("metrics.jsonl", line(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed here
    with MetricsWriter(tmp_path, from_step=2) as writer:
        writer.write("metrics.jsonl", line(3))
    assert read_steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_damaged_lines_are_set_aside_and_printed(tmp_path, capfd):
    deep = b"[" * 100_000
    damaged = [b'\xff\xfe{"step": 2}', b"[3]", b'{"step": "2"}', b'{"loss": 1}', deep, b"{" * 9_999]
    lines = [b'{"step": 1}', *damaged, b'{"step": 2}', b'{"step": 9}', b'{"step": 3, "lo']
    (tmp_path / "eval.jsonl").write_bytes(b"\n".join(lines))
    jsonl.truncate_after(tmp_path / "eval.jsonl", 2)
    assert (tmp_path / "eval.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "eval.jsonl.damaged").read_bytes().splitlines() == damaged
    (output,) = capfd.readouterr().err.splitlines()
    assert re.search(messages.containing(tmp_path / "eval.jsonl", len(damaged)), output)
    jsonl.truncate_after(tmp_path / "eval.jsonl", 2)
    assert capfd.readouterr().err == ""
