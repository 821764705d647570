"""Runs whose directory is in an object store: the start, and the local copy."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint import run_paths, run_storage
from jaxsp.checkpoint.run_storage import Uploads
from jaxsp.core import paths
from jaxsp.core.errors import NeedsAttentionError, UserError, at
from jaxsp.system import run_lock
from jaxsp.system.object_store import ObjectStore

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
    if not paths.is_url(url):
        yield
        return
    with at("run.directory", url):
        store = ObjectStore(url)
        stored = int(multihost_utils.broadcast_one_to_all(np.int32(_clean(store, folder))))
        local = max(run_paths.list_steps(folder / run_paths.CHECKPOINTS_DIR), default=0)
        local = local if (folder / run_paths.CONFIG_FILE).exists() else -1
        all_local = multihost_utils.process_allgather(np.int32(local))
        complete = run_storage.find_steps(store.list())
        own = Uploads(store, folder, run_storage.find_same(store, folder, complete))
        is_old = local < stored or bool((all_local != local).any())
        if not is_old:
            if local > stored:
                own.claim()
                multihost_utils.sync_global_devices("the store is this run's")
                own.upload_shards(local)
                multihost_utils.sync_global_devices("shards are uploaded")
            own.finish(*{local} - {stored})
            multihost_utils.sync_global_devices("checkpoint is uploaded")
        run_storage.download(store, folder, is_old=is_old)
        own.complete = run_storage.find_steps(store.list())
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


def _clean(store: ObjectStore, folder: pathlib.Path) -> int:
    """Deletes incomplete checkpoints. Returns: latest complete one, or 0, in process 0."""
    if jax.process_index() > 0:
        return 0
    names = set(store.list()) - set(run_lock.BOOKKEEPING_FILES)
    if names and run_paths.CONFIG_FILE not in names:
        raise UserError(f"has other files, as {min(names)}. Use another URL.")
    if run_storage.ID_FILE in names and (folder / run_storage.ID_FILE).exists():
        if store.read(run_storage.ID_FILE).decode() != (folder / run_storage.ID_FILE).read_text():
            raise UserError(
                f"has another run than the local copy {folder}. Remove the one that is not needed, "
                "or use another URL."
            )
    complete = run_storage.find_steps(names)
    for step in run_storage.find_steps(names, ".*") - complete:
        store.delete(run_storage.object_name(step))
    return max(complete, default=0)
