"""Every number of an evaluation is the same on every mesh and with every strategy."""

import json

import jax
import numpy as np
import pytest

from jaxsp.core.errors import ProblemCollector
from jaxsp.evaluation import long_ppl
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.run import build, config_file, model_files
from tests import batches, small_runs

ROW_TOKENS = 384
MODEL = batches.UNEVEN_LLAMA | {"initializer_range": 0.2}
TASKS = [
    {"task": "needle", "lengths": [256, 384], "depths": 2, "samples": 2},
    {"task": "frequent_words", "lengths": [600], "samples": 2},
]
"""The second one needs longer rows."""
MESHES = {
    "2 x 4": (8, ["mesh.data=2", "mesh.seq=4"]),
    "ring": (4, ["mesh.seq=4", "attention.strategy=ring", "attention.ulysses_degree=1"]),
    "all-gather": (
        4,
        ["mesh.seq=4", "attention.strategy=all_gather", "attention.ulysses_degree=1"],
    ),
    "rows": (2, ["mesh.replica=2", "mesh.data=1", "batch.rows_per_microbatch=2"]),
}
E2E = {"2 x 4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    # repeated parts, so that some tokens gain from far context
    documents = [np.resize(rng.integers(0, 257, 150), length) for length in (40, 130, 384, 500)]
    (path / "eval.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": ids.tolist()}) for ids in documents)
    )
    return path


def evaluate(folder, num_devices, words):
    sections = {
        "model": {"config": MODEL, "tokenizer": "bytes"},
        "data": {
            "eval": [{"source": str(folder / "eval.jsonl"), "format": "tokens", "name": "a"}],
            "row_tokens": ROW_TOKENS,
        },
        "eval": {"tasks": TASKS, "long_ppl": True},
        "batch": {"rows_per_step": 8},
    }
    fields = small_runs.make_fields(folder, **sections)
    resolved = build.prepare_model(
        config_file.parse(fields, words),
        devices=jax.devices()[:num_devices],
        problems=ProblemCollector(),
        for_training=False,
    )
    spec = resolved.spec
    master = model_files.open_weights(spec, None, None).make()
    eval_sets = Evaluator(spec, resolved.eval_sets, has_long_ppl=True)
    tasks = RetrievalEvaluator(eval_sets, resolved.task_samples)
    return [line for each in (eval_sets, tasks) for line in each.run(master, num_steps=0)]


@pytest.fixture
def small_long_ppl(monkeypatch):
    """Numbers of LongPPL for short documents and a random model."""
    for name, value in {"CONTEXT_TOKENS": 96, "BLOCK_TOKENS": 32, "MIN_GAIN": 0.05}.items():
        monkeypatch.setattr(long_ppl, name, value)
    monkeypatch.setattr(long_ppl, "MAX_LOSS", 6.0)


@pytest.mark.usefixtures("small_long_ppl", "small_shards")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e if name in E2E else pytest.mark.slow)
        for name in MESHES
    ],
)
def test_every_number_is_that_of_one_device(folder, name):
    expected = evaluate(folder, 1, [])
    actual = evaluate(folder, *MESHES[name])
    assert [line.get("task") for line in expected] == [None, "needle", "needle", "frequent_words"]
    assert expected[0]["num_key_tokens"] > 10
    assert expected[0]["loss_per_doubling"] is not None
    for line, other in zip(expected, actual, strict=True):
        assert line.keys() == other.keys()
        for field, value in line.items():
            if field != "seconds":
                compare(field, value, other[field])


def compare(field, value, other):
    if isinstance(value, dict):
        assert value.keys() == other.keys()
        for name, number in value.items():
            compare(field, number, other[name])
    elif isinstance(value, float):
        # a difference of two losses, of about 6, has the rounding of both
        is_difference = field in ("loss_change_by_position", "loss_per_doubling")
        tolerance = {"abs": 6e-6} if is_difference else {"rel": 1e-6}
        assert other == pytest.approx(value, **tolerance), field
    else:
        assert other == value, field
