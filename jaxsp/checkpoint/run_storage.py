"""Runs in object stores: a run works in a local copy, and uploads each checkpoint."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.run_paths import META_FILE
from jaxsp.core import files
from jaxsp.core.errors import NeedsAttentionError, UserError, at
from jaxsp.system import distributed, run_lock

if TYPE_CHECKING:  # few runs use a store
    from jaxsp.system.object_store import ObjectStore

ID_FILE = "run_id"


def object_name(step: int | str, file: str = "") -> str:
    """Returns the name of a checkpoint's object or folder, also its path in a local copy."""
    return f"{run_paths.CHECKPOINTS_DIR}/{step}/{file}"


def find_steps(names: Iterable[str], file: str = META_FILE) -> set[int]:
    """Returns the steps of complete checkpoints. Args: file: `.*` for incomplete ones, too."""
    matches = (re.fullmatch(object_name(r"(\d+)", file), name) for name in names)
    return {int(match[1]) for match in matches if match}


def make_local(text: str) -> str:
    """Returns the local copy of a run's or a checkpoint's URL; other texts are returned."""
    if not files.is_url(text):
        return text
    from jaxsp.system.object_store import ObjectStore

    files.check_url(text)
    url, _, step = text.rstrip("/").partition(f"/{run_paths.CHECKPOINTS_DIR}/")
    store = ObjectStore(url)
    folder = files.cache_dir() / "downloads" / run_paths.name_local(url)
    steps = {int(step)} if step.isdecimal() else {max(find_steps(store.list()), default=-1)}
    download(store, folder, steps=steps)
    if not (folder / run_paths.CONFIG_FILE).exists():
        raise UserError("contains no run. Use the URL of a run's directory.")
    return str(folder / object_name(step)) if step else str(folder)


def download(
    store: "ObjectStore",
    folder: pathlib.Path,
    *,
    steps: set[int] | None = None,
    is_old: bool = True,
) -> None:
    """Downloads checkpoints (None: all) and other files of a store into a local copy.
    Args: is_old: True to remove checkpoints of the copy that the store does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        infos = store.list()
        complete = find_steps(infos)
        kept = find_same(store, folder, complete)
        local = {*run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR)}
        if is_old:
            for step in local - kept:
                shutil.rmtree(folder / object_name(step))
            local = kept
        missing = (complete if steps is None else complete & steps) - local
        wanted = tuple(map(object_name, kept | missing))
        arrays = {name for name in infos if name.startswith(wanted)}
        names = {name for name in arrays if not (folder / name).exists()}
        names |= {name for name in infos if not name.startswith(f"{run_paths.CHECKPOINTS_DIR}/")}
        if num_bytes := sum(infos[name]["size"] for name in names):
            distributed.log(f"{store.url}: downloading {num_bytes / 2**20:,.0f} MiB")
        sizes = {name: infos[name]["size"] for name in arrays}  # other files may grow meanwhile
        store.download({name: folder / name for name in names}, sizes)


def find_same(store: "ObjectStore", folder: pathlib.Path, complete: set[int]) -> set[int]:
    """Returns those of the store's complete checkpoints whose arrays are equal in a local copy."""
    same = set()
    for step in complete & {*run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR)}:
        # the checksums of the arrays; an evaluation may have changed the rest
        local = (files.read_json(folder / object_name(step, META_FILE)) or {}).get("arrays")
        stored = files.parse_json(store.read(object_name(step, META_FILE))) or {}
        if local is not None and local == stored.get("arrays"):
            same.add(step)
    return same


@dataclasses.dataclass
class Uploads:
    """Uploads of one process: its shards, and everything else if it is process 0.
    A checkpoint is complete in the store once its metadata is there, which is uploaded last."""

    store: "ObjectStore"
    folder: pathlib.Path
    complete: set[int]  # steps of the checkpoints in the store that are the local ones
    _versions: dict[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    """Inode, time and size of each small file when it was uploaded."""

    def delete(self, step: int) -> None:
        """Deletes a checkpoint in the store, in process 0."""
        if jax.process_index() == 0:
            self.complete.discard(step)
            self.store.delete(object_name(step, META_FILE))  # from here on it is incomplete
            self.store.delete(object_name(step))

    def claim(self) -> None:
        """Uploads the files that mark the store as this run's, in process 0.
        Until then, no process may upload a shard: a later start would refuse the store."""
        if jax.process_index() == 0 and (self.folder / run_paths.CONFIG_FILE).exists():
            if not (self.folder / ID_FILE).exists():
                (self.folder / ID_FILE).write_text(uuid.uuid4().hex)
            self._upload_changed({run_paths.CONFIG_FILE, ID_FILE})

    def upload_shards(self, step: int) -> None:
        """Uploads what this process has written of a checkpoint, without metadata."""
        names = self._list_files(object_name(step)) - {object_name(step, META_FILE)}
        self.store.upload(self.folder, names)

    def finish(self, *steps: int) -> None:
        """Uploads everything else, and deletes superseded checkpoints, in process 0.
        Args: steps: checkpoints whose shards are in the store."""
        if jax.process_index() > 0:
            return
        self.claim()
        skipped = (run_paths.CHECKPOINTS_DIR, run_paths.DAMAGED_DIR, "profile")
        last = {run_paths.LAST_CHECKPOINT_FILE}  # names a checkpoint of the store
        names = self._list_files("") - {*run_lock.BOOKKEEPING_FILES, *last}
        small = {name for name in names if name.partition("/")[0] not in skipped}
        local = run_paths.list_steps(self.folder / run_paths.CHECKPOINTS_DIR)
        self.complete = (self.complete | {*steps}) & {*local}
        for group in (small, {object_name(step, META_FILE) for step in self.complete}, last):
            self._upload_changed(group)
        stored = find_steps(self.store.list(run_paths.CHECKPOINTS_DIR), ".*")
        for step in stored - self.complete:
            if step < max(self.complete, default=0):
                self.delete(step)

    def _upload_changed(self, names: Iterable[str]) -> None:
        """Uploads small files that have changed since this object last uploaded them."""
        versions = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stat = (self.folder / name).stat()
                versions[name] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        changed = {name: x for name, x in versions.items() if self._versions.get(name) != x}
        self.store.upload(self.folder, changed)
        self._versions |= changed

    def _list_files(self, folder: str) -> set[str]:
        paths = (path for path in (self.folder / folder).rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix() for path in paths}


PATIENCE_S = 1800.0
"""Seconds of an outage of the store after which a run ends."""

uploads: dict[pathlib.Path, Uploads] = {}
"""Uploads of this process's run, by its local copy."""


@contextlib.contextmanager
def open_run(url: str, folder: pathlib.Path) -> Iterator[None]:
    """Context in which a run can use run.directory, if that is a URL; otherwise it does nothing.

    At the start, the side with the later checkpoint, store or this process's copy in `folder`, is
    copied to the other. All processes must enter it together, after run_lock.lock.
    """
    if not files.is_url(url):
        yield
        return
    from jaxsp.system.object_store import ObjectStore

    with at("run.directory", url):
        store = ObjectStore(url)
        stored = int(multihost_utils.broadcast_one_to_all(np.int32(_clean(store, folder))))
        local = max(run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR), default=0)
        local = local if (folder / run_paths.CONFIG_FILE).exists() else -1
        all_local = multihost_utils.process_allgather(np.int32(local))
        complete = find_steps(store.list())
        own = Uploads(store, folder, find_same(store, folder, complete))
        is_old = local < stored or bool((all_local != local).any())
        if not is_old:
            if local > stored:
                own.claim()
                multihost_utils.sync_global_devices("the store is this run's")
                own.upload_shards(local)
                multihost_utils.sync_global_devices("shards are uploaded")
            own.finish(*{local} - {stored})
            multihost_utils.sync_global_devices("checkpoint is uploaded")
        download(store, folder, is_old=is_old)
        own.complete = find_steps(store.list())
    store.patience_s = PATIENCE_S
    store.is_in_run = True
    kept = folder / run_paths.CHECKPOINTS_DIR
    store.advice = f"The latest checkpoint is in {kept}; the same command uploads it and resumes."
    uploads[folder.resolve()] = own
    try:
        yield
    except Exception:  # whatever ended the run is raised again after an attempt to upload
        store.patience_s = 0.0
        with contextlib.suppress(UserError, NeedsAttentionError):
            own.finish()
        raise
    own.finish()


def _clean(store: "ObjectStore", folder: pathlib.Path) -> int:
    """Deletes incomplete checkpoints. Returns: latest complete one, or 0, in process 0."""
    if jax.process_index() > 0:
        return 0
    names = set(store.list()) - set(run_lock.BOOKKEEPING_FILES)
    if names and run_paths.CONFIG_FILE not in names:
        raise UserError(f"has other files, as {min(names)}. Use another URL.")
    if ID_FILE in names and (folder / ID_FILE).exists():
        if store.read(ID_FILE).decode() != (folder / ID_FILE).read_text():
            raise UserError(
                f"has another run than the local copy {folder}. Remove the one that is not needed, "
                "or use another URL."
            )
    complete = find_steps(names)
    for step in find_steps(names, ".*") - complete:
        store.delete(object_name(step))
    return max(complete, default=0)
