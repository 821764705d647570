"""Run directories in object stores: the run works in a local copy, and uploads it."""

import contextlib
import fcntl
import json
import os
import pathlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

from jaxsp.config.run_schema import RunConfig
from jaxsp.core import files, urls
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.storage import copies, mirror
from jaxsp.storage.mirror import Mirror
from jaxsp.storage.object_store import ObjectStore
from jaxsp.storage.session_lock import LOCK_PREFIX, SessionLock

_SESSIONS_KEY = "store-sessions"

_OWNER_KEY = "store-owner"

_POLL_S = 0.1


@contextlib.contextmanager
def open_run(run: RunConfig) -> Iterator[None]:
    """Context in which a run can use run.directory, if that is a URL; otherwise it does nothing.

    At the start, no other run may use the URL, and the local copy gets what it lacks. Its own files
    count if the last session of the run was on this machine: after a kill they may be newer.
    Otherwise the store's count, and the local copy is replaced. At the end, everything is uploaded.

    All processes of a job must enter it together, after run_dir.lock. On nodes that do not share
    run.staging, one process of each node uploads the node's files.

    Raises:
        UserError: the store cannot be used, or another run uses it.
        NeedsAttentionError: at the end, the store is unreachable.
    """
    if not urls.is_url(run.directory):
        yield
        return
    store = ObjectStore(run.directory, label=f"run.directory = {run.directory}")
    folder = run_paths.local_dir(run)
    with contextlib.ExitStack() as stack:
        lock = None
        if distributed.this_process().index == 0:
            lock = stack.enter_context(_hold_lock(store, folder))
        session, previous, number = _share_sessions(lock)
        _prepare_copy(store, folder, session, previous)
        with copies.lock(folder):
            is_owner = lock is not None or stack.enter_context(_own_folder(folder))
        num_owners = _count_owners(is_owner)
        uploads = None
        if is_owner:
            uploads = Mirror(
                store,
                folder,
                part=distributed.this_process().index,
                num_parts=num_owners,
                session=number,
                check_lock=(lambda: None) if lock is None else lock.check,
            )
            uploads.start()
        try:
            yield
        except Exception:  # whatever ended the run is raised again after the uploads
            with contextlib.suppress(NeedsAttentionError):  # the error of the run is raised
                _finish(uploads, patience_s=0.0)
            raise
        _finish(uploads, patience_s=mirror.END_PATIENCE_S)


@contextlib.contextmanager
def _hold_lock(store: ObjectStore, folder: pathlib.Path) -> Iterator[SessionLock]:
    """Context in which no other run uses the store's URL. Only process 0 enters it."""
    _check_contents(store)
    description = files.read_json(folder / run_dir.HOLDER_FILE) or {}
    holder = {**description, "session": uuid.uuid4().hex}
    lock = SessionLock(store, holder, heartbeat=folder / run_dir.HEARTBEAT_FILE)
    latest = lock.find_holder()
    own_sessions = _read_sessions(folder)
    is_own = latest.get("session") in own_sessions
    if is_own:
        # written before the session begins, so that a kill between the two loses no file
        _write_sessions(folder, [latest["session"], holder["session"]])
    # no other process uses the local copy: this process holds its lock
    lock.acquire(latest, is_dead=is_own)
    try:
        yield lock
    finally:
        is_unused = not (folder / run_paths.CONFIG_FILE).exists()
        with contextlib.suppress(Exception):  # another run then waits for a heartbeat
            lock.release(is_unused=is_unused)


def _check_contents(store: ObjectStore) -> None:
    """Raises: UserError if the store has objects below the URL that are not a run's."""
    names = [
        name
        for name in store.list()
        if not name.startswith(LOCK_PREFIX) and name not in run_dir.BOOKKEEPING_FILES
    ]
    if names and run_paths.CONFIG_FILE not in names:
        raise UserError(
            f"run.directory = {store.url}: contains files that are not a run's, such as "
            f"{names[0]}. Use a URL without files."
        )


def _share_sessions(lock: SessionLock | None) -> tuple[str, str | None, int]:
    """Returns the ids of this session and of the previous one, and this one's number.

    Process 0 knows them.
    """
    if lock is not None:
        distributed.publish(_SESSIONS_KEY, json.dumps([*lock.sessions, lock.number]))
        return *lock.sessions, lock.number
    while 0 not in (published := distributed.read_published(_SESSIONS_KEY)):
        time.sleep(distributed.poll_interval_s(_POLL_S))
    session, previous, number = json.loads(published[0])
    return session, previous, number


def _prepare_copy(
    store: ObjectStore, folder: pathlib.Path, session: str, previous: str | None
) -> None:
    """Makes the local copy a valid start: as this machine left it, or downloaded again."""
    with copies.lock(folder):
        own_sessions = _read_sessions(folder)
        if session not in own_sessions:
            if previous is None or previous not in own_sessions:
                copies.download_run(store, folder)
                previous = None
            _write_sessions(folder, [previous, session])
    copies.register(folder, store)


def _sessions_file(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.json")


def _read_sessions(folder: pathlib.Path) -> list[Any]:
    """Ids of the last two sessions of the run that used a local copy."""
    sessions = (files.read_json(_sessions_file(folder)) or {}).get("sessions")
    return sessions if isinstance(sessions, list) else []


def _write_sessions(folder: pathlib.Path, sessions: list[str | None]) -> None:
    files.write_json(_sessions_file(folder), {"sessions": [*filter(None, sessions)]})


@contextlib.contextmanager
def _own_folder(folder: pathlib.Path) -> Iterator[bool]:
    """Context with True in one process of each local copy that process 0 does not use."""
    handle = os.open(folder / run_dir.LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        with run_dir.write_own_copy(folder):
            yield True
    finally:
        os.close(handle)


def _count_owners(is_owner: bool) -> int:
    """Returns the number of processes that upload files of the run."""
    distributed.publish(_OWNER_KEY, str(int(is_owner)))
    num_processes = distributed.this_process().num_processes
    while num_processes > 1:
        published = distributed.read_published(_OWNER_KEY)
        if len(published) == num_processes:
            return sum(map(int, published.values()))
        time.sleep(distributed.poll_interval_s(_POLL_S))
    return 1


def _finish(uploads: Mirror | None, *, patience_s: float) -> None:
    """Uploads what is left at the end of a run."""
    if uploads is not None:
        uploads.stop()
        uploads.flush(patience_s)
