"""Rows of several lengths: equal losses of documents, one step per length, and a resumed run."""

import json
import re

import jax
import numpy as np
import pytest
import rich.console

from jaxsp.attention.kernels.cudnn.cudnn_kernel import CudnnKernel
from jaxsp.attention.kernels.kernel import UnsupportedReason
from jaxsp.checkpoint import reader
from jaxsp.config import config_file
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.memory import available_memory
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.run import trainer
from jaxsp.setup import build
from jaxsp.training import train_step
from tests import batches, messages, tolerances

MODEL = {**batches.SMALL_LLAMA, "vocab_size": 101, "num_hidden_layers": 2}
WEIGHTS = {"train.jsonl": 3.0, "short.jsonl": 1.0}
LENGTHS = [3, 30, 31, 32, 33, 64, 100, 128, 300, 2, 17, 8, 120]


def settings(folder, *words, row_tokens, data=2, seq=2):
    fields = {
        "run": {"directory": str(folder / "run"), "epochs": 2, "save_every": 2, "resume": "auto"},
        "model": {"config": MODEL, "compute_dtype": "float32"},
        "mesh": {"data": data, "seq": seq},
        "data": {
            "train": [{"source": str(folder / "train.jsonl"), "format": "tokens"}],
            "row_tokens": row_tokens,
            "max_segments_per_row": 4,
        },
        "batch": {"rows_per_step": 2},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"keep_latest": 100},
        "logging": {"trackers": []},
    }
    return config_file.parse(fields, words)


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    records = [json.dumps({"input_ids": random.integers(0, 101, n).tolist()}) for n in LENGTHS]
    (tmp_path / "train.jsonl").write_text("\n".join(records))
    return tmp_path


def losses(chosen):
    """The loss of each document, by its first tokens: all other labels of a step are taken away."""
    run_spec, material = build.build_training(chosen, devices=jax.devices()[:4])
    master = material.make_weights()
    actual = {}
    data = material.train_set
    compute_losses = {
        stream.row_tokens: train_step.compile_token_losses(run_spec.steps[stream.row_tokens])
        for stream in data.streams
    }
    for given, counts in data.make_loader(
        chosen, data.make_schedule(chosen, epochs=1), run_spec.placements
    ).batches():
        tokens = np.asarray(given.tokens_BL)
        labels = np.asarray(given.labels_BL)
        starts = np.asarray(given.starts_BM)
        lengths = np.asarray(given.lengths_BM)
        for turn, slot, piece in np.argwhere(lengths > 0):
            start = starts[turn, slot, piece]
            length = lengths[turn, slot, piece]
            only = np.full_like(labels, NO_LABEL)
            part = (turn, slot, slice(start, start + length))
            only[part] = labels[part]
            one = {**vars(given), "labels_BL": jax.device_put(only, given.labels_BL.sharding)}
            actual[tuple(tokens[part][:2])] = float(
                compute_losses[counts.row_tokens](master, Batch(**one)).losses_BL.sum()
            )
    return actual


@pytest.mark.e2e
def test_the_loss_of_each_document_is_the_same_in_rows_of_any_length(folder):
    (folder / "train.jsonl").write_text(
        "\n".join((folder / "train.jsonl").read_text().splitlines()[:8])
    )  # none is cut
    one, several = (
        losses(settings(folder, row_tokens=row_tokens)) for row_tokens in (128, [32, 64, 128])
    )
    assert len(one) == 8
    for document, loss in one.items():
        assert several[document] == pytest.approx(loss, rel=tolerances.MESH)


def test_rows_that_cudnn_cannot_take_use_another_kernel(folder, monkeypatch):
    def find_reasons(kernel, workload, **_):
        is_long = workload.whole_row_tokens == 128
        return [UnsupportedReason("supports short rows only", "")] if is_long else []

    monkeypatch.setattr(CudnnKernel, "unsupported_reasons", find_reasons)
    run_spec, _ = build.build_training(
        settings(folder, row_tokens=[64, 128]), devices=jax.devices()[:4]
    )
    kernels = {length: spec.attention.kernel.name for length, spec in run_spec.steps.items()}
    assert kernels == {64: "cudnn", 128: "blockwise"}


def train(chosen):
    run_spec, material = build.build_training(chosen, devices=jax.devices()[:4])
    trainer.train(run_spec, material, rich.console.Console(quiet=True))
    directory = chosen.run.directory
    with open(f"{directory}/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


COUNTS = (
    "step",
    "row_tokens",
    "num_rows",
    "num_tokens",
    "num_loss_tokens",
    "num_tokens_total",
    "padding_fraction",
)


def check_lines(lines, expected, *, is_exact):
    """Compares the counts and the losses of steps."""
    for line, wanted in zip(lines, expected, strict=True):
        for name in COUNTS:
            assert line[name] == wanted[name], name
        for name in ("loss", "grad_norm"):
            same = wanted[name] if is_exact else pytest.approx(wanted[name], rel=tolerances.MESH)
            assert line[name] == same


@pytest.fixture
def straight(folder, tmp_path):
    """A run with rows of two lengths on a mesh of 2 x 2."""
    return train(
        settings(folder, "run.directory=" + str(tmp_path / "straight"), row_tokens=[64, 128])
    )


@pytest.mark.e2e
def test_a_run_with_rows_of_two_lengths_is_the_same_on_every_mesh_and_after_a_stop(
    folder, tmp_path, straight, monkeypatch
):
    assert sum(line["num_tokens"] for line in straight) == 2 * sum(LENGTHS)
    assert {line["row_tokens"] for line in straight} == {64, 128}
    banner = messages.read_banner(tmp_path / "straight")
    assert re.search(messages.containing(256, 2, 128, 4, 64), banner)
    name = "run.directory=" + str(tmp_path / "1x4")
    with monkeypatch.context() as patch:
        patch.setattr(available_memory, "find_limits", lambda devices: MemoryLimit(1e12, 1e12))
        words = [name, "batch.rows_per_microbatch=auto"]
        other = train(settings(folder, *words, row_tokens=[64, 128], data=1, seq=4))
    banner = messages.read_banner(tmp_path / "1x4")
    parts = (2, "microbatch of 2 rows", 4, "microbatch of 4 rows", "rows_per_microbatch: auto")
    assert re.search(messages.containing(*parts), banner)
    go_on = settings(
        folder,
        "run.directory=" + str(tmp_path / "on"),
        "run.resume=" + str(tmp_path / "straight/checkpoints/4"),
        row_tokens=[64, 128],
    )
    meta = reader.read_meta(tmp_path / "straight/checkpoints/4")
    assert set(meta.rows_consumed) == {"64", "128"}
    check_lines(other, straight, is_exact=False)
    check_lines(train(go_on), straight[4:], is_exact=True)


@pytest.mark.slow
def test_rows_of_each_length_on_a_mesh_of_their_own_are_trained_and_resumed_alike(
    folder, tmp_path, straight
):
    for name, start, seq, rows in (
        ("4 and 1", None, [4, 1], 1),
        ("2 and 4", 4, [2, 4], 1),
        ("auto", 4, "auto", "auto"),
    ):
        resume = "auto" if start is None else tmp_path / f"straight/checkpoints/{start}"
        words = [f"run.directory={tmp_path}/{name}", f"run.resume={resume}"]
        words.append(f"batch.rows_per_microbatch={rows}")
        lines = train(settings(folder, *words, row_tokens=[128, 64], data=-1, seq=seq))
        check_lines(lines, straight[start or 0 :], is_exact=False)
    banner = messages.read_banner(tmp_path / "4 and 1")
    for row_tokens, seq in ((128, 4), (64, 1)):
        assert re.search(messages.containing(row_tokens, f"seq {seq}"), banner)
    banner = messages.read_banner(tmp_path / "auto")
    assert "mesh.seq: auto" in banner
    assert "batch.rows_per_microbatch: auto" in banner
    (start,) = (tmp_path / "4 and 1/starts.jsonl").read_text().splitlines()
    assert json.loads(start)["seq_by_row_tokens"] == {"128": 4, "64": 1}


@pytest.mark.slow
def test_a_mixture_of_sources_goes_on_after_a_stop_with_the_rows_that_would_have_come(
    folder, tmp_path
):
    records = (folder / "train.jsonl").read_text().splitlines()
    (folder / "short.jsonl").write_text("\n".join(records[:5]))
    weights = [
        {"source": str(folder / name), "format": "tokens", "weight": weight}
        for name, weight in WEIGHTS.items()
    ]
    words = ["run.epochs=null", "run.steps=9", f"data.train={json.dumps(weights)}"]
    straight = train(
        settings(folder, f"run.directory={tmp_path}/straight", *words, row_tokens=[64, 128])
    )
    tokens = {
        name: sum(line["num_tokens_by_source"][f"{folder}/{name}"] for line in straight)
        for name in WEIGHTS
    }
    assert tokens["train.jsonl"] > tokens["short.jsonl"] > 0
    assert {line["epoch"] for line in straight} == {None}
    on = [f"run.directory={tmp_path}/on", f"run.resume={tmp_path}/straight/checkpoints/4"]
    after = train(settings(folder, *on, *words, row_tokens=[64, 128]))
    for line, wanted in zip(after, straight[4:], strict=True):
        for name in (
            "step",
            "row_tokens",
            "num_tokens_by_source",
            "num_tokens_total",
            "loss",
            "grad_norm",
        ):
            assert line[name] == wanted[name], name
