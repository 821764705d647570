"""Finding a run's checkpoints by their folders."""

import pytest

from jaxsp.config.run_schema import RunConfig
from jaxsp.run import resume
from jaxsp.runtime import run_paths


def make_checkpoint(folder):
    for item in (run_paths.MASTER, run_paths.META):
        (folder / item).mkdir(parents=True)
    return folder


def make_run(folder, *steps):
    for step in steps:
        make_checkpoint(folder / run_paths.CHECKPOINTS_DIR / str(step))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run_paths.CONFIG_FILE).write_text("")
    return folder


@pytest.mark.parametrize("name", ["1", "001", "2024"])
def test_run_directory_with_a_number_as_name_is_not_a_checkpoint(tmp_path, name):
    run = make_run(tmp_path / "checkpoints" / name, 2, 10)
    newest = run / "checkpoints/10"
    assert run_paths.find_latest(run) == newest
    assert run_paths.find_latest(newest) == newest
    assert resume.find_checkpoint(RunConfig(directory=str(run), steps=20)) == newest
    assert run_paths.find_latest(tmp_path / "checkpoints") is None, (
        "the folder of runs has no checkpoint"
    )


@pytest.mark.parametrize("name", ["checkpoints/1", "checkpoints/001", "runs/1"])
def test_run_directory_without_checkpoints_is_not_a_checkpoint(tmp_path, name):
    run = tmp_path / name
    run.mkdir(parents=True)  # as run_dir.lock makes it before the checkpoint is looked for
    config = RunConfig(directory=str(run), steps=20)
    assert resume.find_checkpoint(config) is None
    make_run(run)
    assert run_paths.find_latest(run) is None
    assert resume.find_checkpoint(config) is None


def test_damaged_checkpoint_without_files_is_still_found(tmp_path):
    run = make_run(tmp_path / "checkpoints/1", 2)
    (run / "checkpoints/4").mkdir()
    assert (
        run_paths.find_latest(run)
        == run_paths.find_latest(run / "checkpoints/4")
        == run / "checkpoints/4"
    )
    assert run_paths.find_latest(run, exclude=[run / "checkpoints/4"]) == run / "checkpoints/2"
