"""Uploads the files of a run to its object store while training continues."""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator

from jaxsp.core import durations, files
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.core.units import MIB
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.storage import checkpoint_names, object_store
from jaxsp.storage.object_store import ObjectStore

POLL_S = 2.0
"""Seconds between two looks for new files."""

END_PATIENCE_S = 600.0
"""Seconds for which a run that has ended waits for an unreachable store."""

_MAX_RATE = 100_000
"""Bytes per second at which a growing file may be uploaded again: an object cannot be appended to,
so a metrics.jsonl of 6 MB is uploaded once a minute, and completely with each checkpoint."""

_MIN_INTERVAL_S = 10.0

_NUM_THREADS = 4
"""Files that are uploaded at the same time; s3fs also uploads parts of one file in parallel."""

_SKIPPED_DIRS = (run_paths.CHECKPOINTS_DIR, run_paths.DAMAGED_DIR)

_SKIPPED_FILES = (*run_dir.BOOKKEEPING_FILES, run_paths.LAST_CHECKPOINT_FILE)
"""Files besides checkpoints that are not uploaded, or after the checkpoint that they name."""


class Mirror:
    """Thread that uploads what changes in a run's local folder.

    A checkpoint is complete in the store once its metadata is there, which is uploaded last, after
    the metrics of its steps. One that was deleted locally is deleted in the store after a later one
    is complete there. If processes have folders of their own, each folder has shards of the arrays:
    process 0 waits for all of them before it uploads the metadata. Its folder in the store has the
    session's number in its name, so that no other session can change it.

    While the store is unreachable, training continues and the files wait in the local folder. This
    is printed once, and so is its end.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: pathlib.Path,
        *,
        part: int,
        num_parts: int,
        session: int,
        check_lock: Callable[[], None],
    ):
        """Args:
        part: index of this process. Process 0 also uploads all files besides the arrays.
        num_parts: number of folders that together have all arrays.
        session: number of this session, greater than those of all sessions before it.
        check_lock: ends the process if another run has taken over; called before each upload, but
            not again within POLL_S.
        """
        self._start_store = store
        self._store = store.without_retries()
        self._folder = folder
        self._links = folder.with_name(f"{folder.name}.uploading")
        self._part = part
        self._num_parts = num_parts
        self._session = session
        self._check_lock = check_lock
        self._lock_checked_at = -float("inf")
        self._uploaded: dict[pathlib.Path, tuple[tuple[int, int], float]] = {}
        """Size and mtime of uploaded files, and the time of the upload."""
        self._complete: dict[int, bytes] = {}
        """Metadata of the checkpoints that are complete in the store, by step."""
        self._prefixes: dict[int, str] = {}
        """Beginning of the names of these checkpoints' objects, by step."""
        self._sent: dict[int, set[str]] = {}
        """Names of uploaded files of checkpoints, by step."""
        self._failure = ""
        self._progress = 0
        """Number of uploads by this and other processes so far; for waits with a limit."""
        self._num_seen = 0
        self._is_broken = False
        self._began = 0.0
        """Time at which the upload of a checkpoint began (time.monotonic)."""
        self._closed = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "upload")
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def start(self) -> None:
        """Removes incomplete checkpoints from the store, and starts the thread.

        Raises: UserError if the store cannot be used.
        """
        shutil.rmtree(self._links, ignore_errors=True)
        names = self._start_store.list(checkpoint_names.ALL)
        self._prefixes = checkpoint_names.find_complete(names)
        for step, prefix in self._prefixes.items():
            content = self._start_store.read(f"{prefix}{checkpoint_names.META}")
            self._complete[step] = content or b""
        if self._part == 0:
            # another process may have begun to upload a checkpoint of this session
            complete = tuple(self._prefixes.values())
            self._start_store.delete(
                name
                for name in names
                if not name.startswith(complete)
                and checkpoint_names.parse(name)[1] not in (self._session, -1)
            )
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread after the running upload."""
        self._closed.set()
        self._thread.join()

    def flush(self, patience_s: float) -> None:
        """Uploads everything that is left, after `stop`.

        Raises: NeedsAttentionError after `patience_s` without progress.
        """
        last_progress = time.monotonic()
        progress = self._progress
        is_reported = False
        while not self._try_sync(everything=True):
            if self._progress != progress:
                progress = self._progress
                last_progress = time.monotonic()
            if time.monotonic() - last_progress > patience_s:
                raise NeedsAttentionError(
                    f"{self._store.url}: {self._failure}. What is missing there is in "
                    f"{self._folder}: the same command on this machine uploads it."
                )
            if not is_reported:
                distributed.log(f"{self._store.url}: waiting until all files are there")
            is_reported = True
            time.sleep(POLL_S)
        shutil.rmtree(self._links, ignore_errors=True)
        self._pool.shutdown()

    def _run(self) -> None:
        wait_s = POLL_S
        while not self._closed.wait(wait_s):
            is_reachable = self._try_sync(everything=False) is not None
            wait_s = POLL_S if is_reachable else object_store.MAX_WAIT_S

    def _try_sync(self, *, everything: bool) -> bool | None:
        """Uploads what has changed, and reports a failure and its end.

        Returns: whether nothing is left to do; None after a failure, whatever its reason: a store
            must not end a run.
        """
        try:
            self._ensure_lock()
            is_done = self._sync(everything=everything)
        # the libraries of stores have no common class of errors, and a run goes on without a store
        except Exception as error:
            self._failure = object_store.describe(error)
            if not self._is_broken:
                distributed.log(
                    f"{self._store.url} CANNOT BE WRITTEN: {self._failure}. Files wait in "
                    f"{self._folder}, and nothing is lost"
                )
            self._is_broken = True
            return None
        if self._is_broken:
            distributed.log(f"{self._store.url} is written again; files that waited are uploaded")
        self._is_broken = False
        return is_done

    def _sync(self, *, everything: bool) -> bool:
        """Uploads what has changed. Returns: False if it waits for other processes' shards."""
        config = self._folder / run_paths.CONFIG_FILE
        if self._part == 0 and config.exists():
            # the file that marks a run first: without it, others would be a stranger's
            self._upload_if_changed(config, everything=everything)
        checkpoints = self._folder / run_paths.CHECKPOINTS_DIR
        local = run_paths.list_steps(checkpoints)
        # one of which only the metadata was downloaded has no arrays
        whole = [step for step in local if (checkpoints / str(step) / run_paths.MASTER).is_dir()]
        # first the one whose upload has begun, then the latest: an older one may soon be deleted
        for step in (*run_paths.list_steps(self._links), *reversed(whole)):
            if not self._upload_checkpoint(step):
                return False
        if self._part == 0:
            self._upload_changed_files(everything=everything)
        self._delete_superseded(local)
        return True

    def _upload_changed_files(self, *, everything: bool) -> None:
        """Uploads files that have changed. Args: everything: also those that changed recently."""
        for path in _walk(self._folder):
            with contextlib.suppress(FileNotFoundError):
                self._upload_if_changed(path, everything=everything)

    def _upload_if_changed(self, path: pathlib.Path, *, everything: bool) -> None:
        """Uploads a file if it has changed, a large one rarely unless `everything`: _MAX_RATE."""
        stat = path.stat()
        state = (stat.st_size, stat.st_mtime_ns)
        before, uploaded_at = self._uploaded.get(path, (None, -float("inf")))
        interval_s = max(_MIN_INTERVAL_S, stat.st_size / _MAX_RATE)
        is_due = everything or time.monotonic() - uploaded_at > interval_s
        if state == before or not is_due:
            return
        self._upload(path, path.relative_to(self._folder).as_posix())
        self._uploaded[path] = (state, time.monotonic())

    def _upload_checkpoint(self, step: int) -> bool:
        """Uploads what the store lacks of a checkpoint.

        Returns: False if process 0 waits for the shards of other processes.
        """
        linked = self._link(step)
        if linked is None:
            return True
        meta = (linked / checkpoint_names.META).read_bytes()
        in_store = self._complete.get(step)
        if in_store is None or _arrays(in_store) != _arrays(meta):
            if in_store is not None:
                self._delete_checkpoint(step)
            self._prefixes[step] = checkpoint_names.make_prefix(step, self._session)
            self._upload_arrays(step, linked)
        prefix = self._prefixes[step]
        parts = f"{prefix}{checkpoint_names.PARTS_DIR}/"
        if self._part > 0:
            self._store.write(f"{parts}{self._part}", b"")
        else:
            names = self._store.list(prefix)
            self._progress += len(names) != self._num_seen
            self._num_seen = len(names)
            num_parts = sum(name.startswith(parts) for name in names)
            if num_parts < self._num_parts - 1:
                self._failure = f"the shards of checkpoint {step} from other nodes are missing"
                return False
            # the metrics of its steps must be there before it can be resumed from
            self._upload_changed_files(everything=True)
            self._ensure_lock(is_final=True)
            self._store.write(f"{prefix}{checkpoint_names.META}", meta)
            with contextlib.suppress(FileNotFoundError):
                self._upload_if_changed(
                    self._folder / run_paths.LAST_CHECKPOINT_FILE, everything=True
                )
        self._complete[step] = meta
        shutil.rmtree(self._links, ignore_errors=True)
        return True

    def _upload_arrays(self, step: int, linked: pathlib.Path) -> None:
        """Uploads the files of a checkpoint besides its metadata.

        Files that were uploaded before a failure are left out.
        """
        sent = self._sent.setdefault(step, set())
        paths = [path for path in sorted(linked.rglob("*")) if path.is_file()]
        names = {path.relative_to(linked).as_posix(): path for path in paths}
        names.pop(checkpoint_names.META)

        def upload(name: str) -> None:
            self._upload(names[name], f"{self._prefixes[step]}{name}")
            sent.add(name)
            self._progress += 1

        futures = [self._pool.submit(upload, name) for name in names if name not in sent]
        if not futures:
            return
        for future in concurrent.futures.as_completed(futures):
            future.result()
        mib = sum(path.stat().st_size for path in paths) / MIB
        seconds = durations.describe(round(time.monotonic() - self._began, 1))
        distributed.log(f"checkpoint {step}: {mib:,.0f} MiB uploaded in {seconds}")

    def _link(self, step: int) -> pathlib.Path | None:
        """Links the files of a checkpoint in a folder of their own.

        A checkpoint that a later one replaces can then be deleted while it is uploaded. Otherwise,
        uploads that take longer than the interval between checkpoints would never be completed.

        Returns: None if the store has the checkpoint, or if it was deleted.
        """
        target = self._links / str(step)
        if target.exists():
            return target
        source = self._folder / run_paths.CHECKPOINTS_DIR / str(step)
        partial = target.with_name(f"{step}{files.PARTIAL_SUFFIX}")
        try:
            if self._complete.get(step) == (source / checkpoint_names.META).read_bytes():
                return None
            self._began = time.monotonic()
            shutil.rmtree(self._links, ignore_errors=True)
            shutil.copytree(source, partial, copy_function=os.link)
            partial.rename(target)
        except OSError:
            if source.exists():
                raise
            return None
        return target

    def _delete_superseded(self, local: list[int]) -> None:
        """Deletes checkpoints that were deleted locally, or found to be damaged."""
        damaged = self._folder / run_paths.DAMAGED_DIR
        latest = max(self._complete, default=0)
        for step in sorted(set(self._complete) - set(local)):
            if step < latest or (damaged / str(step)).is_dir():
                self._delete_checkpoint(step)

    def _delete_checkpoint(self, step: int) -> None:
        """Deletes a checkpoint in the store, if this is process 0, and what is recorded of it."""
        if self._part == 0:
            # also what other sessions have written of it, the metadata first: from then on it is
            # incomplete
            listing = self._store.list(checkpoint_names.ALL)
            names = [name for name in listing if checkpoint_names.parse(name)[0] == step]
            self._store.delete(
                sorted(names, key=lambda name: not name.endswith(checkpoint_names.META))
            )
        self._complete.pop(step, None)
        self._prefixes.pop(step, None)
        self._sent.pop(step, None)

    def _upload(self, path: pathlib.Path, name: str) -> None:
        self._ensure_lock()
        self._store.upload(path, name)

    def _ensure_lock(self, *, is_final: bool = False) -> None:
        """Ends the process if another run has taken over. Several threads call it.

        Args: is_final: True before the upload that completes a checkpoint.
        """
        if is_final or time.monotonic() - self._lock_checked_at > POLL_S:
            self._check_lock()
            self._lock_checked_at = time.monotonic()


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files to upload besides checkpoints."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED_DIRS:
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())
        elif path.is_file() and path.name not in _SKIPPED_FILES:
            if path.suffix != files.PARTIAL_SUFFIX:
                yield path


def _arrays(meta: bytes) -> object:
    """Checksums of the arrays of a checkpoint, from its metadata."""
    return (files.parse_json(meta) or {}).get("arrays")
