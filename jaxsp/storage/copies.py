"""Local copies of runs in object stores; arrays of a checkpoint are downloaded when needed."""

import concurrent.futures
import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import filelock

from jaxsp.core import urls
from jaxsp.core.errors import UserError
from jaxsp.core.units import MIB
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.storage import checkpoint_names, session_lock
from jaxsp.storage.object_store import ObjectInfo, ObjectStore

_LAST_FILE = f"{run_paths.MASTER}/manifest.ocdbt"
"""File that a checkpoint has once all its files are there. It is absent if several nodes wrote the
checkpoint: then each has only its own shards, and the store's list shows what is missing."""

_NUM_THREADS = 4

_stores: dict[pathlib.Path, ObjectStore] = {}
"""Store of each local folder of a run."""

_fetched_again: set[pathlib.Path] = set()


def make_local(text: str, *, field: str) -> str:
    """Returns the local copy of a run or a checkpoint if a text is its URL; otherwise the text.

    Only small files are downloaded; `fetch` downloads the arrays.
    Raises: UserError if there is no run, or the store cannot be used.
    """
    if not urls.is_url(text):
        return text
    try:
        urls.check(text)
    except ValueError as error:
        raise UserError(f"{field} = {text}: {error}.") from None
    run_url, _, step = text.rstrip("/").partition(f"/{run_paths.CHECKPOINTS_DIR}/")
    store = ObjectStore(run_url, label=f"{field} = {text}")
    folder = urls.cache_dir() / "downloads" / urls.name_local(run_url)
    listing = store.list()
    if run_paths.CONFIG_FILE not in listing:
        raise UserError(f"{field} = {text}: contains no run. Use the URL of a run's directory.")
    with lock(folder):
        _download_small(store, folder, listing)
    register(folder, store)
    step = step.partition("-")[0]  # the name of its folder in the store also has the session
    return str(folder / run_paths.CHECKPOINTS_DIR / step) if step else str(folder)


def register(folder: pathlib.Path, store: ObjectStore) -> None:
    """Lets `fetch` find the store of a run's local folder."""
    _stores[folder.resolve()] = store


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
    """Context in which no other process of this machine downloads to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


def download_run(store: ObjectStore, folder: pathlib.Path) -> None:
    """Replaces a folder by the small files of a run in a store."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in run_dir.BOOKKEEPING_FILES:
            path.unlink()
    _download_small(store, folder, store.list())


def _download_small(
    store: ObjectStore, folder: pathlib.Path, listing: dict[str, ObjectInfo]
) -> None:
    """Downloads the files of a run besides arrays of checkpoints.

    A local checkpoint is removed if its metadata, which has checksums of the arrays, differs.
    """
    names = checkpoint_names.map_to_local(listing)
    for path in (folder / run_paths.CHECKPOINTS_DIR).glob("*"):
        local = path / checkpoint_names.META
        name = names.get(local.relative_to(folder).as_posix())
        in_store = None if name is None else store.read(name)
        if not local.is_file() or local.read_bytes() != in_store:
            shutil.rmtree(path)
    _download(store, folder, {local: names[local] for local in filter(_is_small, names)}, listing)


def _is_small(name: str) -> bool:
    """Args: name: name in a local copy."""
    if name.startswith(f"{run_paths.CHECKPOINTS_DIR}/"):
        return name.endswith(f"/{checkpoint_names.META}")
    skipped = (session_lock.LOCK_PREFIX, "profile/", f"{run_paths.DAMAGED_DIR}/")
    return not name.startswith(skipped) and name not in run_dir.BOOKKEEPING_FILES


def show(path: pathlib.Path) -> str:
    """Returns the URL of a path in a local copy; of other paths, the path."""
    for folder, store in _stores.items():
        if path.resolve().is_relative_to(folder):
            return f"{store.url}/{path.resolve().relative_to(folder).as_posix()}"
    return str(path)


def fetch(checkpoint: pathlib.Path) -> None:
    """Downloads what a checkpoint in a local copy lacks; other paths are not changed.

    Raises: UserError if the store cannot be used.
    """
    folder = checkpoint.resolve().parent.parent
    store = _stores.get(folder)
    if store is None:
        return
    prefix = f"{checkpoint_names.ALL}{checkpoint.name}/"
    with lock(folder):
        # after a kill, this machine may have a checkpoint that the store does not have yet
        if (checkpoint / _LAST_FILE).exists():
            return
        listing = store.list(checkpoint_names.ALL)
        missing = {
            local: name
            for local, name in checkpoint_names.map_to_local(listing).items()
            if local.startswith(prefix) and not (folder / local).exists()
        }
        if not missing:
            return
        mib = sum(listing[name].size for name in missing.values()) / MIB
        distributed.log(f"{show(checkpoint)}: downloading {mib:,.0f} MiB")
        partial = folder.with_name(f"{folder.name}.download")
        _download(store, partial, missing, listing)
        for name in sorted(missing, key=lambda name: name.endswith(f"/{_LAST_FILE}")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).rename(folder / name)
        shutil.rmtree(partial)


def fetch_again(checkpoint: pathlib.Path) -> bool:
    """Downloads a damaged checkpoint again: the store's copy may be intact.

    Returns: False if it has been downloaded again before, or is in no store.
    """
    folder = checkpoint.resolve().parent.parent
    store = _stores.get(folder)
    if store is None or checkpoint in _fetched_again:
        return False
    _fetched_again.add(checkpoint)
    complete = checkpoint_names.find_complete(store.list(checkpoint_names.ALL))
    if checkpoint.name not in map(str, complete):
        return False
    distributed.log(f"{checkpoint} IS DAMAGED; it is replaced by the copy in {store.url}")
    with lock(folder):
        shutil.rmtree(checkpoint, ignore_errors=True)
    fetch(checkpoint)
    return True


def _download(
    store: ObjectStore,
    folder: pathlib.Path,
    names: dict[str, str],
    listing: dict[str, ObjectInfo],
) -> None:
    """Downloads objects. Args: names: name of each object, by that of its file."""

    def download(local: str, name: str) -> None:
        path = folder / local
        if not path.is_relative_to(folder) or ".." in path.parts:
            raise UserError(f"{store.url}: has an object named {name}. Remove it.")
        store.download(name, path, size=listing[name].size)

    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        futures = [pool.submit(download, *item) for item in names.items()]
        for future in futures:
            future.result()
