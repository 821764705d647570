"""Run directory: its lock, its creation, and the check that all processes see it."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxsp.config import config_file
from jaxsp.core import durations, files, paths, urls
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import format_count
from jaxsp.run.config_file import Config
from jaxsp.run.run_config import RunConfig
from jaxsp.runtime.run_paths import CONFIG_FILE

LOCK_FILE = "lock"

HOLDER_FILE = "lock.json"
"""File that describes the process that holds the lock."""

HEARTBEAT_FILE = "heartbeat.json"
"""File that a running holder rewrites every few seconds."""

BOOKKEEPING_FILES = (
    LOCK_FILE,
    HOLDER_FILE,
    HEARTBEAT_FILE,
    *(f"{name}{files.PARTIAL_SUFFIX}" for name in (HOLDER_FILE, HEARTBEAT_FILE, CONFIG_FILE)),
)
"""Files that a folder may contain although no run has started there."""

HEARTBEAT_TIMEOUT_S = 15.0
"""Time without a change of the heartbeat file after which a holder on another node counts as dead:
three heartbeats."""

_NO_LOCK_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)

_locked_dirs: set[pathlib.Path] = set()

_own_copies: set[pathlib.Path] = set()
"""Local copies of run directories that this process writes besides process 0."""


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, config_path: str = "", name: str | None = None) -> Iterator[None]:
    """Context in which no other run can use a folder.

    Process 0 takes the lock for all processes of a job. A nested lock of the same folder does
    nothing. The kernel frees the lock when the process ends for any reason. If a file system locks
    within a node only, the holder's heartbeat shows whether it is alive. At the end, files and
    folders that were created for the lock are removed if no run has started.

    Args:
        config_path: config of the command, written to HOLDER_FILE.
        name: name of the folder in messages; default: its path.
    Raises: UserError that describes the holder of the lock, or the reason why the folder cannot be
        created or locked.
    """
    name = name or str(folder)
    with at("run.directory", folder):
        paths.check_folder(folder)
    resolved = folder.resolve()
    if jax.process_index() > 0 or resolved in _locked_dirs:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            created = _create_dirs(folder)
            lock_fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            problem = f"cannot be created: {error.strerror}. Use another folder."
            raise UserError(f"run.directory = {folder}: {problem}") from None
        stack.callback(os.close, lock_fd)
        _acquire(folder, lock_fd, name)
        stack.callback(_remove_created, folder, created)
        _locked_dirs.add(resolved)
        stack.callback(_locked_dirs.discard, resolved)
        # not the environment, which may contain secrets
        holder = {
            "host": platform.node(),
            "pid": os.getpid(),
            "began": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "job": os.environ.get("SLURM_JOB_ID"),
            "config": config_path or None,
        }
        with report_write_errors(folder):
            files.write_atomic(folder / HOLDER_FILE, f"{json.dumps(holder)}\n")
        stack.callback((folder / HOLDER_FILE).unlink, missing_ok=True)
        yield


def create(
    directory: pathlib.Path,
    config: Config,
    *,
    banner_text: str,
    keep_model: Callable[[pathlib.Path], None],
) -> contextlib.AbstractContextManager:
    """Creates the run directory with the files that are known before the first step, and locks it.

    Args: keep_model: writes the small files of the model to a folder.
    Returns: a context that holds the lock.
    Raises: UserError if it cannot be written, or if other processes do not see it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(directory))
        if is_writer(directory):
            with report_write_errors(directory):
                config_file.save(config, directory / CONFIG_FILE)
                files.write_atomic(directory / "banner.txt", banner_text)
                keep_model(directory / "model")
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


def may_be_separate(run: RunConfig) -> bool:
    """True if processes of a run may write to local copies that the others do not see."""
    return urls.is_url(run.directory) and jax.process_count() > 1


def is_writer(folder: pathlib.Path) -> bool:
    """True if this process makes folders and writes metadata in a run directory, or below one."""
    if jax.process_index() == 0:
        return True
    resolved = folder.resolve()
    return any(path in _own_copies for path in (resolved, *resolved.parents))


@contextlib.contextmanager
def report_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """Context that turns the error of a full or broken disk into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.directory = {folder}: cannot be written: {error.strerror}. "
            "Free some space, or use another folder."
        ) from None


def _acquire(folder: pathlib.Path, lock_fd: int, name: str) -> None:
    """Locks the file, and prints a line if the previous run was killed.

    Raises: UserError if another run holds the lock, or if the file system has no locks.
    """
    holder = files.read_json(folder / HOLDER_FILE) or {}
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # without a link, its holder has just removed the folder that it created
        is_in_use = os.fstat(lock_fd).st_nlink == 0
    except BlockingIOError:
        is_in_use = True
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRNOS:
            raise
        raise UserError(
            f"run.directory = {folder}: its file system cannot lock files ({error.strerror}), so "
            "two runs could write to it at the same time. Use a folder on another file system, or "
            "mount this one with locks (Lustre: -o flock)."
        ) from None
    if holder and not is_in_use and holder.get("host") != platform.node():
        text = f"{folder}: waiting {HEARTBEAT_TIMEOUT_S:g} s for a heartbeat of "
        print(text + _describe_holder(holder), flush=True)
        heartbeat = folder / HEARTBEAT_FILE
        before = files.read_json(heartbeat)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while time.monotonic() < deadline and files.read_json(heartbeat) == before:
            time.sleep(min(0.5, HEARTBEAT_TIMEOUT_S / 10))
        is_in_use = files.read_json(heartbeat) != before
    if is_in_use:
        description = f": {_describe_holder(holder)}" if holder else ""
        raise UserError(
            f"run.directory = {name}: is in use by another process{description}. "
            "Wait for it, or use another folder."
        )
    if holder:
        text = f"{name}: the run of {_describe_holder(holder)} was killed; this run takes over"
        print(text, flush=True)


def _describe_holder(holder: dict[str, Any]) -> str:
    """Formats a holder: `pid 123 on node-7 since 2026-03-01 13:05:00 (SLURM job 7, a.yaml)`."""
    since = str(holder.get("began"))[:19].replace("T", " ")
    text = f"pid {holder.get('pid')} on {holder.get('host')} since {since}"
    details = [f"SLURM job {holder['job']}"] if holder.get("job") else []
    details += [holder["config"]] if holder.get("config") else []
    return f"{text} ({', '.join(details)})" if details else text


def _create_dirs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Creates a folder and its parents.

    Returns: paths that did not exist before: bookkeeping files, then folders, the deepest first.
    """
    files = [folder / name for name in BOOKKEEPING_FILES]
    missing = [path for path in (*files, folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_created(folder: pathlib.Path, created: list[pathlib.Path]) -> None:
    """Removes files and empty folders that were created for a run that never started.

    Args: created: result of `_create_dirs`: files, then folders, the deepest first.
    """
    if (folder / CONFIG_FILE).exists():
        return
    for path in created:
        if path.name in BOOKKEEPING_FILES and path.parent == folder:
            path.unlink(missing_ok=True)
        elif any(path.iterdir()):
            break  # nor are the folders above it empty
        else:
            path.rmdir()


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
