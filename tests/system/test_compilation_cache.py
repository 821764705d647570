"""The folder of compiled programs, by setting, release, devices and processes."""

import pathlib

import jax
import pytest

from jaxsp.system import hardware, jax_platform
from tests.messages import assert_refused

OLD = (0, 10, 1)
NEW = (0, 12, 0)


@pytest.fixture
def updates(monkeypatch, tmp_path):
    """Values that are set in JAX's config."""
    values = {}
    monkeypatch.setattr(jax.config, "update", values.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return values


def simulate(monkeypatch, release, num_gpus):
    monkeypatch.setattr(jax, "__version_info__", release)
    monkeypatch.setattr(hardware, "count_gpus", lambda _: num_gpus)


@pytest.mark.parametrize(
    ("release", "num_gpus", "num_processes", "is_used"),
    [
        (OLD, 0, 1, False),
        (NEW, 0, 1, True),
        (OLD, 8, 1, True),
        (NEW, 8, 1, True),
        (NEW, 8, 2, False),
        (NEW, 0, 2, False),
        (NEW, 8, 128, False),
        (NEW, 8, 129, True),
        (NEW, 0, 129, False),
    ],
)
def test_auto_keeps_programs_where_that_is_safe(
    monkeypatch, updates, tmp_path, release, num_gpus, num_processes, is_used
):
    simulate(monkeypatch, release, num_gpus)
    jax_platform.enable_cache("auto", num_processes=num_processes)
    folder = tmp_path / "home/jaxsp/programs"
    expected = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": jax_platform.MAX_CACHE_BYTES,
    }
    assert updates == (expected if is_used else {})
    assert folder.is_dir() == is_used


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_named_folder_is_always_used(monkeypatch, updates, tmp_path, num_processes):
    simulate(monkeypatch, OLD, 0)
    jax_platform.enable_cache(str(tmp_path / "programs"), num_processes=num_processes)
    assert pathlib.Path(updates["jax_compilation_cache_dir"]) == tmp_path / "programs"


def test_a_folder_that_cannot_be_used_is_refused(updates, tmp_path):
    (tmp_path / "file").touch()
    for setting in (str(tmp_path / "file"), "gs://bucket/programs"):
        with assert_refused(f"run.compilation_cache = {setting}"):
            jax_platform.enable_cache(setting)
    assert updates == {}
