"""Run directory: its creation, the check that all processes see it, and its description."""

import contextlib
import pathlib
import time
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from jaxsp.checkpoint.run_paths import CONFIG_FILE
from jaxsp.config import config_file
from jaxsp.core import durations, files
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_count
from jaxsp.run.config_file import Config
from jaxsp.run.run import Run
from jaxsp.system import run_lock

_own_copies: set[pathlib.Path] = set()
"""Local copies of run directories that this process writes besides process 0."""


def create(run: Run, banner_text: str) -> contextlib.AbstractContextManager:
    """Creates the run directory with the files that are known before the first step, and locks it.

    Returns: a context that holds the lock.
    Raises: UserError if it cannot be written, or if other processes do not see it.
    """
    directory = run.directory
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_lock.lock(directory))
        if is_writer(directory):
            with run_lock.report_write_errors(directory):
                config_file.save(run.config, directory / CONFIG_FILE)
                files.write_atomic(directory / "banner.txt", banner_text)
                run.write_model(directory / "model")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("run directory created")
            for _ in range(30):  # files written on another node may become visible seconds later
                if (directory / CONFIG_FILE).is_file():
                    break
                time.sleep(1)
            else:
                raise UserError(
                    f"run.directory = {directory}: was created by process 0, but process "
                    f"{jax.process_index()} does not see it. Use a folder that all nodes share."
                )
        return stack.pop_all()


@contextlib.contextmanager
def write_own_copy(folder: pathlib.Path) -> Iterator[None]:
    """Context in which this process writes the run's files in a folder that process 0 does not see.

    Nodes without a shared file system have such folders if run.directory is a URL.
    """
    _own_copies.add(folder.resolve())
    try:
        yield
    finally:
        _own_copies.discard(folder.resolve())


def is_writer(folder: pathlib.Path) -> bool:
    """True if this process makes folders and writes metadata in a run directory, or below one."""
    if jax.process_index() == 0:
        return True
    resolved = folder.resolve()
    return any(path in _own_copies for path in (resolved, *resolved.parents))


def describe(config: Config, *, has_eval_sets: bool, first_step: int) -> tuple[str, str]:
    """Describes what a run writes: all names, and the directory with the times of checkpoints.

    Args: first_step: number of steps before the start.
    """
    run = config.run
    profiled = config.logging.profile_steps
    optional = {
        "eval.jsonl": has_eval_sets,
        "tasks.jsonl": config.eval.tasks,
        "samples.jsonl": run.generate_samples,
        "profile/": profiled is not None and profiled[0] > first_step,
    }
    names = ["config.yaml", "banner.txt", "starts.jsonl", "metrics.jsonl"]
    names += [name for name, is_written in optional.items() if is_written]
    names += [f"{tracker.folder}/" for tracker in config.logging.trackers if tracker.folder]
    times = "at the end"
    if run.save_every == "epoch":
        times = "after every epoch"
    elif run.save_every is not None:
        interval = format_count(run.save_steps or 0, "step")
        if run.save_interval is not None:
            interval = durations.to_text(run.save_interval)
        times = f"every {interval} and at the end"
    names += ["model/", f"checkpoints/ ({times})"]
    directory = run.directory
    short = f"{directory}, with a checkpoint {times}; details: {directory}/banner.txt"
    return f"{directory}: {', '.join(names)}", short
