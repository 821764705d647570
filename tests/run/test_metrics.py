"""FLOPs, metrics.jsonl and eval.jsonl, and the heads in the banner."""

import dataclasses
import errno
import io
import json
import os
import re
import threading

import numpy as np
import pytest

from jaxsp.model import flops
from jaxsp.run.metrics import MetricsWriter
from jaxsp.system import jsonl
from jaxsp.system.jsonl import AppendFile
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


def test_lines_after_the_step_that_a_run_resumes_from_are_removed(tmp_path):
    with MetricsWriter(tmp_path, from_step=0) as writer:
        for step in (1, 2, 3):
            writer.write("metrics.jsonl", line(step))
            assert read_steps(tmp_path / "metrics.jsonl")[-1] == step, "it can be read at once"
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


@pytest.mark.parametrize(
    ("damage", "kept", "message"),
    [
        (lambda text: text, [1, 2, 3, 4, 5, 6], ""),
        (lambda text: text.replace(b'{"step": 3', b'{"stes": 3'), [1, 2, 4, 5, 6], "1 of 6 "),
        (
            lambda text: text.replace(b'0}\n{"step": 3', b'0}{"step": 3'),
            [1, 4, 5, 6],
            "1 of 5 ",
        ),
        (lambda text: text.replace(b'{"', b"{", 1), [2, 3, 4, 5, 6], "1 of 6 "),
        (lambda text: text[: text.index(b'"step": 4') + 12], [1, 2, 3], "1 of 4 .*\n.*step 3"),
        (lambda text: text[: text.index(b'{"step": 4')], [1, 2, 3], "ends at step 3"),
        (lambda text: text + b'{"step": 70, "los', [1, 2, 3, 4, 5, 6], ""),
    ],
)
def test_damaged_and_missing_lines_of_metrics_are_named(tmp_path, capfd, damage, kept, message):
    text = b"".join(b'{"step": %d, "loss": 0}\n' % step for step in range(1, 7))
    # of every tenth step
    text = re.sub(rb'"step": (\d),', rb'"step": \g<1>0,', damage(text))
    kept = [10 * step for step in kept]
    (tmp_path / "metrics.jsonl").write_bytes(text)
    with MetricsWriter(tmp_path, from_step=65):
        pass
    assert read_steps(tmp_path / "metrics.jsonl") == kept
    output = capfd.readouterr().err
    assert re.search(message, output)
    assert bool(message) == bool(output)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_disk_that_fails_for_a_moment_costs_no_line(tmp_path, monkeypatch, capfd, can_truncate):
    number = errno.ESTALE
    is_failing = []

    class FailingFile(io.FileIO):
        def write(self, data):
            if is_failing:
                super().write(data[:3])
                raise OSError(number, os.strerror(number))
            return super().write(data)

        def truncate(self, size=None):
            if is_failing and not can_truncate:
                raise OSError(number, os.strerror(number))
            return super().truncate(size)

    monkeypatch.setattr(AppendFile, "_open", lambda self: FailingFile(self._path, "a"))
    path = tmp_path / "metrics.jsonl"
    file = AppendFile(path)
    file.add(b"one\n")
    is_failing.append(True)
    for record in (b"two\n", b"three\n"):
        file.add(record)
        with pytest.raises(OSError, match="metrics") as caught:
            file.sync()
        assert caught.value.errno == number
    is_failing.clear()
    file.add(b"four\n")
    file.sync()
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"
    output = capfd.readouterr().err
    assert output.count("CANNOT BE WRITTEN") == output.count("is written again") == 1


def test_result_appended_to_a_truncated_line_starts_a_new_line(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    jsonl.append_record(tmp_path / "eval.jsonl", line(3))
    jsonl.append_record(tmp_path / "eval.jsonl", line(4))
    with MetricsWriter(tmp_path, from_step=3):
        pass
    assert read_steps(tmp_path / "eval.jsonl") == [1, 3]


def test_a_line_that_another_process_appends_survives_a_partial_write(tmp_path, monkeypatch):
    """Removing the part of a record that a full disk took must not remove that line too."""
    path = tmp_path / "eval.jsonl"
    file = AppendFile(path)
    appending = threading.Thread(target=jsonl.append_record, args=(path, line(1)))

    class FullDisk(io.FileIO):
        def write(self, data):
            super().write(data[:3])
            appending.start()
            appending.join(timeout=1)
            raise OSError(errno.ENOSPC, "full")

    file.close()
    with FullDisk(path, "a") as full_disk:
        monkeypatch.setattr(file, "_file", full_disk)
        file.add(b"a record\n")
    appending.join()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1]
