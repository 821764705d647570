"""The folder that a run writes: held by one run at a time, made, and seen by all processes."""

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

from jaxsp.config import schema, yaml_io
from jaxsp.config.schema import Config
from jaxsp.core import paths
from jaxsp.core.errors import UserError
from jaxsp.runtime.run_paths import CONFIG_FILE

LOCK_FILE, HOLDER_FILE, HEARTBEAT_FILE = "lock", "lock.json", "heartbeat.json"
"""What is locked, who holds it, and what a running holder writes again every few seconds."""

BOOKKEEPING_FILES = (
    LOCK_FILE,
    HOLDER_FILE,
    HEARTBEAT_FILE,
    *(f"{name}{yaml_io.PARTIAL_SUFFIX}" for name in (HOLDER_FILE, HEARTBEAT_FILE, CONFIG_FILE)),
)
"""Files that a folder may hold though no run was ever written there."""

HEARTBEAT_TIMEOUT_S = 15.0
"""How long the heartbeat of a holder on another node has to stand still before it is taken for dead: three of its beats."""

_NO_LOCK_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
"""What flock answers where a file system has none, as Lustre does by default."""

_locked_dirs: set[pathlib.Path] = set()
"""Folders that this process holds."""


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, config_path: str = "") -> Iterator[None]:
    """Keeps every other run out of a folder until the context ends. Process 0 does it for all; again inside, it does nothing.

    The kernel frees the lock when a process dies, however it does. Where a file system locks within a node only, the holder's
    heartbeat tells whether it lives. What was made for the lock goes with it where no run began.

    Args:   asked: the config of the command, for whoever wants to know who holds the folder.
    Raises: UserError naming the holder where there is one, and where the folder cannot be made or locked.
    """
    paths.check_folder(folder, field="run.directory")
    resolved = folder.resolve()
    if jax.process_index() > 0 or resolved in _locked_dirs:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            made = _create_dirs(folder)
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"run.directory = {folder}: cannot be made: {error.strerror}. Name another."
            ) from None
        stack.callback(os.close, lock)
        _acquire(folder, lock)
        stack.callback(_remove_created, folder, made)
        _locked_dirs.add(resolved)
        stack.callback(_locked_dirs.discard, resolved)
        with _report_write_errors(folder):
            yaml_io.write_atomic(
                folder / HOLDER_FILE, json.dumps(_holder_fields(config_path)) + "\n"
            )
        stack.callback((folder / HOLDER_FILE).unlink, missing_ok=True)
        yield


def create(
    directory: pathlib.Path,
    config: Config,
    *,
    banner_text: str,
    keep_model: Callable[[pathlib.Path], None],
) -> contextlib.AbstractContextManager:
    """Makes the run's directory, with what can be written before the first step; held by this run until the context ends.

    Args: keep_model: writes the small files of the model into a folder.
    Raises: UserError where it cannot be written, and where other processes do not see it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(directory))
        if jax.process_index() == 0:
            with _report_write_errors(directory):
                schema.save(config, directory / CONFIG_FILE)
                yaml_io.write_atomic(directory / "banner.txt", banner_text)
                keep_model(directory / "model")
        _wait_until_visible(directory)
        return stack.pop_all()


@contextlib.contextmanager
def _report_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """Raises: UserError where a disk does not take what is written in the context."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.directory = {folder}: cannot be written: {error.strerror}. Make room, or name another."
        ) from None


def _acquire(folder: pathlib.Path, lock_fd: int) -> None:
    """Locks the file, or raises UserError; says so where the run before did not end by itself."""
    holder = _read_json(folder / HOLDER_FILE)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use_error(folder, holder) from None
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRNOS:
            raise
        raise UserError(
            f"run.directory = {folder}: its file system cannot lock files ({error.strerror}), so that two runs could write "
            "there at once. Name a folder on another one, or have it mounted with locks (Lustre: -o flock)."
        ) from None
    if not os.fstat(lock_fd).st_nlink:  # its holder has just removed the folder that it had made
        raise _in_use_error(folder, holder)
    if not holder:
        return
    if holder.get("host") != platform.node():
        print(
            f"{folder}: waits {HEARTBEAT_TIMEOUT_S:g} s for a sign of {_describe_holder(holder)}",
            flush=True,
        )
        if _is_alive(folder / HEARTBEAT_FILE):
            raise _in_use_error(folder, holder)
    print(
        f"{folder}: the run of {_describe_holder(holder)} was cut off; this one takes over",
        flush=True,
    )


def _in_use_error(folder: pathlib.Path, holder: dict[str, Any]) -> UserError:
    named = f": {_describe_holder(holder)}" if holder else ""
    return UserError(
        f"run.directory = {folder}: another process is writing this run{named}. Wait for it, or name another folder."
    )


def _holder_fields(config_path: str) -> dict[str, Any]:
    """Who this process is. Nothing else of the environment is anybody's business."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "began": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "job": os.environ.get("SLURM_JOB_ID"),
        "config": config_path or None,
    }


def _describe_holder(holder: dict[str, Any]) -> str:
    """A holder in words: `pid 123 on node-7 since 2026-03-01 13:05:00 (SLURM job 7, configs/a.yaml)`."""
    job = f"SLURM job {holder['job']}" if holder.get("job") else ""
    beside = ", ".join(filter(None, (job, holder.get("config"))))
    since = str(holder.get("began"))[:19].replace("T", " ")
    return f"pid {holder.get('pid')} on {holder.get('host')} since {since}{f' ({beside})' * bool(beside)}"


def _is_alive(heartbeat: pathlib.Path) -> bool:
    """Whether the file changes within SILENCE_S."""
    before, until = _read_json(heartbeat), time.monotonic() + HEARTBEAT_TIMEOUT_S
    while time.monotonic() < until:
        time.sleep(min(0.5, HEARTBEAT_TIMEOUT_S / 10))
        if _read_json(heartbeat) != before:
            return True
    return False


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a small file; none where there is no such file, or another process was stopped while it wrote it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _create_dirs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Makes a folder. Gives what was not there before: files of NOT_A_RUN, and folders, the deepest first."""
    made = [
        path
        for path in (*(folder / name for name in BOOKKEEPING_FILES), folder, *folder.parents)
        if not path.exists()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _remove_created(folder: pathlib.Path, created: list[pathlib.Path]) -> None:
    """Removes what was made for a run that never began."""
    if (folder / CONFIG_FILE).exists():
        return
    for path in created:
        if path.name in BOOKKEEPING_FILES and path.parent == folder:
            path.unlink(missing_ok=True)
        elif any(path.iterdir()):
            break
        else:
            path.rmdir()


def _wait_until_visible(directory: pathlib.Path) -> None:
    """Raises: UserError where a process does not see the directory that process 0 has made."""
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("the run's directory was made")
    for _ in range(30):  # what another node wrote may come late
        if (directory / CONFIG_FILE).is_file():
            return
        time.sleep(1)
    raise UserError(
        f"run.directory = {directory}: process 0 has made it, and process {jax.process_index()} does not see it. Name a folder "
        "that all nodes share."
    )
