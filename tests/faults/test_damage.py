"""Checkpoints that are damaged are noticed, set aside, and the one before them is used."""

import dataclasses
import errno
import json
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxsp import eval as evaluation
from jaxsp import export, train
from jaxsp.checkpoint import checksums, reader
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.config import config_file
from jaxsp.core.errors import UserError
from jaxsp.runtime import run_paths
from jaxsp.training import sharding
from tests import batches, messages
from tests.faults import damage

pytestmark = pytest.mark.e2e

FLIPS, TRUNCATIONS = 30, 5


@pytest.fixture(scope="module", autouse=True)
def small_models_are_sharded_as_large_ones():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARDED_SIZE", 100)
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return damage.Kept(tmp_path_factory.mktemp("kept"))


@pytest.mark.slow
def test_damage_is_noticed_or_harmless(kept):
    damages = damage.random_damages(kept.files(), flips=FLIPS, truncations=TRUNCATIONS, seed=1)
    found = {(kept.kind(one.path), one.what, one.at): kept.outcome(one) for one in damages}
    assert [one for one, outcome in found.items() if outcome == damage.SILENT] == []
    assert list(found.values()).count(damage.NOTICED) > FLIPS / 4


@pytest.mark.slow
def test_files_that_are_missing_are_noticed_or_harmless(kept):
    """Of orbax's files some are there for readers that do not know what they look for."""
    found = {kept.kind(path): kept.outcome(damage.Damage(path, "remove")) for path in kept.files()}
    assert damage.SILENT not in found.values()
    assert {found[name] for name in ("meta/metadata", "master/manifest.ocdbt", "opt/d/*")} == {
        damage.NOTICED
    }


@pytest.mark.parametrize("name", ["master", "opt"])
def test_a_digest_that_differs_names_the_array(kept, name, tmp_path):
    """The arrays are those of the checkpoint, and one of the digests is not."""
    copy = shutil.copytree(kept.path, tmp_path / "2")
    meta = reader.read_meta(copy)
    leaf = next(one for one in meta.arrays if one.startswith(name))
    meta.arrays[leaf]["digest"] = "0" * 16
    (copy / run_paths.META / "metadata").write_text(reader.to_json(meta))
    says = messages.holding(copy, leaf, "0" * 16)
    with pytest.raises(DamagedCheckpointError, match=says):
        reader.restore(copy, kept.like, table=kept.table, num_steps=2)


def test_another_dtype_is_refused(kept, tmp_path):
    """orbax would cast it, and say nothing."""
    copy = shutil.copytree(kept.path, tmp_path / "2")
    meta = reader.read_meta(copy)
    leaf = next(iter(meta.arrays))
    meta.arrays[leaf]["dtype"] = "bfloat16"
    (copy / run_paths.META / "metadata").write_text(reader.to_json(meta))
    says = messages.holding(copy, leaf, "bfloat16", "float32")
    with pytest.raises(DamagedCheckpointError, match=says):
        reader.restore(copy, kept.like, table=kept.table, num_steps=2)


def test_a_count_that_was_changed_is_noticed(kept, tmp_path):
    copy = shutil.copytree(kept.path, tmp_path / "2")
    path = copy / run_paths.META / "metadata"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(DamagedCheckpointError, match=messages.holding(copy, "meta/metadata")):
        reader.read_meta(copy)


# What a run does about it


def words(folder, *more):
    return [
        str(folder / "config.yaml"),
        f"run.directory={folder}/run",
        *more,
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    random = np.random.default_rng(0)
    records = [json.dumps({"input_ids": random.integers(0, 257, 64).tolist()}) for _ in range(8)]
    (folder / "data.jsonl").write_text("\n".join(records), encoding="utf-8")
    fields = {
        "run": {"directory": "elsewhere", "steps": 6, "save_every": 2},
        "model": {"config": batches.SMALL_LLAMA, "compute_dtype": "float32"},
        "mesh": {"seq": 2, "data": 4},
        "data": {
            "train": [{"source": str(folder / "data.jsonl"), "format": "tokens"}],
            "row_tokens": 64,
        },
        "batch": {"rows_per_step": 4},
        "optimizer": {"learning_rate": 0.1},
        "checkpoint": {"keep_latest": 3},
        "logging": {"tensorboard": False},
    }
    config_file.save(config_file.parse(fields), folder / "config.yaml")
    train.main(words(folder))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run as it would be, had it been stopped before its end: the newest checkpoint is that of step 4."""
    for name in ("config.yaml", "data.jsonl"):
        shutil.copy(finished / name, tmp_path)
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    return tmp_path


def flip(step, item="opt"):
    """A bit in every 64 bytes of an item's data, some of which nobody reads: orbax writes small pieces, then joins them."""
    for path in (step / item).glob("ocdbt.process_0/d/*"):
        data = bytearray(path.read_bytes())
        data[::64] = [byte ^ 4 for byte in data[::64]]
        path.write_bytes(data)


def lines(folder):
    found = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in found]


DAMAGES = {
    "flipped bit": flip,
    "empty folder": lambda step: [shutil.rmtree(step), step.mkdir()],
    "weights gone": lambda step: shutil.rmtree(step / "master"),
    "averages gone": lambda step: shutil.rmtree(step / "opt"),
    "no JSON": lambda step: (step / "meta/metadata").write_text("{"),
}


QUICK = ("flipped bit", "empty folder")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what not in QUICK)) for what in DAMAGES]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(finished, run, what, capfd):
    DAMAGES[what](run / "run/checkpoints/4")
    train.main(words(run))
    said = [
        line
        for line in capfd.readouterr().err.splitlines()
        if "cudart_stub" not in line and "absl" not in line
    ]
    assert len(said) == 1
    assert re.match(messages.holding(f"{run}/run/checkpoints/4", f"{run}/run/damaged/4"), said[0])
    assert lines(run) == lines(finished), "steps 3 to 6 were made again"
    assert [path.name for path in (run / "run/damaged").iterdir()] == ["4"]
    assert run_paths.find_latest(run / "run").name == "6"
    begins = messages.holding("step 2", f"{run}/run/checkpoints/2")
    assert re.search(begins, (run / "run/banner.txt").read_text())


@pytest.mark.slow
def test_a_second_one_of_the_same_step_is_set_aside_beside_the_first(run):
    for _ in range(2):
        flip(run / "run/checkpoints/4")
        train.main(words(run))
        shutil.rmtree(run / "run/checkpoints/6")
    assert sorted(path.name for path in (run / "run/damaged").iterdir()) == ["4", "4-2"]


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew(run):
    for step in (2, 4):
        flip(run / f"run/checkpoints/{step}")
    before = lines(run)
    for _ in range(2):
        says = messages.holding(f"run.directory = {run}/run", f"{run}/run/damaged")
        with pytest.raises(UserError, match=says):
            train.main(words(run))
    assert sorted(path.name for path in (run / "run/damaged").iterdir()) == ["2", "4"]
    assert lines(run) == before


@pytest.mark.slow
def test_nothing_is_moved_in_a_run_that_another_goes_on_from(finished, run, capfd):
    flip(run / "run/checkpoints/4")
    more = [f"run.directory={run}/second", f"run.resume={run}/run"]
    train.main(words(run, *more))
    said = capfd.readouterr().err
    assert f"{run}/run/checkpoints/4" in said
    assert f"{run}/run/damaged" not in said, "it is left where it is"
    assert sorted(path.name for path in (run / "run/checkpoints").iterdir()) == ["2", "4"]
    second = [json.loads(line) for line in (run / "second/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in second] == lines(finished)[2:]


def test_a_damaged_checkpoint_that_was_named_is_refused(run):
    flip(run / "run/checkpoints/4")
    checkpoints = run / "run/checkpoints"
    says = messages.holding(checkpoints / "4", checkpoints / "2")
    with pytest.raises(UserError, match=says):
        train.main(words(run, f"run.directory={run}/third", f"run.resume={run}/run/checkpoints/4"))
    assert run_paths.find_latest(run / "run").name == "4"


def test_export_and_evaluation_name_the_one_before(run):
    flip(run / "run/checkpoints/4", "master")
    checkpoints = run / "run/checkpoints"
    says = messages.holding(checkpoints / "4", checkpoints / "2")
    with pytest.raises(UserError, match=says):
        export.main([str(run / "run"), str(run / "out")])
    asked = f"data.eval=[{{source: {run}/data.jsonl, format: tokens}}]"
    with pytest.raises(UserError, match=says):
        evaluation.main([str(run / "run"), asked])
    export.main([str(run / "run/checkpoints/2"), str(run / "out")])


@pytest.mark.parametrize(
    ("number", "damaged"), [(errno.ENOENT, True), (errno.EACCES, False), (errno.EIO, False)]
)
def test_a_machine_that_is_not_well_is_no_damage(kept, monkeypatch, number, damaged):
    """All checkpoints would be set aside, one after another, because of a disk that does not answer."""

    def fail(*_, **__):
        raise OSError(number, "as the test asked for")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(DamagedCheckpointError if damaged else OSError) as raised:
        kept.found()
    assert isinstance(raised.value, DamagedCheckpointError) == damaged


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 2), (1, 1, 1), (2, 2, 2)])
def test_the_digests_hold_on_every_mesh(kept, sizes):
    """On 2 devices other zeros are stored than on 8, and on one none."""
    program = dataclasses.replace(kept.program, mesh=batches.mesh(*sizes))
    assert kept.found(program) == kept.right
    master = reader.read_weights(kept.path, kept.table)
    whole = {
        f"master/{name}": array.tobytes() for name, array in checksums.name_leaves(master).items()
    }
    assert whole.items() <= kept.right.items()
