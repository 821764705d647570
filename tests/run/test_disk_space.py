"""Comparison of free space with the size of checkpoints."""

import collections
import re
import shutil

import pytest

from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.core.errors import UserError
from jaxsp.run import preflight
from tests import messages

MIB = 2**20
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    """Returns a function that sets the free bytes of every disk."""
    return lambda size: monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, size))


def check(folder, num_checkpoints=11, **keep):
    return preflight.check_space(
        folder / "run",
        CheckpointConfig(**keep),
        checkpoint_bytes=100 * MIB,
        num_checkpoints=num_checkpoints,
    )


def test_run_is_refused_only_if_not_even_one_checkpoint_fits(tmp_path, free):
    free(99 * MIB)
    with pytest.raises(UserError) as raised:
        check(tmp_path)
    (problem,) = raised.value.problems
    expected = messages.containing(f"run.directory = {tmp_path}/run", "100.0 MiB", "99.0 MiB")
    assert re.match(expected, problem)
    unfinished = tmp_path / "run/checkpoints/8.partial/master/a"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(bytes(2 * MIB))
    assert check(tmp_path) is not None, "there is space for one checkpoint, not for three"


@pytest.mark.parametrize(
    ("keep", "num_existing", "num_checkpoints", "num_more"),
    [
        ({}, 0, 11, 3),
        ({"keep_best": 2}, 0, 11, 5),
        ({}, 2, 11, 1),
        ({}, 5, 11, 1),
        ({}, 0, 2, 2),
        ({}, 0, 1, 1),
    ],
)
def test_warning_if_space_for_all_checkpoints_that_exist_at_the_same_time_is_missing(
    tmp_path, free, keep, num_existing, num_checkpoints, num_more
):
    for number in range(num_existing):
        (tmp_path / "run/checkpoints" / str(number)).mkdir(parents=True)
    free(100 * MIB * num_more)
    assert check(tmp_path, num_checkpoints, **keep) is None
    free(100 * MIB * num_more - 1)
    if num_more == 1:
        with pytest.raises(UserError):
            check(tmp_path, num_checkpoints, **keep)
    else:
        warning = check(tmp_path, num_checkpoints, **keep)
        assert re.search(messages.containing(f"{tmp_path}/run", num_more, "100.0 MiB"), warning)
