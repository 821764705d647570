"""A run that is done leaves no checkpoint too many, and one whose checkpoints are gone stops."""

import shutil
import types

import pytest

from jaxsp.checkpoint import reader, run_paths
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.run import preflight, resume
from jaxsp.run.run_config import RunConfig
from tests import messages
from tests.checkpoint.test_writer import make_meta
from tests.run.test_trackers import make_config


def write_checkpoints(run, *steps):
    for step in steps:
        folder = run / "checkpoints" / str(step)
        (folder / run_paths.META).mkdir(parents=True)
        (folder / run_paths.MASTER).mkdir()
        reader.write_meta(folder, make_meta(step))


def test_a_run_that_is_done_deletes_what_a_kill_has_left(tmp_path):
    config = make_config(tmp_path, "checkpoint.keep_latest=2", "logging.trackers=[]")
    write_checkpoints(tmp_path, 8, 10, 11)
    (tmp_path / "checkpoints/9.deleting/master").mkdir(parents=True)

    def finish(*, is_resume):
        own = {"config": config, "directory": tmp_path, "ranking_eval_set": None}
        preflight.finish_run(types.SimpleNamespace(**own, is_resume=is_resume))
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    assert finish(is_resume=False) == ["10", "11", "8", "9.deleting"]
    assert finish(is_resume=True) == ["10", "11"]


@pytest.mark.parametrize("damage", ["removed", "empty", "a file", "partial"])
def test_a_run_whose_checkpoints_have_vanished_stops(tmp_path, damage):
    run = tmp_path / "run"
    config = RunConfig(directory=str(run), steps=9)
    checkpoints = run / "checkpoints"
    (run / "checkpoints/8.partial").mkdir(parents=True)
    (run / run_paths.CONFIG_FILE).touch()
    (run / "metrics.jsonl").touch()
    assert resume.find_checkpoint(config) is None, "a run that was killed before the first"
    write_checkpoints(run, 8)
    files.write_json(run / run_paths.LAST_CHECKPOINT_FILE, {"step": 8})
    assert resume.find_checkpoint(config) == checkpoints / "8"
    if damage == "partial":
        shutil.rmtree(checkpoints / "8")
    else:
        shutil.rmtree(checkpoints)
    if damage == "empty":
        checkpoints.mkdir()
    elif damage == "a file":
        checkpoints.touch()
    parts = ("step 8", checkpoints, f"run.directory={run}-2")
    with pytest.raises(UserError, match=messages.containing(*parts)):
        resume.find_checkpoint(config)
