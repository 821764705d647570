"""A non-finite step changes no weight, records its documents, and is skipped or stops the run."""

import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.checkpoint import reader, run_paths
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.data import tokenizers
from jaxsp.run import build, config_file, metrics
from jaxsp.sharding import host_offload
from jaxsp.training import train_state
from jaxsp.training.train_state import TrainState
from tests import batches, commands, messages, small_runs, tolerances
from tests.small_runs import make_fields, train
from tests.training import runs

pytestmark = pytest.mark.e2e

MODEL = batches.SMALL_LLAMA
NEW = 256
"""Token whose embedding is NaN."""

BAD = {3: 40, 17: 100}
"""Offset of that token by record. The second record is split, and its second segment has it."""

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with records, and with a model that has the NaN embedding."""
    folder = tmp_path_factory.mktemp("bad")
    random = np.random.default_rng(0)
    records = [
        random.integers(0, NEW, 110 if number in BAD else 60).tolist() for number in range(20)
    ]
    for number, offset in BAD.items():
        records[number][offset] = NEW
    lines = [json.dumps({"input_ids": record}) for record in records]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    small_runs.write_model(folder / "hf", MODEL, std=0.02)
    tokenizers.make_byte_tokenizer().save_pretrained(folder / "hf")
    path = folder / "hf/model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.embed_tokens.weight"][NEW] = np.nan
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return folder


def make_config(folder, *words):
    source = {"source": str(folder / "data.jsonl"), "format": "tokens", "name": "notes"}
    sections = {
        "run": {"directory": str(folder / "unused"), "steps": STEPS},
        "model": {"source": str(folder / "hf")},
        "mesh": {"data": 1},
        "data": {"train": [source]},
        "batch": {"rows_per_step": 2},
        "optimizer": {"schedule": "linear"},
    }
    return config_file.parse(make_fields(folder, **sections), words)


def lines(directory, name=metrics.METRICS_FILE):
    return commands.read_lines(directory / name)


@pytest.fixture(scope="module")
def skipped(folder):
    """Directories of the same run on two meshes, with non-finite steps skipped."""
    for name, mesh in {"1x1": [], "2x2": ["mesh.data=2", "mesh.seq=2"]}.items():
        train(make_config(folder, f"run.directory={folder}/{name}", "run.on_nonfinite=skip", *mesh))
    return folder / "1x1", folder / "2x2"


def test_nonfinite_step_is_recorded_with_its_documents_identically_on_every_mesh(skipped, folder):
    first, second = (lines(directory, metrics.NONFINITE_FILE) for directory in skipped)
    rates = [[line.pop("learning_rate") for line in recorded] for recorded in (first, second)]
    assert rates[0] == pytest.approx(rates[1], rel=tolerances.MESH)
    assert first == second
    data = folder / "data.jsonl"
    for line in first:
        assert (line["loss"], line["grad_norm"]) == ("nan", "nan")
        step = line["step"]
        assert line["rows"] == [2 * step - 2, 2 * step - 1]
        segments = line["documents"]
        assert [segment["row"] for segment in segments] == line["rows"], "no two fit in a row"
        num_bad = 0
        for segment in segments:
            record = segment["record_index"]
            assert segment["source"] == "notes"
            assert segment["location"] == f"{data}, line {record + 1}"
            end = segment["first_token"] + segment["tokens"]
            num_bad += segment["first_token"] <= BAD.get(record, -1) < end
        assert num_bad == 1
    # of the record that is split, only the second segment has the token
    assert any(segment["first_token"] == 64 for line in first for segment in line["documents"])


def test_skipped_step_counts_in_the_schedule_and_changes_nothing(skipped, folder):
    directory, _ = skipped
    all_lines = lines(directory)
    bad = {line["step"] for line in lines(directory, metrics.NONFINITE_FILE)}
    assert [line["step"] for line in all_lines] == [*range(1, STEPS + 1)]
    assert {line["step"] for line in all_lines if line["loss"] is None} == bad
    assert {line["step"] for line in all_lines if line["token_accuracy"] is None} == bad
    assert 2 <= len(bad) < STEPS / 2
    assert [line["learning_rate"] for line in all_lines] == pytest.approx(
        [0.01 * (1 - n / STEPS) for n in range(STEPS)]
    )
    spec = build.build_training(make_config(folder), devices=jax.devices()[:1]).spec
    state = reader.restore(
        run_paths.find_latest(directory),
        train_state.abstract_inputs(spec)[0],
        table=spec.table,
        num_steps=STEPS,
    )
    counts = [np.ravel(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == np.int32]
    assert set(np.concatenate(counts).tolist()) == {STEPS - len(bad)}, (
        "AdamW does not count skipped steps"
    )


def test_run_stops_at_the_limit_and_continues_after_the_step(folder, skipped, tmp_path):
    bad = [line["step"] for line in lines(skipped[0], metrics.NONFINITE_FILE)]
    words = ["run.on_nonfinite=skip", "run.max_nonfinite_steps=1"]
    with pytest.raises(NeedsAttentionError) as stopped:
        train(make_config(folder, f"run.directory={tmp_path}/run", *words))
    file = f"{tmp_path}/run/{metrics.NONFINITE_FILE}"
    for part in (f"step {bad[1]}", "run.max_nonfinite_steps = 1", file):
        assert re.search(messages.containing(part), str(stopped.value))
    recorded = [line["step"] for line in lines(tmp_path / "run", metrics.NONFINITE_FILE)]
    assert recorded[:2] == bad[:2]
    train(make_config(folder, f"run.directory={tmp_path}/run", "run.on_nonfinite=skip"))
    fields = ("step", "loss", "grad_norm", "learning_rate", "num_tokens_total")
    resumed, straight = (
        [[line[field] for field in fields] for line in lines(path)]
        for path in (tmp_path / "run", skipped[0])
    )
    assert resumed == straight
    recorded = lines(tmp_path / "run", metrics.NONFINITE_FILE)
    assert recorded == lines(skipped[0], metrics.NONFINITE_FILE), "each step once"


@pytest.mark.usefixtures("small_shards")
def test_nonfinite_step_changes_no_bit_of_the_state_on_the_host():
    if jax.__version_info__ < host_offload.MIN_RELEASE:
        pytest.skip(
            "arrays in host memory inside shard_map need jax 0.11.1, which needs Python 3.12"
        )
    config = batches.make_config(
        name="adamw", learning_rate=1e-2, weight_decay=0.1, memory={"offload_optimizer": "state"}
    )
    run = runs.compile_in_thread((1, 2, 2), config=config, functions=("step",)).result()
    state, _ = run.step(run.state(runs.draw_weights(runs.MODEL)), run.rows(runs.ROWS))
    head = np.array(state.master["head"])
    head[5] = np.nan
    head = jax.device_put(head, state.master["head"].sharding)
    state = TrainState(
        master=state.master | {"head": head}, opt_state=state.opt_state, step=state.step
    )
    before = jax.tree.map(lambda x: np.array(x), state)
    after, results = run.step(state, run.rows(runs.ROWS))
    assert not results["is_finite"]
    assert batches.is_bitwise_equal(
        (after.master, after.opt_state), (before.master, before.opt_state)
    )
    assert int(after.step) == 2
