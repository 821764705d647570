"""Lock of a run directory: one run at a time uses it; the error of a second one names it."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import platform
import time
from collections.abc import Iterator

from jaxsp.core import files
from jaxsp.core.errors import UserError, at

CONFIG_FILE = "config.yaml"  # file that marks a run directory: once it exists, the run has started
LOCK_FILE = "lock"
HOLDER_FILE = "lock.json"  # describes the process that holds the lock
HEARTBEAT_FILE = "heartbeat.json"  # a running holder rewrites it every few seconds

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


@contextlib.contextmanager
def lock(folder: pathlib.Path, *, config_path: str = "", name: str | None = None) -> Iterator[None]:
    """Context in which no other run can use a folder. A nested one does nothing.

    Process 0 takes the lock for all processes of a job. The kernel frees it when that process ends.
    If a file system locks within a node only, the holder's heartbeat shows whether it is alive. At
    the end, what was created for the lock is removed if no run has started.

    Args: config_path: written to HOLDER_FILE. name: of the folder in messages; default: its path.
    Raises: UserError that names the holder, or why the folder cannot be created or locked.
    """
    import jax  # the names of the files are needed without it

    with at("run.directory", folder):
        files.check_folder(folder)
    resolved = folder.resolve()
    if jax.process_index() > 0 or resolved in _locked_dirs:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            # the deepest folder first
            parts = (*(folder / file for file in BOOKKEEPING_FILES), folder, *folder.parents)
            created = [path for path in parts if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"run.directory = {folder}: cannot be created: {error.strerror}. "
                "Use another folder."
            ) from None
        stack.callback(os.close, lock_fd)
        _acquire(folder, lock_fd, name or str(folder))
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
            files.write_atomic(folder / HOLDER_FILE, f"{json.dumps(holder)}\n", is_durable=False)
        stack.callback((folder / HOLDER_FILE).unlink, missing_ok=True)
        yield


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
    """Locks the file, and prints a line if the previous run was killed. Raises: UserError."""
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
    description = ""
    if holder:  # pid 123 on node-7 since 2026-03-01 13:05:00, SLURM job 7, a.yaml
        since = str(holder.get("began"))[:19].replace("T", " ")
        description = f"pid {holder.get('pid')} on {holder.get('host')} since {since}"
        description += f", SLURM job {holder['job']}" if holder.get("job") else ""
        description += f", {holder['config']}" if holder.get("config") else ""
    if holder and not is_in_use and holder.get("host") != platform.node():
        wait = f"waiting {HEARTBEAT_TIMEOUT_S:g} s for a heartbeat of {description}"
        print(f"{folder}: {wait}", flush=True)
        before = files.read_json(folder / HEARTBEAT_FILE)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while time.monotonic() < deadline and not is_in_use:
            time.sleep(min(0.5, HEARTBEAT_TIMEOUT_S / 10))
            is_in_use = files.read_json(folder / HEARTBEAT_FILE) != before
    if is_in_use:
        raise UserError(
            f"run.directory = {name}: is in use by another process"
            f"{': ' if holder else ''}{description}. Wait for it, or use another folder."
        )
    if holder:
        print(f"{name}: the run of {description} was killed; this run takes over", flush=True)


def _remove_created(folder: pathlib.Path, created: list[pathlib.Path]) -> None:
    """Removes files and empty folders that were created for a run that never started."""
    if (folder / CONFIG_FILE).exists():
        return
    for path in created:
        with contextlib.suppress(OSError):  # a folder with files of others, and those above it
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
