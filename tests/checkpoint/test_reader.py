"""Finding a run's checkpoints by their folders, and reading their metadata."""

import dataclasses
import json

import pytest

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta, DamagedCheckpointError, EarlyStoppingState
from jaxsp.core.errors import UserError
from jaxsp.run import resume
from jaxsp.run.config_file import RunConfig
from tests import messages


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
    latest = run / "checkpoints/10"
    assert run_paths.find_latest(run) == latest
    assert run_paths.find_latest(latest) == latest
    assert resume.find_checkpoint(RunConfig(directory=str(run), steps=20)) == latest
    assert run_paths.find_latest(tmp_path / "checkpoints") is None, (
        "the folder of runs has no checkpoint"
    )


@pytest.mark.parametrize("name", ["checkpoints/1", "checkpoints/001", "runs/1"])
def test_run_directory_without_checkpoints_is_not_a_checkpoint(tmp_path, name):
    run = tmp_path / name
    run.mkdir(parents=True)  # as run_lock.lock makes it before the checkpoint is looked for
    config = RunConfig(directory=str(run), steps=20)
    assert resume.find_checkpoint(config) is None
    make_run(run)
    assert run_paths.find_latest(run) is None
    assert resume.find_checkpoint(config) is None


def test_damaged_checkpoint_without_files_is_still_found(tmp_path):
    run = make_run(tmp_path / "checkpoints/1", 2)
    (run / "checkpoints/4").mkdir()
    assert run_paths.find_latest(run) == run / "checkpoints/4"
    assert run_paths.find_latest(run / "checkpoints/4") == run / "checkpoints/4"
    assert run_paths.find_latest(run, exclude=[run / "checkpoints/4"]) == run / "checkpoints/2"


META = CheckpointMeta(
    config={},
    model={},
    data={},
    step=4,
    rows_consumed=0,
    num_tokens_total=9,
    early_stopping=EarlyStoppingState(data="a", digest="tokens of a", best_value=2.5, best_step=3),
)


@pytest.mark.parametrize("place", ["metadata", "early_stopping"])
def test_unknown_field_is_an_error_that_is_not_damage(tmp_path, place):
    fields = dataclasses.asdict(META)
    changed = fields if place == "metadata" else fields[place]
    changed["new_field"] = 1
    (tmp_path / "4/meta").mkdir(parents=True)
    text = json.dumps({"digest": reader._checksum(fields), **fields})
    (tmp_path / "4/meta/metadata").write_text(text)
    with pytest.raises(UserError, match=messages.containing(tmp_path / "4", "version")) as raised:
        reader.read_meta(tmp_path / "4")
    assert not isinstance(raised.value, DamagedCheckpointError)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"3", b"null", b'"text"', bytes(300), b"\xff\xfe", b'{"step": 4'),
        *(b'{"config": ' * depth + b"1" + b"}" * depth for depth in (300, 900, 985, 1100, 99_999)),
        *(b"[" * depth + b"]" * depth for depth in (900, 99_999)),
        b'{"step": ' + b"9" * 5_000 + b"}",
        None,  # a folder
    ],
)
def test_metadata_that_is_not_a_json_object_is_damage(tmp_path, content):
    path = tmp_path / "4/meta/metadata"
    path.parent.mkdir(parents=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=messages.containing("meta/metadata")):
        reader.read_meta(tmp_path / "4")
