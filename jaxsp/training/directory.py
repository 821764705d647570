"""The folder that a run writes: made, held by one run at a time, and seen by all processes."""

import contextlib
import pathlib
import time

import filelock
import jax
from jax.experimental import multihost_utils

from jaxsp.core import config, errors
from jaxsp.training.material import Material


def begin(
    directory: pathlib.Path, settings: config.Config, material: Material, banner_text: str
) -> contextlib.AbstractContextManager:
    """Makes the run's directory, with what can be written before the first step; held by this run until the context ends."""
    lock: contextlib.AbstractContextManager = contextlib.nullcontext()
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.UserError(f"run.directory = {directory}: cannot be made: {error.strerror}. Name another.") from None
        try:
            lock = filelock.FileLock(directory / "lock", blocking=False).acquire()
        except filelock.Timeout:
            raise errors.UserError(
                f"run.directory = {directory}: another process is writing this run. Wait for it, or name another folder."
            ) from None
        config.save(settings, directory / "config.yaml")
        (directory / "banner.txt").write_text(banner_text, encoding="utf-8")
        material.keep_model(directory / "model")
    _see(directory)
    return lock


def _see(directory: pathlib.Path) -> None:
    """Raises: UserError where a process does not see the directory that process 0 has made."""
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("the run's directory was made")
    for _ in range(30):  # what another node wrote may come late
        if (directory / "config.yaml").is_file():
            return
        time.sleep(1)
    raise errors.UserError(
        f"run.directory = {directory}: process 0 has made it, and process {jax.process_index()} does not see it. Name a folder "
        "that all nodes share."
    )
