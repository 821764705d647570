"""Runs in object stores: a run works in a local copy, and uploads each checkpoint."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable

import filelock
import jax

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.reader import META_FILE
from jaxsp.core import files, paths
from jaxsp.core.errors import UserError
from jaxsp.system import distributed, run_lock
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
    if not paths.is_url(text):
        return text
    paths.check_url(text)
    url, _, step = text.rstrip("/").partition(f"/{run_paths.CHECKPOINTS_DIR}/")
    store = ObjectStore(url)
    folder = paths.cache_dir() / "downloads" / run_paths.name_local(url)
    steps = {int(step)} if step.isdecimal() else {max(find_steps(store.list()), default=-1)}
    download(store, folder, steps=steps)
    if not (folder / run_paths.CONFIG_FILE).exists():
        raise UserError("contains no run. Use the URL of a run's directory.")
    return str(folder / object_name(step)) if step else str(folder)


def download(
    store: ObjectStore, folder: pathlib.Path, *, steps: set[int] | None = None, is_old: bool = True
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


def find_same(store: ObjectStore, folder: pathlib.Path, complete: set[int]) -> set[int]:
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

    store: ObjectStore
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
