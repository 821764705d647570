"""jaxsp.Trainer: a Hugging Face folder is loaded, token lists are packed and trained on, saved."""

import copy
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy

import jaxsp
from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.hf import model_config, weights
from jaxsp.model import decoder
from jaxsp.run import build, config_file
from jaxsp.run import trainer as run_trainer
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_memory, distributed
from jaxsp.training import compile_options, train_state
from tests import batches, commands, markdown, messages
from tests.data import chats

SETTINGS = {
    "run": {"steps": 3},
    "model": {"compute_dtype": "float32"},
    "mesh": {"replica": 1, "data": 2, "seq": 4},
    "data": {"row_tokens": 32, "max_segments_per_row": 4},
    "batch": {"rows_per_step": 4},
    "optimizer": {"learning_rate": 0.01},
}
FIELDS = batches.UNEVEN_LLAMA

LENGTHS = (60, 9, 130, 31, 44, 17, 64)
STEPS = 3


def make_folder(path, fields=FIELDS):
    """A Hugging Face folder of random weights, with the tokenizer of bytes."""
    table = decoder.param_table(model_config.parse_model_config(fields))
    rng = np.random.default_rng(3)
    master = jax.tree.map(
        lambda row: rng.normal(0, 0.1, row.stacked_shape).astype(np.float32), table
    )
    weights.export_model(
        master,
        table=table,
        fields=fields,
        tokenizer=tokenizers.make_byte_tokenizer(),
        directory=path,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "base"
    make_folder(path)
    return str(path)


def make_trainer(base, **sections):
    """A trainer whose loop is ours."""
    fields = SETTINGS | sections
    return jaxsp.Trainer(fields | {"model": fields["model"] | {"source": base}})


@pytest.fixture(scope="module")
def loaded(base):
    return make_trainer(base)


def test_a_loaded_model_is_saved_as_it_was(loaded, base, tmp_path):
    """Weights that are sharded and padded come back bit for bit, with the folder's other files."""
    spec = loaded.spec
    stored = [sharding.choose_placement(row, 8) for row in jax.tree.leaves(spec.table)]
    assert any(
        place.stored_shape != row.shape
        for place, row in zip(stored, jax.tree.leaves(spec.table), strict=True)
    )
    assert dict(spec.mesh.shape) == SETTINGS["mesh"]
    assert spec.num_steps == 3
    loaded.save(tmp_path / "out")
    before = pathlib.Path(base)
    after = tmp_path / "out"
    assert {path.name for path in before.iterdir()} == {path.name for path in after.iterdir()}
    old, new = (safetensors.numpy.load_file(path / "model.safetensors") for path in (before, after))
    assert batches.is_bitwise_equal(new, old)
    assert json.loads((after / "config.json").read_text()) == json.loads(
        (before / "config.json").read_text()
    )
    loaded.save(tmp_path / "bfloat16", dtype="bfloat16")
    (name,) = {
        str(tensor.dtype)
        for tensor in safetensors.numpy.load_file(tmp_path / "bfloat16/model.safetensors").values()
    }
    assert name == "bfloat16"


@pytest.mark.skipif(
    compile_options.parse_version(jax.__version__) < host_offload.MIN_RELEASE,
    reason="needs jax 0.11.1",
)
def test_weights_in_host_memory_are_saved(base, tmp_path):
    trainer = make_trainer(base, memory={"offload_optimizer": "state"})
    assert any(map(device_memory.is_on_host, jax.tree.leaves(trainer.state.master)))
    trainer.save(tmp_path / "out")
    old, new = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (pathlib.Path(base), tmp_path / "out")
    )
    assert batches.is_bitwise_equal(new, old)


def with_weights(trainer, has_weights=True):
    """The trainer, which takes weights of tokens."""
    changed = copy.copy(trainer)
    changed.spec = dataclasses.replace(trainer.spec, has_weights=has_weights)
    return changed


def pieces(rows):
    """Tokens, labels, positions and weights of each segment of a batch."""
    names = ("tokens_BL", "labels_BL", "positions_BL", "weights_BL")
    arrays = [np.asarray(getattr(rows, name)) for name in names]
    for place in np.argwhere(np.asarray(rows.lengths_BM)):
        start, length = (np.asarray(x)[tuple(place)] for x in (rows.starts_BM, rows.lengths_BM))
        yield [array[place[0], place[1], start : start + length].tolist() for array in arrays]


def test_documents_are_packed_with_labels_and_weights(loaded):
    """Each segment of a row is a whole document; labels and weights are shifted by one token."""
    trainer = with_weights(loaded)
    documents = [list(range(10 * i, 10 * i + n)) for i, n in enumerate([10, 3, 9, 2, 8, 7, 10, 2])]
    labels = [[-100 if token % 4 == 0 else token for token in document] for document in documents]
    factors = [np.array(document) + 0.5 for document in documents]
    actual = list(trainer.pack(documents, labels=labels, weights=factors))
    assert len(actual) == 3
    described = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), rows)
        for rows in (actual[0], train_state.abstract_inputs(trainer.spec)[1])
    ]
    assert described[0] == described[1]
    right = [
        [document, [*marks[1:], -100], list(range(len(document))), [*weights_of[1:].tolist(), 0.0]]
        for document, marks, weights_of in zip(documents, labels, factors, strict=True)
    ]
    for rows in actual:  # of four rows, which are at least one epoch
        step_pieces = list(pieces(rows))
        assert all(piece in right for piece in step_pieces)
        assert all(document in step_pieces for document in right)


BAD = [
    ({"documents": [[1, 2], [3, 4, 257]]}, ["documents[1][2] = 257", 0, 256]),
    ({"documents": [[1, 1.5], [3, 4]]}, ["documents[0][1] = 1.5"]),
    ({"documents": [[-100, 2]]}, ["documents[0][0] = -100"]),
    ({"documents": []}, ["documents: "]),
    ({"labels": [[1, -100], [-1, 3]]}, ["labels[1][0] = -1", 0, 256, -100]),
    ({"labels": [[1, 2]]}, ["labels[1]", "documents[1]", "2 lists"]),
    ({"weights": [[1.0], [1, 1]]}, ["weights[0]", "documents[0]"]),
    ({"weights": [[0, 1], [1, -1.0]]}, ["weights[1][1] = -1.0", 0]),
    ({"weights": [[0, 1], [np.nan, 1]]}, ["weights[1][0] = nan"]),
    ({"documents": [[1, 2], "ab"]}, ["documents[1]", "list"]),
    ({"documents": [1, 2]}, ["documents[0]", "list"]),
    ({"documents": [None]}, ["documents[0]", "list"]),
    ({"documents": [[1, 2], [[1, 2], [3]]]}, ["documents[1]", "list"]),
    ({"documents": {"input_ids": [[1, 2]]}}, ["documents: ", "input_ids"]),
    ({"weights": [0.5, 0.5]}, ["weights[0]", "list"]),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=str)
def test_bad_lists_are_refused(loaded, given, says):
    given = {"documents": [[1, 2], [3, 4]]} | given
    trainer = with_weights(loaded, "weights" in given)
    with pytest.raises(UserError, match="^" + messages.containing(*says)):
        trainer.pack(given.pop("documents"), **given)


def test_documents_may_come_from_a_generator(loaded):
    of_list, of_generator = (
        next(loaded.pack(documents))
        for documents in ([[1, 2], [3, 4]], (d for d in [[1, 2], [3, 4]]))
    )
    assert np.array_equal(of_list.tokens_BL, of_generator.tokens_BL)


def test_prompts_are_texts_chats_or_ids(loaded):
    for prompts, says in (
        ([1, 2], ["prompts[0]", "int"]),
        ([{"role": "user", "content": "a"}], ["prompts[0]", "dict"]),
        ([[1, 257]], ["prompts[0]", 0, 256]),
        ([[]], ["prompt 0"]),
    ):
        with pytest.raises(UserError, match=messages.containing(*says)):
            loaded.generate(prompts)
    with pytest.raises(UserError, match=messages.containing("data.train", "pack")):
        loaded.train()
    with pytest.raises(UserError, match=messages.containing("data.eval", "use evaluate")):
        loaded.evaluate_sets()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 10}, "steps = 10"),
        ({"run": None}, "run = None"),
        ({"data": {"eval_fraction": 0.1}}, "data.eval_fraction = 0.1"),
        ({"run": {"seed": 1}}, "run.steps, run.epochs: missing"),
        ({"optimizer": {}}, "optimizer.learning_rate: missing"),
        ({"run": {"epochs": 2}}, "run.epochs = 2"),  # steps per epoch are unknown before packing
    ],
)
def test_settings_of_files_are_refused_before_anything_is_loaded(changes, field):
    with pytest.raises(UserError, match=field):
        make_trainer("base", **changes)


def test_settings_that_do_not_work_are_refused(loaded, base):
    with messages.assert_refused(start="batch.rows_per_step = 3: "):  # of two groups
        make_trainer(base, batch={"rows_per_step": 3})
    with messages.assert_refused("has_weights=True"):
        loaded.pack([[1, 2]], weights=[[1, 1]])


@pytest.mark.e2e
def test_the_page_is_a_script_whose_numbers_are_those_of_the_command(tmp_path):
    """The blocks of configs/guide/python.md, as they stand there, on four CPU devices; then the
    command with the config of its run."""
    page = (commands.REPO / "configs/guide/python.md").read_text(encoding="utf-8")
    *blocks, plan = markdown.code_blocks(page, "python")
    assert "jaxsp.plan" in plan, "it has a test of its own"
    shown = "[losses, answers, evaluation['loss'], margins, labels[0]]"
    script = "\n".join([*blocks, f"import json\nprint(json.dumps({shown}))"])
    make_folder(tmp_path / "models/base", batches.SMALL_LLAMA)
    (tmp_path / "models/base/chat_template.jinja").write_text(chats.CHATML)
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": str(commands.REPO),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "script.py").write_text(script)
    *_, evaluated, last = run("script.py").splitlines()
    losses, answers, loss, margins, labels = json.loads(last)
    run("-m", "jaxsp.train", "runs/sums/config.yaml", "run.directory=runs/command")
    mine, command = (
        [commands.read_lines(tmp_path / f"runs/{name}/{file}.jsonl") for file in NUMBERS_OF_FILES]
        for name in ("sums", "command")
    )
    for my_lines, lines, fields in zip(mine, command, NUMBERS_OF_FILES.values(), strict=True):
        assert [[line[field] for field in fields] for line in my_lines] == [
            [line[field] for field in fields] for line in lines
        ]
    assert losses == [line["loss"] for line in mine[0]], "on_line had each line"
    assert losses[-1] < losses[0] - 0.5
    assert loss == mine[1][-1]["loss"], "evaluated with the weights of the last step"
    assert len(answers) == 2
    assert all(answers)
    assert margins[1] > margins[0], "answers are compared with the reference"
    assert bytes(label for label in labels if label >= 0) == b"0<|im_end|>\n"
    assert float(evaluated) < losses[-1], "the third trainer went on from the saved weights"
    saved = safetensors.numpy.load_file(tmp_path / "models/tuned/model.safetensors")
    assert {str(tensor.dtype) for tensor in saved.values()} == {"bfloat16"}
    assert tokenizers.load(str(tmp_path / "models/tuned"))("abc")["input_ids"] == [97, 98, 99]


NUMBERS_OF_FILES = {
    "metrics": (*commands.COUNTS, "loss", "grad_norm", "learning_rate", "token_accuracy"),
    "eval": ("step", "data", "data_digest", "loss", "num_documents", "loss_by_position"),
}
"""Fields that do not depend on times."""


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
    run_trainer.train(inputs, rich.console.Console(quiet=True))
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    (evaluation,) = commands.read_lines(folder / "run/eval.jsonl")
    return lines, evaluation


@pytest.mark.e2e
def test_a_trainer_has_the_losses_of_jaxsp_train(tmp_path):
    quickstart = config_file.read(commands.REPO / "configs/quickstart.yaml")
    make_folder(tmp_path / "base", quickstart["model"]["config"])
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
    config["model"] |= model
    (tmp_path / "config.yaml").write_text(yaml_io.dump(config))
    mine = jaxsp.Trainer(tmp_path / "config.yaml")
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


def test_a_job_that_was_asked_to_stop_does_not_train_again(tmp_path, monkeypatch):
    config = config_file.read(commands.REPO / "configs/quickstart.yaml")
    source = [{"format": "tokens", "source": [[1, 2, 3]] * 50}]
    changes = {"data": config["data"] | {"train": source, "eval": []}, "run": {"steps": 1}}
    mine = jaxsp.Trainer(config | changes, [f"run.directory={tmp_path}/run"])
    monkeypatch.setitem(distributed._events, distributed.STOP_KEY, {1: "SIGTERM"})
    with pytest.raises(UserError, match="asked to stop"):
        mine.train(is_quiet=True)
    assert not (tmp_path / "run").exists()


def test_fields_without_effect_are_refused_by_name_also_those_of_a_file(tmp_path):
    fields = {
        "run": {"steps": 2, "directory": "runs/x", "save_every": "10m", "eval_at_start": False},
        "model": {"source": "base", "compute_dtype": "float32", "tokenizer": "bytes"},
        "data": {"row_tokens": 64, "train": []},
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.1},
        "checkpoint": {"keep_best": 0},
        "logging": {"trackers": ["mlflow"], "profile_steps": [1, 2]},
    }
    (tmp_path / "run.yaml").write_text(yaml_io.dump(fields))
    for config in (fields, tmp_path / "run.yaml", str(tmp_path / "run.yaml")):
        with pytest.raises(UserError) as raised:
            jaxsp.Trainer(config)
        assert [problem.partition(" = ")[0] for problem in raised.value.problems] == [
            *("run.directory", "run.save_every", "logging.trackers", "logging.profile_steps")
        ]


def test_importing_jaxsp_imports_neither_jax_nor_transformers():
    code = "import sys, jaxsp; print({'jax', 'numpy', 'transformers'} & {*sys.modules})"
    done = commands.run_python("-c", code)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_completion_finds_the_trainer_and_other_names_are_missing():
    assert dir(jaxsp) == ["Trainer", "plan"]
    with pytest.raises(AttributeError, match="no attribute 'Triner'"):
        _ = jaxsp.Triner
