"""jaxsp.Trainer has the numbers of jaxsp.train, and `import jaxsp` does not import JAX."""

import json

import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy

import jaxsp
from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.run import build, config_file, trainer
from tests import commands, test_library

LENGTHS = (60, 9, 130, 31, 44, 17, 64)
STEPS = 3


def train_from_files(folder, fields, documents):
    """Metrics and the last evaluation of a run of jaxsp.train with these documents."""
    file = folder / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": tokens}) for tokens in documents))
    source = {"source": str(file), "format": "tokens"}
    fields = fields | {
        "run": fields["run"] | {"directory": str(folder / "run")},
        "data": fields["data"] | {"train": [source], "eval": [source | {"name": "same"}]},
        "logging": {"trackers": []},
    }
    inputs = build.build_training(config_file.parse(fields), devices=jax.devices())
    trainer.train(inputs, rich.console.Console(quiet=True))
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    (evaluation,) = commands.read_lines(folder / "run/eval.jsonl")
    return lines, evaluation


@pytest.mark.e2e
def test_a_trainer_has_the_losses_of_jaxsp_train(tmp_path):
    quickstart = config_file.read(commands.REPO / "configs/quickstart.yaml")
    test_library.make_folder(tmp_path / "base", quickstart["model"]["config"])
    config = {
        "run": {"steps": STEPS},
        "model": {"compute_dtype": "float32"},
        "mesh": {"data": 2, "seq": 4},
        "data": {"row_tokens": 64},
        "batch": {"rows_per_step": 2},
        "optimizer": quickstart["optimizer"],
    }
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, length).tolist() for length in LENGTHS]
    model = {"source": str(tmp_path / "base")}
    expected, evaluation = train_from_files(
        tmp_path, config | {"model": config["model"] | model}, documents
    )
    (tmp_path / "config.yaml").write_text(yaml_io.dump(config))
    mine = jaxsp.Trainer(model["source"], tmp_path / "config.yaml")
    metrics = [mine.step(batch) for batch in mine.pack(documents)]
    for field in ("loss", "grad_norm", "learning_rate", "num_loss_tokens", "token_accuracy"):
        values = [step_metrics[field].item() for step_metrics in metrics]
        assert values == [line[field] for line in expected], field
    assert expected[-1]["loss"] != expected[0]["loss"]
    assert mine.state.step == STEPS
    result = mine.evaluate(documents, name="same")
    differing = {"seconds": 0, "data_digest": None}  # these documents are in memory
    assert result | differing == evaluation | differing
    assert result["data_digest"] is None
    mine.save(tmp_path / "tuned")
    before, after = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        for name in ("base", "tuned")
    )
    assert before.keys() == after.keys()
    assert not np.array_equal(before["model.norm.weight"], after["model.norm.weight"])


def test_problems_of_the_config_are_reported_before_anything_is_loaded():
    with pytest.raises(UserError, match=r"run\.epochs = 2"):
        jaxsp.Trainer("base", {"run": {"epochs": 2}})


def test_fields_without_effect_are_refused_by_name_also_those_of_a_file(tmp_path):
    fields = {
        "run": {"steps": 2, "directory": "runs/x", "save_every": "10m", "eval_at_start": False},
        "model": {"compute_dtype": "float32", "tokenizer": "bytes"},
        "data": {"row_tokens": 64, "train": [{"source": "a", "format": "text"}], "eval": []},
        "checkpoint": {"keep_best": 2},
        "logging": {"trackers": ["mlflow"], "profile_steps": [1, 2]},
    }
    (tmp_path / "run.yaml").write_text(yaml_io.dump(fields))
    for config in (fields, tmp_path / "run.yaml", str(tmp_path / "run.yaml")):
        with pytest.raises(UserError) as raised:
            jaxsp.Trainer("base", config)
        assert [problem.partition(" = ")[0] for problem in raised.value.problems] == [
            *("run.directory", "run.save_every", "model.tokenizer", "data.train"),
            *("checkpoint.keep_best", "logging.trackers", "logging.profile_steps"),
        ]


def test_importing_jaxsp_imports_neither_jax_nor_transformers():
    code = "import sys, jaxsp; print({'jax', 'numpy', 'transformers'} & {*sys.modules})"
    done = commands.run_python("-c", code)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_completion_finds_the_trainer_and_other_names_are_missing():
    assert dir(jaxsp) == ["Trainer"]
    with pytest.raises(AttributeError, match="no attribute 'Triner'"):
        _ = jaxsp.Triner
