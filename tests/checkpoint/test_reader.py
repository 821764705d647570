"""Finding a run's checkpoints by their folders, and reading their metadata."""

import pytest

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta, DamagedCheckpointError, EarlyStoppingState
from jaxsp.run import resume
from jaxsp.run.run_config import RunConfig
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


META = CheckpointMeta(
    config={},
    model={},
    data={},
    step=4,
    rows_consumed=0,
    num_tokens_total=9,
    early_stopping=EarlyStoppingState(data="a", digest="tokens of a", best_value=2.5, best_step=3),
)


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
