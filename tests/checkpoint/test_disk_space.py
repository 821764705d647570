"""Comparison of free space with the size of checkpoints; reasons of failed writes."""

import collections
import re
import shutil

import pytest

from jaxsp.checkpoint import disk_space, files
from jaxsp.core.errors import UserError
from jaxsp.run import config_file
from tests import messages

MIB = 2**20
Usage = collections.namedtuple("Usage", "total used free")


def make_config(folder, *words):
    fields = {
        "run": {"directory": str(folder / "run"), "steps": 100, "save_every": 10},
        "model": {"config": {}},
        "data": {"train": [{"source": "a", "format": "tokens"}], "row_tokens": 64},
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.1},
    }
    return config_file.parse(fields, words)


@pytest.fixture
def free(monkeypatch):
    """Returns a function that sets the free bytes of every disk."""
    return lambda size: monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, size))


def check(config, **others):
    return disk_space.check(config, **{"checkpoint_bytes": 100 * MIB, "num_steps": 100, **others})


def test_run_is_refused_only_if_not_even_one_checkpoint_fits(tmp_path, free):
    free(99 * MIB)
    with pytest.raises(UserError) as raised:
        check(make_config(tmp_path))
    (problem,) = raised.value.problems
    expected = messages.containing(f"run.directory = {tmp_path}/run", "100.0 MiB", "99.0 MiB")
    assert re.match(expected, problem)
    assert check(make_config(tmp_path), leftover_bytes=2 * MIB) is not None, (
        "there is space for one checkpoint, not for three"
    )


@pytest.mark.parametrize(
    ("words", "num_existing", "others", "num_more"),
    [
        ([], 0, {}, 3),
        (["checkpoint.keep_best=2", "data.eval=[{source: a, format: tokens}]"], 0, {}, 5),
        ([], 2, {}, 1),
        ([], 5, {}, 1),
        ([], 0, {"num_steps": 15}, 2),
        (["run.save_every=30m"], 0, {"num_steps": 15}, 3),
        (["run.save_every=null"], 0, {}, 1),
    ],
)
def test_warning_if_space_for_all_checkpoints_that_exist_at_the_same_time_is_missing(
    tmp_path, free, words, num_existing, others, num_more
):
    for number in range(num_existing):
        (tmp_path / "run/checkpoints" / str(number)).mkdir(parents=True)
    config = make_config(tmp_path, *words)
    free(100 * MIB * num_more)
    assert check(config, **others) is None
    free(100 * MIB * num_more - 1)
    if num_more == 1:
        with pytest.raises(UserError):
            check(config, **others)
    else:
        warning = check(config, **others)
        assert re.search(messages.containing(f"{tmp_path}/run", num_more, "100.0 MiB"), warning)


def test_unfinished_checkpoints_count_as_free(tmp_path):
    (tmp_path / "8.partial/master").mkdir(parents=True)
    (tmp_path / "8.partial/master/a").write_bytes(bytes(1000))
    (tmp_path / "6/master").mkdir(parents=True)
    (tmp_path / "6/master/a").write_bytes(bytes(500))
    assert files.leftover_bytes(tmp_path) == 1000
    assert files.leftover_bytes(tmp_path / "nowhere") == 0
