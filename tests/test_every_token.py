"""Every token of every document is trained on once in an epoch, on every mesh, stopped or not.

Except for the last token where it is a segment of its own: it has no next token to predict.

A token's id is its index in the whole corpus, so that a batch shows its documents and tokens.
"""

import itertools
import json
import pathlib
import re

import jax
import numpy as np
import pytest
import rich.console
import yaml

from jaxsp.checkpoint import reader, run_paths
from jaxsp.run import build, config_file, trainer
from tests import commands, messages, recorded_batches, small_runs, two_processes

pytestmark = pytest.mark.e2e

LENGTHS = [*np.random.default_rng(0).integers(1, 60, 80).tolist(), 200, 1, 64, 65, 300, 128]
"""Documents; rows have 64 tokens."""
ENDS = np.cumsum([1, *LENGTHS])
ROW_TOKENS = 64

MODEL = {
    "model_type": "llama",
    "vocab_size": int(ENDS[-1]),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "intermediate_size": 16,
}

Steps = list[tuple[np.ndarray, np.ndarray]]
"""Tokens and labels of each step."""


def write_config(folder: pathlib.Path, long_documents: str) -> None:
    records = [json.dumps({"input_ids": [*range(*pair)]}) for pair in itertools.pairwise(ENDS)]
    (folder / "train.jsonl").write_text("\n".join(records), encoding="utf-8")
    fields = small_runs.make_fields(
        folder,
        run={"steps": None, "epochs": 1, "save_every": 1},
        model={"config": MODEL},
        mesh={"virtual_cpu_devices": 8},
        data={"max_segments_per_row": 6, "long_documents": long_documents},
        batch={"rows_per_step": 8},
        checkpoint={"keep_latest": 100},
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")


def train(
    folder: pathlib.Path, mesh: tuple[int, int], *changes: str, processes: int = 1, kill_at: int = 0
) -> Steps:
    """Trains in this process, or in others if there are several or if they are killed."""
    words = [f"mesh.data={mesh[0]}", f"mesh.seq={mesh[1]}", *changes]
    log = folder / f"log-{processes}-{kill_at}"
    if processes == 1 and not kill_at:
        config = config_file.load(folder / "config.yaml", words)
        with recorded_batches.record_batches(log):
            run = build.build_training(config, devices=jax.devices())
            trainer.train(run, rich.console.Console(quiet=True))
        return recorded_batches.read_batches(log)
    command = ("-m", "tests.recorded_batches", log, kill_at, folder / "config.yaml", *words)
    environment = {"XLA_FLAGS": ""}
    if processes == 1:
        jobs = [commands.start_python(*command, env=environment)]
    else:
        jobs = two_processes.start(*command, env=environment)
    outputs = two_processes.wait(jobs)
    codes = {job.returncode for job in jobs}
    # one kills itself, unless JAX ends it first because the other one died
    assert (-9 in codes and codes <= {-9, -6}) if kill_at else codes == {0}, outputs
    return recorded_batches.read_batches(log)


def check_all_tokens(steps: Steps, long_documents: str) -> None:
    """Checks that all documents are learned once, without those that are dropped and segments of
    one token, and that each label is the next token of the document; its last token has none."""
    kept = [
        np.arange(a, b - ((b - a) % ROW_TOKENS == 1))
        for a, b in itertools.pairwise(ENDS)
        if b - a <= ROW_TOKENS or long_documents == "split"
    ]
    learned = np.concatenate([tokens.ravel() for tokens, _ in steps])
    assert np.array_equal(np.sort(learned[learned > 0]), np.concatenate(kept))
    for tokens, labels in steps:
        has_next = (tokens > 0) & ~np.isin(tokens, ENDS[1:] - 1)
        assert np.array_equal(labels, np.where(has_next, tokens + 1, -100))


def list_rows(steps: Steps) -> list[set[bytes]]:
    """Rows of each step."""
    return [
        {row.tobytes() for row in tokens.reshape(-1, ROW_TOKENS) if row.any()}
        for tokens, _ in steps
    ]


@pytest.fixture(scope="module")
def straight(request, tmp_path_factory):
    """An uninterrupted run: data.long_documents, and the rows of each step."""
    folder = tmp_path_factory.mktemp("straight")
    write_config(folder, request.param)
    steps = train(folder, (2, 4))
    assert len(steps) > 5
    check_all_tokens(steps, request.param)
    dropped = messages.containing("4 documents", "drop")
    is_dropped = re.search(dropped, messages.read_banner(folder / "run"))
    assert bool(is_dropped) == (request.param == "drop")
    return request.param, list_rows(steps)


@pytest.mark.parametrize(
    ("straight", "processes", "mesh"),
    [
        ("drop", 1, (1, 8)),
        *(
            pytest.param(*layout, marks=pytest.mark.slow)
            for layout in [
                *(("split", 1, (8, 1)), ("split", 1, (1, 8)), ("split", 2, (2, 4))),
                *(("split", 2, (1, 8)), ("drop", 2, (4, 2))),  # 2 processes of 1 x 8 share rows
            ]
        ),
    ],
    indirect=["straight"],
)
def test_each_step_has_the_same_rows_on_every_layout(straight, tmp_path, processes, mesh):
    long_documents, rows = straight
    write_config(tmp_path, long_documents)
    steps = train(tmp_path, mesh, processes=processes)
    assert list_rows(steps) == rows
    check_all_tokens(steps, long_documents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("straight", "before", "after", "rows_per_step"),
    [
        ("split", (2, (1, 8)), (1, (4, 2)), 4),
        ("split", (1, (2, 4)), (2, (1, 8)), 16),
        ("drop", (2, (2, 4)), (1, (1, 8)), 16),
    ],
    indirect=["straight"],
)
def test_a_run_that_was_killed_goes_on_and_learns_from_the_rest_once(
    straight, tmp_path, before, after, rows_per_step
):
    """On another number of processes and mesh, and with other rows_per_step (8 before)."""
    long_documents, rows = straight
    write_config(tmp_path, long_documents)
    killed = train(tmp_path, before[1], processes=before[0], kill_at=6)
    done = reader.read_meta(run_paths.find_latest(tmp_path / "run")).step
    assert 0 < done < 6
    assert list_rows(killed[:done]) == rows[:done]
    change = f"batch.rows_per_step={rows_per_step}"
    steps = killed[:done] + train(tmp_path, after[1], change, processes=after[0])
    check_all_tokens(steps, long_documents)
    lines = commands.read_lines(tmp_path / "run/metrics.jsonl")
    assert lines[-1]["num_tokens_total"] == sum(int(np.sum(tokens > 0)) for tokens, _ in steps)
