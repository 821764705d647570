"""Folders of checkpoints: which are kept and which are deleted, and free space for them."""

import contextlib
import pathlib
import shutil

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.core import files
from jaxsp.core.errors import UserError

DELETING_SUFFIX = ".deleting"


def list_unfinished(directory: pathlib.Path) -> list[pathlib.Path]:
    """Lists what runs left that were killed while they wrote or deleted a checkpoint."""
    items = {run_paths.MASTER, run_paths.OPT, run_paths.META}
    return [
        path
        for path in directory.glob("*")
        if path.suffix in (files.PARTIAL_SUFFIX, DELETING_SUFFIX)
        and path.stem.isdecimal()
        and {child.name for child in path.iterdir()} <= items
    ]


def remove_unfinished(directory: pathlib.Path) -> None:
    """Removes unfinished checkpoints."""
    for path in list_unfinished(directory):
        shutil.rmtree(path, ignore_errors=True)


def delete_superseded(
    directory: pathlib.Path, config: CheckpointConfig, eval_set: dict[str, str] | None
) -> None:
    """Deletes checkpoints that are neither among the latest nor among the best.

    Only checkpoints with a loss on `eval_set` are ranked. Of equal losses, the later is better.
    A numbered folder without a checkpoint's metadata stays. Raises: OSError.
    """
    steps = run_paths.list_steps(directory)
    steps = [step for step in steps if (directory / str(step) / reader.META_FILE).is_file()]
    digest = (eval_set or {}).get("digest")
    ranked = []
    for step in steps if digest else ():
        with contextlib.suppress(UserError):  # a damaged one is not ranked
            meta = reader.read_meta(directory / str(step))
            if meta.eval_loss is not None and (meta.eval_set or {}).get("digest") == digest:
                ranked.append((meta.eval_loss, -step))
    best = {-negative_step for _, negative_step in sorted(ranked)[: config.keep_best]}
    for step in {*steps[: -config.keep_latest]} - best:
        # renamed first: a folder whose name is a step is complete
        renamed = directory / f"{step}{DELETING_SUFFIX}"
        (directory / str(step)).rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)  # the next start removes the rest


def free_bytes(directory: pathlib.Path) -> int | None:
    """Returns the free bytes of a folder's disk; None if they cannot be read."""
    paths = (directory.absolute(), *directory.absolute().parents)
    existing = next(path for path in paths if path.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None
