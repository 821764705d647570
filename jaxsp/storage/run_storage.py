"""Runs in object stores: a run works in a local copy, and uploads each checkpoint."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.config.run_schema import RunConfig
from jaxsp.core import files, urls
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.storage.object_store import ObjectStore

PATIENCE_S = 1800.0  # of an outage, after which a run ends

uploads: dict[pathlib.Path, "Uploads"] = {}  # of the run in a local copy

_ID_FILE = "run_id"

_META = f"{run_paths.META}/metadata"
"""File of a checkpoint that is uploaded last: with it, the checkpoint is complete."""


def _name(step: int | str, file: str = "") -> str:
    """Returns the name of a checkpoint's object or folder, also its path in a local copy."""
    return f"{run_paths.CHECKPOINTS_DIR}/{step}/{file}"


def find_steps(names: Iterable[str], file: str = _META) -> set[int]:
    """Returns the steps of complete checkpoints. Args: file: `.*` for incomplete ones, too."""
    matches = (re.fullmatch(_name(r"(\d+)", file), name) for name in names)
    return {int(match[1]) for match in matches if match}


def make_local(text: str, *, field: str) -> str:
    """Returns the local copy of a run's or a checkpoint's URL; other texts are returned."""
    if not urls.is_url(text):
        return text
    try:
        urls.check(text)
    except ValueError as error:
        raise UserError(f"{field} = {text}: {error}.") from None
    url, _, step = text.rstrip("/").partition(f"/{run_paths.CHECKPOINTS_DIR}/")
    store = ObjectStore(url, label=f"{field} = {text}")
    folder = urls.cache_dir() / "downloads" / urls.name_local(url)
    steps = {int(step)} if step.isdecimal() else {max(find_steps(store.list()), default=-1)}
    download(store, folder, steps=steps)
    if not (folder / run_paths.CONFIG_FILE).exists():
        raise UserError(f"{field} = {text}: contains no run. Use the URL of a run's directory.")
    return str(folder / _name(step)) if step else str(folder)


def download(
    store: ObjectStore, folder: pathlib.Path, *, steps: set[int] | None = None, is_old: bool = True
) -> set[int]:
    """Downloads what a local copy lacks.

    Args:
        steps: checkpoints to download; None: all that are complete.
        is_old: False to change nothing except to complete checkpoints that are the same in both.
    Returns: steps of the checkpoints that are the same in both.
    """
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        infos = store.list()
        complete = find_steps(infos)
        same = set()
        for step in run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR):
            # the checksums of the arrays; an evaluation may have changed the rest
            local = (files.read_json(folder / _name(step, _META)) or {}).get("arrays")
            meta = store.read(_name(step, _META)) if step in complete else None
            if local is not None and local == (files.parse_json(meta) or {}).get("arrays"):
                same.add(step)
            elif is_old:
                shutil.rmtree(folder / _name(step))
        names = set()
        if is_old:
            same |= complete if steps is None else steps & complete
            names = {name for name in infos if not name.startswith(_name("").rstrip("/"))}
        missing = {name for name in infos if not (folder / name).exists()}
        names |= {name for name in missing if name.startswith(tuple(map(_name, same)))}
        num_bytes = sum(infos[name]["size"] for name in names)
        distributed.log(f"{store.url}: downloading {num_bytes / 2**20:,.0f} MiB")
        in_checkpoints = names & {name for name in infos if name.startswith(_name("").rstrip("/"))}
        sizes = {name: infos[name]["size"] for name in in_checkpoints}  # others may grow meanwhile
        store.download({name: folder / name for name in names}, sizes)
    return same


@dataclasses.dataclass
class Uploads:
    """Uploads of one process: its shards, and everything else if it is process 0.

    A checkpoint is complete in the store once its metadata is there, which is uploaded last.
    """

    store: ObjectStore
    folder: pathlib.Path
    complete: set[int]  # steps of the checkpoints in the store that are the local ones

    def delete(self, step: int) -> None:
        """Deletes a checkpoint in the store."""
        self.complete.discard(step)
        self.store.delete(_name(step, _META))  # from here on it is incomplete
        self.store.delete(_name(step))

    def upload_shards(self, step: int) -> None:
        """Uploads what this process has written of a checkpoint, without metadata."""
        self.store.upload(self.folder, self._list_files(_name(step)) - {_name(step, _META)})

    def finish(self, *steps: int) -> None:
        """Uploads everything else, and deletes superseded checkpoints, in process 0.

        Args: steps: checkpoints whose shards are in the store.
        """
        if jax.process_index() > 0:
            return
        skipped = (run_paths.CHECKPOINTS_DIR, run_paths.DAMAGED_DIR, "profile")
        first = {run_paths.CONFIG_FILE}  # it makes the others files of a run
        last = {run_paths.LAST_CHECKPOINT_FILE}  # names a checkpoint of the store
        names = self._list_files("") - {*run_dir.BOOKKEEPING_FILES, *first, *last}
        small = {name for name in names if name.partition("/")[0] not in skipped}
        local = run_paths.list_steps(self.folder / run_paths.CHECKPOINTS_DIR)
        self.complete = (self.complete | {*steps}) & {*local}
        metas = {_name(step, _META) for step in self.complete}
        for group in (first, small, metas, last):
            self.store.upload(self.folder, group)
        stored = find_steps(self.store.list(run_paths.CHECKPOINTS_DIR), ".*")
        for step in stored - self.complete:
            if step < max(self.complete, default=0):
                self.delete(step)

    def _list_files(self, folder: str) -> set[str]:
        paths = (path for path in (self.folder / folder).rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix() for path in paths}


@contextlib.contextmanager
def open_run(run: RunConfig) -> Iterator[None]:
    """Context in which a run can use run.directory, if that is a URL; otherwise it does nothing.

    At the start, the side with the later checkpoint, local copy or store, is copied to the other.
    All processes must enter it together, after run_dir.lock; each has a copy of its own.
    """
    if not urls.is_url(run.directory):
        yield
        return
    store = ObjectStore(run.directory, label=f"run.directory = {run.directory}")
    folder = run_paths.local_dir(run)
    stored = int(multihost_utils.broadcast_one_to_all(np.int32(_clean(store, folder))))
    has_run = (folder / run_paths.CONFIG_FILE).exists()
    steps = run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR)
    local = max(steps, default=0) if has_run else -1
    all_local = multihost_utils.process_allgather(np.int32(local))
    is_old = stored > local or bool((all_local != local).any())
    own = Uploads(store, folder, download(store, folder, is_old=is_old))
    if local > stored and not is_old:
        own.upload_shards(local)
        multihost_utils.sync_global_devices("shards are uploaded")
        own.finish(local)
        multihost_utils.sync_global_devices("checkpoint is uploaded")
        download(store, folder, is_old=False)  # the shards of other processes
    if jax.process_index() == 0 and not (folder / _ID_FILE).exists():
        (folder / _ID_FILE).write_text(uuid.uuid4().hex)
    store.patience_s = PATIENCE_S
    store.error_type = NeedsAttentionError
    kept = folder / run_paths.CHECKPOINTS_DIR
    store.advice = f"The latest checkpoint is in {kept}; the same command uploads it and resumes."
    uploads[folder.resolve()] = own
    with run_dir.write_own_copy(folder):
        try:
            yield
        except Exception:  # whatever ended the run is raised again after an attempt to upload
            store.patience_s = 0.0
            with contextlib.suppress(UserError, NeedsAttentionError):
                own.finish()
            raise
        own.finish()


def _clean(store: ObjectStore, folder: pathlib.Path) -> int:
    """Deletes incomplete checkpoints. Returns: latest complete one, or 0, in process 0.

    Raises: UserError for other files than a run's, and for another run than that of the local copy.
    """
    if jax.process_index() > 0:
        return 0
    names = set(store.list()) - set(run_dir.BOOKKEEPING_FILES)
    if names and run_paths.CONFIG_FILE not in names:
        other = min(names)
        raise UserError(f"{store.label}: has other files, such as {other}. Use another URL.")
    if _ID_FILE in names and (folder / _ID_FILE).exists():
        if store.read(_ID_FILE).decode() != (folder / _ID_FILE).read_text():
            raise UserError(
                f"{store.label}: has another run than the local copy {folder}. Remove the one that "
                "is not needed, or use another URL."
            )
    complete = find_steps(names)
    for step in find_steps(names, ".*") - complete:
        store.delete(_name(step))
    return max(complete, default=0)
