"""Runs of the train command from a checkpoint with delta nets and attention, made by transformers.

The losses do not depend on the mesh, a stopped run goes on bit for bit, and the first loss and the
exported weights are those of transformers.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, commands, messages, small_runs, tolerances
from tests.hf import oracle

pytestmark = pytest.mark.e2e

FIELDS = oracle.MODELS["qwen3_5"]
STEPS = 4
STOPPED = 2
MESHES = {"2x4": ["attention.strategy=ulysses"], "1x8": ["attention.strategy=ring"]}


def write_documents(path: pathlib.Path, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, FIELDS["vocab_size"], length) for length in lengths]
    path.write_text("".join(json.dumps({"input_ids": x.tolist()}) + "\n" for x in documents))
    return documents


def train(
    folder: pathlib.Path, name: str, *words: str, mesh: str, data: pathlib.Path
) -> list[dict]:
    """Runs the command with a run directory of this name. Returns: lines of metrics.jsonl."""
    groups, seq = map(int, mesh.split("x"))
    sections = {
        "run": {"directory": str(folder / name), "steps": STEPS, "save_every": 1},
        "model": {"source": str(folder / "model")},
        "mesh": {"data": groups, "seq": seq, "virtual_cpu_devices": groups * seq},
        "data": {"row_tokens": 128},
        "batch": {"rows_per_step": 2},
        "optimizer": {"schedule": "constant"},
        "checkpoint": {"keep_latest": STEPS},
    }
    fields = small_runs.make_fields(data.parent, data.name, **sections)
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(fields))
    result = commands.run_python("-m", "jaxsp.train", config, *words)
    assert result.returncode == 0, result.stderr
    return commands.read_lines(folder / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the model and its documents: over several devices, of few tokens, of a row."""
    folder = tmp_path_factory.mktemp("hybrid")
    oracle.torch_model(FIELDS).save_pretrained(folder / "model")
    write_documents(folder / "train.jsonl", [100, 27, 60, 68, 128, 5, 3, 90, 29, 128, 70, 2, 56])
    return folder


def read_weights(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Weights of the last checkpoint, by path."""
    table = decoder.param_table(model_config.parse_model_config(FIELDS))
    return batches.name_leaves(reader.read_weights(run / f"checkpoints/{STEPS}", table))


@pytest.fixture(scope="module")
def straight(folder):
    """Lines of metrics.jsonl of the run on 2x4, which is not stopped."""
    return train(folder, "2x4", *MESHES["2x4"], mesh="2x4", data=folder / "train.jsonl")


@pytest.mark.slow
def test_losses_are_the_same_on_two_meshes(folder, straight):
    ring = train(folder, "1x8", *MESHES["1x8"], mesh="1x8", data=folder / "train.jsonl")
    assert [line["step"] for line in ring] == [*range(1, STEPS + 1)]
    expected = [line["loss"] for line in straight]
    assert [line["loss"] for line in ring] == pytest.approx(expected, rel=tolerances.MESH)
    assert expected[0] - expected[-1] > 100 * tolerances.MESH * expected[0]
    messages.assert_names(messages.read_banner(folder / "1x8"), "ring")


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(folder, straight):
    """Resumes a copy without the checkpoints after step 2, as if the run had been killed then."""
    shutil.copytree(folder / "2x4", folder / "stopped")
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(folder / f"stopped/checkpoints/{step}")
    lines = train(folder, "stopped", *MESHES["2x4"], mesh="2x4", data=folder / "train.jsonl")
    assert [line["loss"] for line in lines] == [line["loss"] for line in straight]
    expected = read_weights(folder / "2x4")
    actual = read_weights(folder / "stopped")
    assert {path: x.tobytes() for path, x in actual.items()} == {
        path: x.tobytes() for path, x in expected.items()
    }


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_and_untrained_weights_are_exported_unchanged(folder):
    documents = write_documents(folder / "two.jsonl", [100, 27])
    words = ("optimizer.learning_rate=0", "run.steps=1", "batch.rows_per_step=1")
    (line,) = train(folder, "same", *words, mesh="1x1", data=folder / "two.jsonl")
    assert line["num_tokens"] == 127
    expected = oracle.gradients(oracle.torch_model(FIELDS), documents).loss
    assert line["loss"] == pytest.approx(expected, rel=tolerances.EVAL)
    export.main([str(folder / "same"), str(folder / "out"), "--dtype", "float32"])
    before, after = (
        safetensors.numpy.load_file(folder / name / "model.safetensors")
        for name in ("model", "out")
    )
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert batches.is_bitwise_equal(after[name], tensor), name
