"""Every token of every document is trained on once in an epoch, on every mesh, stopped or not.

Except for the last token where it is a segment of its own: it has no next token to predict.

A token's id is its index in the whole corpus, so that a batch shows its documents and tokens.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
import yaml

from jaxsp.checkpoint import reader, run_paths
from jaxsp.run import build, config_file, trainer
from tests import messages, recorded_batches

pytestmark = pytest.mark.e2e

REPO = pathlib.Path(__file__).parent.parent
LENGTHS = [*np.random.default_rng(0).integers(1, 60, 80).tolist(), 200, 1, 64, 65, 300, 128]
"""Documents; rows have 64 tokens."""

ROW_TOKENS = 64


def write_config(folder: pathlib.Path, long_documents: str) -> None:
    firsts = np.cumsum([1, *LENGTHS])
    records = [
        json.dumps({"input_ids": list(range(a, b))})
        for a, b in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)
    ]
    (folder / "train.jsonl").write_text("\n".join(records), encoding="utf-8")
    model = {
        "model_type": "llama",
        "vocab_size": int(firsts[-1]),
        "hidden_size": 16,
        "num_hidden_layers": 1,
    }
    model |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 4,
        "intermediate_size": 16,
    }
    fields = {
        "run": {"directory": str(folder / "run"), "epochs": 1, "save_every": 1},
        "model": {"config": model, "compute_dtype": "float32"},
        "mesh": {"virtual_cpu_devices": 8},
        "data": {
            "train": [{"source": str(folder / "train.jsonl"), "format": "tokens"}],
            "row_tokens": ROW_TOKENS,
            "max_segments_per_row": 6,
            "long_documents": long_documents,
        },
        "batch": {"rows_per_step": 8},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"keep_latest": 100},
        "logging": {"trackers": []},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")


def words_of(mesh: tuple[int, int], *more: str) -> list[str]:
    return [f"mesh.data={mesh[0]}", f"mesh.seq={mesh[1]}", *more]


def train_here(folder: pathlib.Path, log: str, *words: str) -> None:
    config = config_file.load(folder / "config.yaml", list(words))
    with recorded_batches.record_batches(folder / log):
        material = build.build_training(config, devices=jax.devices())
        trainer.train(material, rich.console.Console(quiet=True))


def train_apart(
    folder: pathlib.Path, log: str, *words: str, processes: int, kill_at: int = 0
) -> None:
    """Trains in `processes` processes.

    Each kills itself at step `kill_at`, unless JAX ends it first because another one died.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = []
    for index in range(processes):
        command = [
            sys.executable,
            "-m",
            "tests.recorded_batches",
            str(folder / log),
            str(kill_at),
            str(folder / "config.yaml"),
            *words,
        ]
        if processes > 1:
            command += [
                "--coordinator",
                address,
                "--num-processes",
                str(processes),
                "--process-id",
                str(index),
            ]
        started.append(
            subprocess.Popen(
                command,
                cwd=REPO,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    lines = [process.communicate(timeout=300)[0] for process in started]
    codes = {process.returncode for process in started}
    assert (-9 in codes and codes <= {-9, -6}) if kill_at else codes == {0}, "\n".join(lines)


def learned(steps: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """Hash of every token that was trained on, in the order of the corpus, with repetitions."""
    tokens = np.concatenate([tokens.ravel() for tokens, _ in steps])
    return hashlib.sha256(np.sort(tokens[tokens > 0]).astype(np.int64).tobytes()).hexdigest()


def check_labels(steps: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Checks that each label is the next token of the document; its last token has none."""
    lasts = np.cumsum(LENGTHS)
    for tokens, labels in steps:
        has_next = (tokens > 0) & ~np.isin(tokens, lasts)
        assert np.array_equal(labels, np.where(has_next, tokens + 1, -100))


def rows_of(step: tuple[np.ndarray, np.ndarray]) -> set[bytes]:
    tokens, _ = step
    return {row.tobytes() for row in tokens.reshape(-1, tokens.shape[-1]) if row.any()}


def expected(long_documents: str) -> str:
    """Hash of all documents, without those that are dropped and segments of one token."""
    firsts = np.cumsum([1, *LENGTHS])
    kept = [
        np.arange(a, b - ((b - a) % ROW_TOKENS == 1))
        for a, b in itertools.pairwise(firsts)
        if b - a <= ROW_TOKENS or long_documents == "split"
    ]
    return hashlib.sha256(np.concatenate(kept).astype(np.int64).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def straight(request, tmp_path_factory):
    """An uninterrupted run: its folder, data.long_documents, and the tokens of each step."""
    folder = tmp_path_factory.mktemp("straight")
    write_config(folder, request.param)
    train_here(folder, "log", *words_of((2, 4)))
    steps = recorded_batches.read_batches(folder / "log")
    assert len(steps) > 5
    assert learned(steps) == expected(request.param)
    check_labels(steps)
    dropped = 4 if request.param == "drop" else 0
    says = messages.containing(f"{dropped} documents", "drop")
    assert bool(re.search(says, messages.read_banner(folder / "run"))) == bool(dropped)
    return folder, request.param, steps


LAYOUTS = [
    pytest.param("split", 1, (8, 1), marks=pytest.mark.slow),
    pytest.param("split", 1, (1, 8), marks=pytest.mark.slow),
    pytest.param("split", 2, (2, 4), marks=pytest.mark.slow),
    pytest.param(
        "split", 2, (1, 8), marks=pytest.mark.slow
    ),  # two processes are in faults/ and test_two_processes.py
    ("drop", 1, (1, 8)),
    pytest.param("drop", 2, (4, 2), marks=pytest.mark.slow),
]
"""data.long_documents, processes, and data x seq. 2 processes of 1 x 8 share every row."""


@pytest.mark.parametrize(("straight", "processes", "mesh"), LAYOUTS, indirect=["straight"])
def test_each_step_has_the_same_rows_on_every_layout(straight, tmp_path, processes, mesh):
    _, long_documents, wanted = straight
    write_config(tmp_path, long_documents)
    if processes == 1:
        train_here(tmp_path, "log", *words_of(mesh))
    else:
        train_apart(tmp_path, "log", *words_of(mesh), processes=processes)
    steps = recorded_batches.read_batches(tmp_path / "log")
    assert [rows_of(step) for step in steps] == [rows_of(step) for step in wanted]
    assert learned(steps) == expected(long_documents)
    check_labels(steps)


STOPS = [
    pytest.param("split", (2, (1, 8)), (1, (4, 2)), 4, marks=pytest.mark.slow),
    pytest.param("split", (1, (2, 4)), (2, (1, 8)), 16, marks=pytest.mark.slow),
    pytest.param("drop", (2, (2, 4)), (1, (1, 8)), 16, marks=pytest.mark.slow),
]
"""data.long_documents, layout that is killed, layout that goes on, its rows_per_step (8 before)."""


@pytest.mark.parametrize(
    ("straight", "before", "after", "rows_per_step"), STOPS, indirect=["straight"]
)
def test_a_run_that_was_killed_goes_on_and_learns_from_the_rest_once(
    straight, tmp_path, before, after, rows_per_step
):
    _, long_documents, wanted = straight
    write_config(tmp_path, long_documents)
    train_apart(tmp_path, "killed", *words_of(before[1]), processes=before[0], kill_at=6)
    done = reader.read_meta(run_paths.find_latest(tmp_path / "run")).step
    assert 0 < done < 6
    words = words_of(after[1], f"batch.rows_per_step={rows_per_step}")
    if after[0] == 1:
        train_here(tmp_path, "went_on", *words)
    else:
        train_apart(tmp_path, "went_on", *words, processes=after[0])
    steps = recorded_batches.read_batches(tmp_path / "killed")[:done]
    assert [rows_of(step) for step in steps] == [rows_of(step) for step in wanted[:done]]
    steps += recorded_batches.read_batches(tmp_path / "went_on")
    assert learned(steps) == expected(long_documents)
    check_labels(steps)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["num_tokens_total"] == sum(int(np.sum(tokens > 0)) for tokens, _ in steps)
