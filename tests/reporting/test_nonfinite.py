"""A step whose numbers are not finite changes nothing, is told with its documents, and stops the run or is skipped."""

import json
import re

import jax
import numpy as np
import pytest
import rich.console

from jaxsp.checkpoint import reader
from jaxsp.config import config_file
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import weights
from jaxsp.model import decoder
from jaxsp.reporting import metrics
from jaxsp.reporting.metrics import MetricsWriter
from jaxsp.run import build, trainer
from jaxsp.runtime import run_paths
from jaxsp.training import memory_options, train_step
from jaxsp.training.train_step import TrainState
from tests import batches, messages, tolerances
from tests.training import runs

pytestmark = pytest.mark.e2e

MODEL = batches.SMALL_LLAMA
NEW = 256
"""A token that the model was given, and whose embedding nobody has filled: NaN."""

BAD = {3: 40, 17: 100}
"""Records with that token, and where it stands; the second is split, and its second part has it."""

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records, and the model with its hole."""
    folder, random = tmp_path_factory.mktemp("bad"), np.random.default_rng(0)
    records = [
        random.integers(0, NEW, 110 if number in BAD else 60).tolist() for number in range(20)
    ]
    for number, place in BAD.items():
        records[number][place] = NEW
    (folder / "data.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": one}) for one in records), encoding="utf-8"
    )
    program, material = build.build_training(
        settings(folder, "model.source=null", f"model.config={json.dumps(MODEL)}"),
        devices=jax.devices()[:1],
    )
    whole = jax.tree.map(
        lambda row, x: np.array(x)[..., *map(slice, row.shape)],
        program.table,
        material.make_weights(),
    )
    whole["embedding"][NEW] = np.nan
    tokenizer = tokenizers.make_byte_tokenizer()
    weights.export_model(
        whole,
        table=decoder.param_table(program.model),
        fields=MODEL,
        tokenizer=tokenizer,
        directory=folder / "hf",
        dtype="float32",
    )
    return folder


def settings(folder, *words):
    fields = {
        "run": {"directory": str(folder / "unused"), "steps": STEPS},
        "model": {"source": str(folder / "hf"), "compute_dtype": "float32"},
        "mesh": {"data": 1},
        "data": {
            "train": [{"source": str(folder / "data.jsonl"), "format": "tokens", "name": "notes"}],
            "row_tokens": 64,
        },
        "batch": {"rows_per_step": 2},
        "optimizer": {"learning_rate": 0.01, "schedule": "linear"},
        "logging": {"tensorboard": False},
    }
    return config_file.parse(fields, words)


def train(chosen):
    devices = jax.devices()[: chosen.mesh.data * chosen.mesh.seq]
    program, material = build.build_training(chosen, devices=devices)
    trainer.train(program, material, rich.console.Console(quiet=True))
    return program, material


def lines(directory, name=metrics.METRICS_FILE):
    return [
        json.loads(line) for line in (directory / name).read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def skipped(folder):
    """The same run on two meshes, which leaves bad steps out."""
    for name, mesh in {"1x1": [], "2x2": ["mesh.data=2", "mesh.seq=2"]}.items():
        train(settings(folder, f"run.directory={folder}/{name}", "run.on_nonfinite=skip", *mesh))
    return folder / "1x1", folder / "2x2"


def test_a_bad_step_is_told_with_its_rows_and_documents_the_same_on_every_mesh(skipped, folder):
    one, other = (lines(directory, metrics.NONFINITE_FILE) for directory in skipped)
    rates = [[line.pop("learning_rate") for line in found] for found in (one, other)]
    assert rates[0] == pytest.approx(rates[1], rel=tolerances.MESH)
    assert one == other
    data = folder / "data.jsonl"
    for line in one:
        assert (line["loss"], line["grad_norm"], line["row_tokens"]) == ("nan", "nan", 64)
        pieces = line["documents"]
        assert [piece["row"] for piece in pieces] == line["rows"], (
            "no two of these documents fit a row"
        )
        assert {piece["source"] for piece in pieces} == {"notes"}
        assert all(
            piece["location"] == f"{data}, line {piece['record_index'] + 1}" for piece in pieces
        )
        guilty = [
            piece
            for piece in pieces
            if piece["first_token"]
            <= BAD.get(piece["record_index"], -1)
            < piece["first_token"] + piece["tokens"]
        ]
        assert len(guilty) == 1
    rows = [set(line["rows"]) for line in one]
    assert all(
        line["rows"] == sorted({2 * line["step"] - 2, 2 * line["step"] - 1}) for line in one
    ), rows
    # the other part of a document that is split is good
    assert any(piece["first_token"] == 64 for line in one for piece in line["documents"])


def test_a_skipped_step_is_a_step_of_the_schedule_and_changes_nothing(skipped, folder):
    directory, _ = skipped
    all_lines, bad = (
        lines(directory),
        {line["step"] for line in lines(directory, metrics.NONFINITE_FILE)},
    )
    assert [line["step"] for line in all_lines] == [*range(1, STEPS + 1)]
    assert {line["step"] for line in all_lines if line["loss"] is None} == bad
    assert {line["step"] for line in all_lines if line["token_accuracy"] is None} == bad
    assert 2 <= len(bad) < STEPS / 2
    assert [line["learning_rate"] for line in all_lines] == pytest.approx(
        [0.01 * (1 - n / STEPS) for n in range(STEPS)]
    )
    program, _ = build.build_training(settings(folder), devices=jax.devices()[:1])
    state = reader.restore(
        run_paths.find_latest(directory),
        train_step.abstract_inputs(program)[0],
        table=program.table,
        num_steps=STEPS,
    )
    counts = [np.ravel(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == np.int32]
    assert set(np.concatenate(counts).tolist()) == {STEPS - len(bad)}, (
        "AdamW counts the steps that it has seen"
    )


@pytest.mark.parametrize(
    ("words", "which", "says"),
    [
        (["run.on_nonfinite=stop"], 0, "run.on_nonfinite=skip"),
        pytest.param(
            ["run.on_nonfinite=skip", "run.max_nonfinite_steps=1"],
            1,
            "run.max_nonfinite_steps = 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_stops_where_it_was_asked_to_and_goes_on_behind_the_step(
    folder, skipped, tmp_path, words, which, says
):
    bad = [line["step"] for line in lines(skipped[0], metrics.NONFINITE_FILE)]
    chosen = settings(folder, f"run.directory={tmp_path}/run", *words)
    with pytest.raises(NeedsAttentionError) as stopped:
        train(chosen)
    for part in (f"step {bad[which]}", says, f"{tmp_path}/run/{metrics.NONFINITE_FILE}"):
        assert re.search(messages.holding(part), str(stopped.value))
    assert [line["step"] for line in lines(tmp_path / "run", metrics.NONFINITE_FILE)][
        : which + 1
    ] == bad[: which + 1]
    train(settings(folder, f"run.directory={tmp_path}/run", "run.on_nonfinite=skip"))
    ours, straight = (
        [line | {"step_s": 0} for line in lines(path)] for path in (tmp_path / "run", skipped[0])
    )
    same = ("step", "loss", "grad_norm", "learning_rate", "num_tokens_total")
    assert [[line[name] for name in same] for line in ours] == [
        [line[name] for name in same] for line in straight
    ]
    assert lines(tmp_path / "run", metrics.NONFINITE_FILE) == lines(
        skipped[0], metrics.NONFINITE_FILE
    ), "each once"


def test_lines_of_steps_that_are_done_again_go_and_so_does_one_that_was_cut(tmp_path):
    for name in (metrics.METRICS_FILE, metrics.NONFINITE_FILE):
        text = "".join(json.dumps({"step": step}) + "\n" for step in (2, 5, 7)) + '{"step": 4, "lo'
        (tmp_path / name).write_text(text)
    with MetricsWriter(tmp_path, from_step=5, tensorboard=False):
        pass
    assert [
        [line["step"] for line in lines(tmp_path, name)]
        for name in (metrics.METRICS_FILE, metrics.NONFINITE_FILE)
    ] == [
        [2, 5],
        [2, 5],
    ]
    (tmp_path / "new").mkdir()
    with MetricsWriter(tmp_path / "new", from_step=0, tensorboard=False):
        pass
    assert not (tmp_path / "new" / metrics.NONFINITE_FILE).exists()


MESHES = {"8 groups": ((1, 8, 1), "none"), "state on the host": ((1, 2, 2), "state")}


@pytest.mark.parametrize(
    "name", [pytest.param("8 groups", marks=pytest.mark.slow), "state on the host"]
)
@pytest.mark.usefixtures("small_shards")
def test_a_bad_step_leaves_every_bit_of_the_state_on_any_mesh(name):
    sizes, offloaded = MESHES[name]
    if offloaded != "none" and jax.__version_info__ < memory_options.MIN_HOST_STATE_RELEASE:
        pytest.skip(
            "arrays in host memory inside shard_map need jax 0.11.1, which needs Python 3.12"
        )
    asked = batches.settings(
        name="adamw", learning_rate=1e-2, weight_decay=0.1, memory={"offload_optimizer": offloaded}
    )
    run = runs.compiling(sizes, config=asked, want=("step",)).result()
    state, _ = run.step(run.state(runs.whole_weights(runs.MODEL)), run.rows(runs.ROWS))
    head = np.array(state.master["head"])
    head[5] = np.nan
    head = jax.device_put(head, state.master["head"].sharding)
    state = TrainState(
        master=state.master | {"head": head}, opt_state=state.opt_state, step=state.step
    )
    before = jax.tree.map(lambda x: np.array(x), state)
    after, numbers = run.step(state, run.rows(runs.ROWS))
    assert not numbers.is_finite
    assert batches.same_bits((after.master, after.opt_state), (before.master, before.opt_state))
    assert int(after.step) == 2
