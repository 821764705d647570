"""Damaged checkpoints are noticed and set aside, and the previous one is used."""

import contextlib
import dataclasses
import errno
import pathlib
import re
import shutil
from collections.abc import Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxsp import eval as evaluation
from jaxsp import export, train
from jaxsp.checkpoint import checksums, reader, run_paths
from jaxsp.checkpoint.reader import DamagedCheckpointError
from jaxsp.core.errors import UserError
from jaxsp.run import build, config_file
from jaxsp.training import train_state
from tests import batches, commands, messages, small_runs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("small_shards"),
    # orbax reports reads that it gives up when they are collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_FLIPS = 200
NUM_TRUNCATIONS = 20


class SavedRun:
    """A checkpoint of a small run, and its content."""

    def __init__(self, folder: pathlib.Path):
        commands.write_documents(folder / "train.jsonl", [64] * 8)
        model = batches.SMALL_LLAMA | {"intermediate_size": 111}
        fields = small_runs.make_fields(
            folder,
            run={"steps": 2, "save_every": None},
            model={"config": model},
            mesh={"data": 2, "seq": 4},
            batch={"rows_per_step": 8},
        )
        config = config_file.parse(fields)
        self.spec = build.build_training(config, devices=jax.devices()[:8]).spec
        small_runs.train(config)
        self.path = folder / "run/checkpoints/2"
        self.expected = self.restore()

    def restore(self, mesh=None) -> dict[str, bytes]:
        """Restores everything, by name, without padding, on the mesh of the run or another."""
        spec = dataclasses.replace(self.spec, mesh=mesh or self.spec.mesh)
        shapes = train_state.abstract_inputs(spec)[0]
        meta = reader.read_meta(self.path)
        state = reader.restore(self.path, shapes, table=spec.table, num_steps=meta.step)
        items = {"master": state.master, "opt": state.opt_state}
        unpadded = checksums.unpadded_shapes(spec.table, items)
        content = {"meta": repr(meta).encode()}
        for name, array in checksums.name_leaves(items).items():
            slices = tuple(map(slice, unpadded[name].shape))
            content[name] = np.asarray(array)[slices].tobytes()
        return content

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_shards):
    return SavedRun(tmp_path_factory.mktemp("saved"))


@contextlib.contextmanager
def damaged(path: pathlib.Path, *, bit: int | None = None, length: int = 0) -> Iterator[None]:
    """Context in which a bit of a file is flipped, or its end is missing."""
    content = path.read_bytes()
    changed = bytearray(content) if bit is not None else content[:length]
    if bit is not None:
        changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(content)


def is_noticed(saved: SavedRun) -> bool:
    """False if the damage is harmless. Asserts that it is not silent."""
    try:
        content = saved.restore()
    except UserError:
        return True
    assert content == saved.expected
    return False


@pytest.mark.slow
def test_damage_is_noticed_or_harmless(saved):
    """Every other damage hits each file, the rest each byte, with equal probability."""
    rng = np.random.default_rng(1)
    files = [path for path in saved.files() if path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files])
    num_noticed = 0
    for number in range(NUM_FLIPS + NUM_TRUNCATIONS):
        probabilities = None if number % 2 else sizes / sizes.sum()
        path = files[rng.choice(len(files), p=probabilities)]
        size = path.stat().st_size
        damage = {"bit": int(rng.integers(8 * size))}
        if number >= NUM_FLIPS:
            damage = {"length": int(rng.integers(size))}
        with damaged(path, **damage):
            num_noticed += is_noticed(saved)
    assert num_noticed > NUM_FLIPS / 4


@pytest.mark.slow
def test_missing_files_are_noticed_or_harmless(saved):
    """Some files of orbax are needed only by readers that do not know the structure."""
    outcomes = {}
    for path in saved.files():
        with damaged(path):
            path.unlink()
            kind = re.sub(r"[0-9a-f]{16,}", "*", str(path.relative_to(saved.path)))
            outcomes[kind] = is_noticed(saved)
    assert all(outcomes[name] for name in ("meta/metadata", "master/manifest.ocdbt", "opt/d/*"))


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [("master", "digest", "0" * 16), ("opt", "digest", "0" * 16), ("", "dtype", "bfloat16")],
)
def test_the_error_for_a_changed_array_names_it(saved, tmp_path, item, key, value):
    """Orbax would cast another dtype silently."""
    copy = shutil.copytree(saved.path, tmp_path / "2")
    meta = reader.read_meta(copy)
    leaf = next(leaf for leaf in meta.arrays if leaf.startswith(item))
    meta.arrays[leaf][key] = value
    reader.write_meta(copy, meta)
    shapes = train_state.abstract_inputs(saved.spec)[0]
    with pytest.raises(DamagedCheckpointError, match=messages.containing(copy, leaf, value)):
        reader.restore(copy, shapes, table=saved.spec.table, num_steps=2)


def test_a_changed_step_is_noticed(saved, tmp_path):
    copy = shutil.copytree(saved.path, tmp_path / "2")
    path = copy / run_paths.META_FILE
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(DamagedCheckpointError, match=messages.containing(copy, "meta/metadata")):
        reader.read_meta(copy)


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
    assert saved.restore(batches.mesh(*sizes)) == saved.expected
    weights = reader.read_weights(saved.path, saved.spec.table)
    for name, array in checksums.name_leaves(weights).items():
        assert saved.expected[f"master/{name}"] == array.tobytes(), name


def arguments(folder, *changes):
    """Arguments of a command for the run in a folder."""
    return [str(folder / "config.yaml"), f"run.directory={folder}/run", *changes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_shards):
    """A run of six steps, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    commands.write_documents(folder / "train.jsonl", [64] * 8)
    fields = small_runs.make_fields(
        folder,
        run={"directory": "elsewhere", "steps": 6, "save_every": 2},
        model={"config": batches.SMALL_LLAMA},
        mesh={"seq": 2, "data": 4},
        batch={"rows_per_step": 4},
        checkpoint={"keep_latest": 3},
    )
    config_file.save(config_file.parse(fields), folder / "config.yaml")
    train.main(arguments(folder))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """Copy of the run without its last checkpoint: the latest one is step 4."""
    shutil.copy(finished / "config.yaml", tmp_path)
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
    return [(x["step"], x["loss"]) for x in commands.read_lines(folder / run / "metrics.jsonl")]


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
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*DAMAGES][2:]),
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
def test_a_run_with_only_damaged_checkpoints_does_not_start_over(run):
    flip(run / "run/checkpoints/4")
    train.main(arguments(run))
    shutil.rmtree(run / "run/checkpoints/6")
    for step in (2, 4):
        flip(run / f"run/checkpoints/{step}")
    before = losses(run)
    for _ in range(2):
        parts = messages.containing(f"run.directory = {run}/run", f"{run}/run/damaged")
        with pytest.raises(UserError, match=parts):
            train.main(arguments(run))
    assert sorted(path.name for path in (run / "run/damaged").iterdir()) == ["2", "4", "4-2"]
    assert losses(run) == before


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_moved(finished, run, capfd):
    flip(run / "run/checkpoints/4")
    checkpoints = run / "run/checkpoints"
    changes = [f"run.directory={run}/second", f"run.resume={checkpoints}/4"]
    with pytest.raises(UserError, match=messages.containing(checkpoints / "4", checkpoints / "2")):
        train.main(arguments(run, *changes))
    train.main(arguments(run, changes[0], f"run.resume={run}/run"))
    stderr = capfd.readouterr().err
    assert f"{run}/run/checkpoints/4" in stderr
    assert f"{run}/run/damaged" not in stderr
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4"]
    assert losses(run, "second") == losses(finished)[2:]


def test_export_and_evaluation_suggest_the_previous_checkpoint(finished, run):
    flip(run / "run/checkpoints/4", "master")
    checkpoints = run / "run/checkpoints"
    parts = messages.containing(checkpoints / "4", checkpoints / "2")
    with pytest.raises(UserError, match=parts):
        export.main([str(run / "run"), str(run / "out")])
    change = f"data.eval=[{{source: {finished}/train.jsonl, format: tokens}}]"
    with pytest.raises(UserError, match=parts):
        evaluation.main([str(run / "run"), change])
    export.main([str(run / "run/checkpoints/2"), str(run / "out")])
