"""Lock of a run in an object store: numbered objects; the highest belongs to the holder."""

import contextlib
import json
import pathlib
import threading
import time
from typing import Any

from jaxsp.core import exit_codes, files
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir
from jaxsp.storage.object_store import ObjectStore

LOCK_PREFIX = "lock/"

HEARTBEAT_INTERVAL_S = 5.0

HEARTBEAT_TIMEOUT_S = 30.0
"""Time without a new heartbeat after which a holder counts as dead: six heartbeats. A failed
request takes up to 10 s, so a holder whose store was unreachable is seen alive again in time."""


class SessionLock:
    """Right to write below a URL, for one session of a run: from its start to its end.

    A session creates the object `lock/NUMBER.json` with the number after the highest existing one.
    Stores create an object only once, so of two runs that start or take over at the same time, one
    succeeds. A heartbeat shows that the holder is alive. A holder that another has replaced ends.
    """

    def __init__(self, store: ObjectStore, holder: dict[str, Any], *, heartbeat: pathlib.Path):
        """Prepares a lock.

        Args:
            holder: description of this process, with a unique `session`.
            heartbeat: local file of the watchdog, whose fields become part of the heartbeat.
        """
        self._store = store
        self._store_without_retries = store.without_retries()
        self._holder = holder
        self._heartbeat = heartbeat
        self.number = 0
        """Number of this session, greater than those of all sessions before it."""
        self.sessions: tuple[str, str | None] = (holder["session"], None)
        """Ids of this session and of the one before it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store heartbeat", daemon=True)

    def find_holder(self) -> dict[str, Any]:
        """Returns the description of the latest session, whether it has ended or not."""
        self.number = max(_list_numbers(self._store), default=0)
        content = self._store.read(_name(self.number)) if self.number else None
        return _parse(content)

    def acquire(self, latest: dict[str, Any], *, is_dead: bool) -> None:
        """Starts a session after the one that `find_holder` has returned.

        Args: is_dead: True if its holder is known to have ended.
        Raises: UserError that describes the holder if it is alive.
        """
        if latest and not self._has_ended(latest) and not is_dead:
            description = run_dir.describe_holder(latest)
            distributed.log(
                f"{self._store.url}: waiting {HEARTBEAT_TIMEOUT_S:g} s for a heartbeat of "
                f"{description}"
            )
            if self._is_alive():
                raise self._in_use_error(description)
            distributed.log(
                f"{self._store.url}: the run of {description} was killed; this run takes over"
            )
        self.sessions = (self._holder["session"], latest.get("session"))
        self.number += 1
        content = f"{json.dumps(self._holder)}\n".encode()
        self._store.create(_name(self.number), content)
        winner = _parse(self._store.read(_name(self.number)))
        if winner.get("session") != self._holder["session"]:
            raise self._in_use_error(run_dir.describe_holder(winner))
        self._write_heartbeat(self._store)
        older = [number for number in _list_numbers(self._store) if number < self.number]
        self._store.delete(map(_name, older))
        self._thread.start()

    def check(self) -> None:
        """Ends this process if another run has taken over."""
        highest = max(_list_numbers(self._store_without_retries), default=0)
        winner = _parse(self._store_without_retries.read(_name(highest)))
        if winner.get("session", self._holder["session"]) == self._holder["session"]:
            return
        distributed.log(
            f"{self._store.url}: {run_dir.describe_holder(winner)} has taken over this run, which "
            f"could not reach the store for {HEARTBEAT_TIMEOUT_S:g} s or was suspended. This run "
            "ends"
        )
        distributed.abort_job(exit_codes.NEEDS_ATTENTION)

    def release(self, *, is_unused: bool) -> None:
        """Ends the session. Args: is_unused: remove the lock, because the run never started."""
        self._closed.set()
        self._thread.join()
        if is_unused:
            self._store_without_retries.delete([_name(self.number), run_dir.HEARTBEAT_FILE])
        else:
            self._write_heartbeat(self._store_without_retries, ended=True)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            # the uploads report an unreachable store
            with contextlib.suppress(Exception):
                self._write_heartbeat(self._store_without_retries)
                self.check()

    def _write_heartbeat(self, store: ObjectStore, *, ended: bool = False) -> None:
        status = None
        with contextlib.suppress(OSError):
            status = files.read_json(self._heartbeat)
        fields = {
            **(status or {}),
            "session": self._holder["session"],
            "ended": ended,
            "at": time.time(),
        }
        store.write(run_dir.HEARTBEAT_FILE, f"{json.dumps(fields)}\n".encode())

    def _has_ended(self, holder: dict[str, Any]) -> bool:
        heartbeat = _parse(self._store.read(run_dir.HEARTBEAT_FILE))
        return bool(heartbeat.get("ended")) and heartbeat.get("session") == holder.get("session")

    def _is_alive(self) -> bool:
        """True if the heartbeat changes within HEARTBEAT_TIMEOUT_S."""
        before = self._store.read(run_dir.HEARTBEAT_FILE)
        began = time.monotonic()
        while time.monotonic() - began < HEARTBEAT_TIMEOUT_S:
            time.sleep(min(1.0, HEARTBEAT_TIMEOUT_S / 10))
            request_began = time.monotonic()
            if self._store.read(run_dir.HEARTBEAT_FILE) != before:
                return True
            if time.monotonic() - request_began > HEARTBEAT_INTERVAL_S:
                began = time.monotonic()  # the store was unreachable, also for the holder
        return False

    def _in_use_error(self, description: str) -> UserError:
        return UserError(
            f"run.directory = {self._store.url}: is in use by another process: {description}. "
            "Wait for it, or use another URL."
        )


def _name(number: int) -> str:
    return f"{LOCK_PREFIX}{number:06d}.json"


def _list_numbers(store: ObjectStore) -> list[int]:
    names = [pathlib.PurePosixPath(name).stem for name in store.list(LOCK_PREFIX)]
    return [int(name) for name in names if name.isdecimal()]


def _parse(content: bytes | None) -> dict[str, Any]:
    return files.parse_json(content) or {}
