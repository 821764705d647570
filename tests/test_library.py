"""jaxsp.library: a Hugging Face folder is loaded, token lists are packed, and a folder is saved."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxsp import library, trainer
from jaxsp.core import host_memory
from jaxsp.core.errors import UserError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import model_config, writer
from jaxsp.model import decoder
from jaxsp.sharding import host_offload, sharding
from jaxsp.training import compile_options, train_state
from tests import batches, messages

SETTINGS = {
    "run": {"steps": 3},
    "model": {"compute_dtype": "float32"},
    "mesh": {"replica": 1, "data": 2, "seq": 4},
    "data": {"row_tokens": 32, "max_segments_per_row": 4},
    "batch": {"rows_per_step": 4},
    "optimizer": {"learning_rate": 0.01},
}
FIELDS = batches.UNEVEN_LLAMA


def make_folder(path, fields=FIELDS):
    """A Hugging Face folder of random weights, with the tokenizer of bytes."""
    table = decoder.param_table(model_config.parse_model_config(fields, field="fields"))
    rng = np.random.default_rng(3)
    master = jax.tree.map(
        lambda row: rng.normal(0, 0.1, row.stacked_shape).astype(np.float32), table
    )
    writer.export_model(
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


@pytest.fixture(scope="module")
def loaded(base):
    return library.load_model(base, SETTINGS)


def test_a_loaded_model_is_saved_as_it_was(loaded, base, tmp_path):
    """Weights that are sharded and padded come back bit for bit, with the folder's other files."""
    spec, master = loaded
    stored = [sharding.choose_placement(row, 8) for row in jax.tree.leaves(spec.table)]
    assert any(
        place.stored_shape != row.shape
        for place, row in zip(stored, jax.tree.leaves(spec.table), strict=True)
    )
    assert dict(spec.mesh.shape) == SETTINGS["mesh"]
    assert spec.num_steps == 3
    library.save_model(master, tmp_path / "out", spec)
    before = pathlib.Path(base)
    after = tmp_path / "out"
    assert {path.name for path in before.iterdir()} == {path.name for path in after.iterdir()}
    old, new = (safetensors.numpy.load_file(path / "model.safetensors") for path in (before, after))
    assert batches.is_bitwise_equal(new, old)
    assert json.loads((after / "config.json").read_text()) == json.loads(
        (before / "config.json").read_text()
    )
    library.save_model(master, tmp_path / "bfloat16", spec, dtype="bfloat16")
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
    spec, master = library.load_model(base, SETTINGS | {"memory": {"offload_optimizer": "state"}})
    assert any(host_memory.is_on_host(leaf) for leaf in jax.tree.leaves(master))
    library.save_model(master, tmp_path / "out", spec)
    old, new = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (pathlib.Path(base), tmp_path / "out")
    )
    assert batches.is_bitwise_equal(new, old)


def pieces(rows):
    """Tokens, labels, positions and weights of each segment of a batch."""
    names = ("tokens_BL", "labels_BL", "positions_BL", "weights_BL")
    arrays = [np.asarray(getattr(rows, name)) for name in names]
    for place in np.argwhere(np.asarray(rows.lengths_BM)):
        start, length = (np.asarray(x)[tuple(place)] for x in (rows.starts_BM, rows.lengths_BM))
        yield [array[place[0], place[1], start : start + length].tolist() for array in arrays]


def test_documents_are_packed_with_labels_and_weights(loaded):
    """Each segment of a row is a whole document; labels and weights are shifted by one token."""
    spec = dataclasses.replace(loaded[0], has_weights=True)
    documents = [list(range(10 * i, 10 * i + n)) for i, n in enumerate([10, 3, 9, 2, 8, 7, 10, 2])]
    labels = [[-100 if token % 4 == 0 else token for token in document] for document in documents]
    factors = [np.array(document) + 0.5 for document in documents]
    actual = list(library.pack(documents, spec, labels=labels, weights=factors))
    assert len(actual) == 3
    described = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), rows)
        for rows in (actual[0], train_state.abstract_inputs(spec)[1])
    ]
    assert described[0] == described[1]
    right = [
        [document, [*marks[1:], -100], list(range(len(document))), [*weights_of[1:].tolist(), 0.0]]
        for document, marks, weights_of in zip(documents, labels, factors, strict=True)
    ]
    for rows in actual:
        step_pieces = list(pieces(rows))
        assert all(piece in right for piece in step_pieces)
        assert all(document in step_pieces for document in right), (
            "four rows are at least one epoch"
        )


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
    spec = dataclasses.replace(loaded[0], has_weights="weights" in given)
    with pytest.raises(UserError, match="^" + messages.containing(*says)):
        library.pack(given.pop("documents"), spec, **given)


def test_documents_may_come_from_a_generator(loaded):
    of_list, of_generator = (
        next(library.pack(documents, loaded[0]))
        for documents in ([[1, 2], [3, 4]], (d for d in [[1, 2], [3, 4]]))
    )
    assert np.array_equal(of_list.tokens_BL, of_generator.tokens_BL)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 10}, "steps = 10"),
        ({"run": None}, "run = None"),
        ({"data": {"eval_fraction": 0.1}}, "data.eval_fraction = 0.1"),
        ({"run": {"seed": 1}}, "run.steps, run.epochs: missing"),
        ({"optimizer": {}}, "optimizer.learning_rate: missing"),
    ],
)
def test_settings_of_files_are_refused(changes, field):
    with pytest.raises(UserError, match=field):
        library.load_model("base", SETTINGS | changes)


def test_weights_are_refused_where_the_step_has_none(loaded):
    with pytest.raises(UserError, match="has_weights=True"):
        library.pack([[1, 2]], loaded[0], weights=[[1, 1]])


def test_settings_that_do_not_work_are_refused(base):
    """Two groups cannot share three rows; steps per epoch are unknown before packing."""
    with pytest.raises(UserError) as raised:
        library.load_model(base, SETTINGS | {"batch": {"rows_per_step": 3}})
    assert [problem.partition(" = ")[0] for problem in raised.value.problems] == [
        "batch.rows_per_step"
    ]
    with pytest.raises(UserError, match=r"run\.epochs = 2"):
        library.load_model(base, SETTINGS | {"run": {"epochs": 2}})


@pytest.mark.e2e
@pytest.mark.parametrize("module", [library, pytest.param(trainer, marks=pytest.mark.slow)])
def test_the_example_trains_and_saves(tmp_path, module):
    """The code at the top of the module, as it stands there, on four CPU devices."""
    code = textwrap.dedent(module.__doc__.partition("Example:\n")[2])
    make_folder(tmp_path / "models/base", batches.SMALL_LLAMA)
    (tmp_path / "texts.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": str(pathlib.Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()[:10]]
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert float(steps[0][1]) > 5, "ln 257 is 5.5"
    assert float(steps[-1][1]) < float(steps[0][1]) - 0.2
    before, after = (
        safetensors.numpy.load_file(tmp_path / "models" / name / "model.safetensors")
        for name in ("base", "tuned")
    )
    assert before.keys() == after.keys()
    assert {str(tensor.dtype) for tensor in after.values()} == {"bfloat16"}
    assert tokenizers.load(str(tmp_path / "models/tuned"))("abc")["input_ids"] == [97, 98, 99]
