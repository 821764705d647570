"""Comparison of free space with the size of checkpoints."""

import collections
import re
import shutil

import pytest

from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
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
