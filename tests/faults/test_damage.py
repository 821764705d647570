"""Damaged checkpoints are noticed and set aside, and the previous one is used."""

import dataclasses
import errno
import json
import re
import shutil

import orbax.checkpoint as ocp
import pytest

from jaxsp import eval as evaluation
from jaxsp import export, train
from jaxsp.checkpoint import checksums, reader, run_paths
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.core.errors import UserError
from jaxsp.run import config_file
from jaxsp.sharding import sharding
from tests import batches, commands, messages
from tests.faults import damage
from tests.faults.damage import NOTICED, SILENT, Damage

pytestmark = [
    pytest.mark.e2e,
    # orbax reports reads that it gives up when they are collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_FLIPS = 30
NUM_TRUNCATIONS = 5


@pytest.fixture(scope="module", autouse=True)
def shard_small_models_like_large_ones():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARDED_SIZE", 100)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return damage.SavedRun(tmp_path_factory.mktemp("saved"))


@pytest.mark.slow
def test_damage_is_noticed_or_harmless(saved):
    damages = damage.random_damages(
        saved.files(), flips=NUM_FLIPS, truncations=NUM_TRUNCATIONS, seed=1
    )
    outcomes = {damage: saved.outcome(damage) for damage in damages}
    silent = [damage for damage, outcome in outcomes.items() if outcome == SILENT]
    assert silent == []
    assert list(outcomes.values()).count(NOTICED) > NUM_FLIPS / 4


@pytest.mark.slow
def test_missing_files_are_noticed_or_harmless(saved):
    """Some files of orbax are needed only by readers that do not know the structure."""
    outcomes = {saved.kind(path): saved.outcome(Damage(path, "remove")) for path in saved.files()}
    assert SILENT not in outcomes.values()
    for name in ("meta/metadata", "master/manifest.ocdbt", "opt/d/*"):
        assert outcomes[name] == NOTICED, name


def change_meta(saved, folder, name, key, value):
    """Copies the checkpoint, and changes what its metadata records of an array of this item.

    Returns: the copy, and the name of the array.
    """
    copy = shutil.copytree(saved.path, folder / "2")
    meta = reader.read_meta(copy)
    leaf = next(leaf for leaf in meta.arrays if leaf.startswith(name))
    meta.arrays[leaf][key] = value
    reader.write_meta(copy, meta)
    return copy, leaf


@pytest.mark.parametrize("name", ["master", "opt"])
def test_the_error_for_a_different_checksum_names_the_array(saved, name, tmp_path):
    copy, leaf = change_meta(saved, tmp_path, name, "digest", "0" * 16)
    parts = messages.containing(copy, leaf, "0" * 16)
    with pytest.raises(DamagedCheckpointError, match=parts):
        reader.restore(copy, saved.state_shapes, table=saved.table, num_steps=2)


def test_a_different_dtype_is_refused(saved, tmp_path):
    """Orbax would cast it silently."""
    copy, leaf = change_meta(saved, tmp_path, "", "dtype", "bfloat16")
    parts = messages.containing(copy, leaf, "bfloat16", "float32")
    with pytest.raises(DamagedCheckpointError, match=parts):
        reader.restore(copy, saved.state_shapes, table=saved.table, num_steps=2)


def test_a_changed_step_is_noticed(saved, tmp_path):
    copy = shutil.copytree(saved.path, tmp_path / "2")
    path = copy / run_paths.META / "metadata"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(DamagedCheckpointError, match=messages.containing(copy, "meta/metadata")):
        reader.read_meta(copy)


def arguments(folder, *changes):
    """Arguments of a command for the run in a folder."""
    return [str(folder / "config.yaml"), f"run.directory={folder}/run", *changes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    commands.write_documents(folder / "data.jsonl", [64] * 8)
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
        "logging": {"trackers": []},
    }
    config_file.save(config_file.parse(fields), folder / "config.yaml")
    train.main(arguments(folder))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """Copy of the run without its last checkpoint: the latest one is step 4."""
    for name in ("config.yaml", "data.jsonl"):
        shutil.copy(finished / name, tmp_path)
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    return tmp_path


def flip(checkpoint, item="opt"):
    """Flips a bit in every 64 bytes of an item's data.

    Some of the data is never read: orbax writes small files, and then joins them.
    """
    for path in (checkpoint / item).glob("ocdbt.process_0/d/*"):
        data = bytearray(path.read_bytes())
        data[::64] = [byte ^ 4 for byte in data[::64]]
        path.write_bytes(data)


def losses(folder, run="run"):
    """Steps and losses in metrics.jsonl."""
    text = (folder / run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


DAMAGES = {
    "flipped bit": flip,
    "empty folder": lambda checkpoint: [shutil.rmtree(checkpoint), checkpoint.mkdir()],
    "no weights": lambda checkpoint: shutil.rmtree(checkpoint / "master"),
    "no moments": lambda checkpoint: shutil.rmtree(checkpoint / "opt"),
    "invalid JSON": lambda checkpoint: (checkpoint / "meta/metadata").write_text("{"),
}


@pytest.mark.parametrize(
    "kind",
    [
        "flipped bit",
        "empty folder",
        pytest.param("no weights", marks=pytest.mark.slow),
        pytest.param("no moments", marks=pytest.mark.slow),
        pytest.param("invalid JSON", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(finished, run, kind, capfd):
    DAMAGES[kind](run / "run/checkpoints/4")
    train.main(arguments(run))
    (message,) = capfd.readouterr().err.splitlines()
    parts = messages.containing(f"{run}/run/checkpoints/4", f"{run}/run/damaged/4")
    assert re.match(parts, message)
    assert losses(run) == losses(finished), "steps 3 to 6 were repeated"
    assert [path.name for path in (run / "run/damaged").iterdir()] == ["4"]
    assert run_paths.find_latest(run / "run").name == "6"
    start = messages.containing("step 2", f"{run}/run/checkpoints/2")
    assert re.search(start, messages.read_banner(run / "run"))


@pytest.mark.slow
def test_a_second_damaged_checkpoint_of_the_same_step_gets_another_name(run):
    for _ in range(2):
        flip(run / "run/checkpoints/4")
        train.main(arguments(run))
        shutil.rmtree(run / "run/checkpoints/6")
    assert sorted(path.name for path in (run / "run/damaged").iterdir()) == ["4", "4-2"]


@pytest.mark.slow
def test_a_run_with_only_damaged_checkpoints_does_not_start_over(run):
    for step in (2, 4):
        flip(run / f"run/checkpoints/{step}")
    before = losses(run)
    for _ in range(2):
        parts = messages.containing(f"run.directory = {run}/run", f"{run}/run/damaged")
        with pytest.raises(UserError, match=parts):
            train.main(arguments(run))
    assert sorted(path.name for path in (run / "run/damaged").iterdir()) == ["2", "4"]
    assert losses(run) == before


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_moved(finished, run, capfd):
    flip(run / "run/checkpoints/4")
    changes = [f"run.directory={run}/second", f"run.resume={run}/run"]
    train.main(arguments(run, *changes))
    stderr = capfd.readouterr().err
    assert f"{run}/run/checkpoints/4" in stderr
    assert f"{run}/run/damaged" not in stderr
    assert sorted(path.name for path in (run / "run/checkpoints").iterdir()) == ["2", "4"]
    assert losses(run, "second") == losses(finished)[2:]


@pytest.mark.slow
def test_a_damaged_checkpoint_in_run_resume_is_refused(run):
    flip(run / "run/checkpoints/4")
    checkpoints = run / "run/checkpoints"
    parts = messages.containing(checkpoints / "4", checkpoints / "2")
    changes = [f"run.directory={run}/third", f"run.resume={checkpoints}/4"]
    with pytest.raises(UserError, match=parts):
        train.main(arguments(run, *changes))
    assert run_paths.find_latest(run / "run").name == "4"


def test_export_and_evaluation_suggest_the_previous_checkpoint(run):
    flip(run / "run/checkpoints/4", "master")
    checkpoints = run / "run/checkpoints"
    parts = messages.containing(checkpoints / "4", checkpoints / "2")
    with pytest.raises(UserError, match=parts):
        export.main([str(run / "run"), str(run / "out")])
    change = f"data.eval=[{{source: {run}/data.jsonl, format: tokens}}]"
    with pytest.raises(UserError, match=parts):
        evaluation.main([str(run / "run"), change])
    export.main([str(run / "run/checkpoints/2"), str(run / "out")])


@pytest.mark.parametrize(
    ("number", "is_damage"), [(errno.ENOENT, True), (errno.EACCES, False), (errno.EIO, False)]
)
def test_a_failing_disk_is_not_damage(saved, monkeypatch, number, is_damage):
    """Otherwise a disk that does not answer would set aside all checkpoints."""

    def fail(*_, **__):
        raise OSError(number, "requested by the test")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(DamagedCheckpointError if is_damage else OSError) as error:
        saved.restore()
    assert isinstance(error.value, DamagedCheckpointError) == is_damage


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 2), (1, 1, 1), (2, 2, 2)])
def test_checksums_are_the_same_on_every_mesh(saved, sizes):
    """2 devices store other padding than 8, and one device stores none."""
    spec = dataclasses.replace(saved.spec, mesh=batches.mesh(*sizes))
    assert saved.restore(spec) == saved.expected
    weights = reader.read_weights(saved.path, saved.table)
    for name, array in checksums.name_leaves(weights).items():
        assert saved.expected[f"master/{name}"] == array.tobytes(), name
