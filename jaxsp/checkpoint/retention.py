"""Folders of checkpoints: which are kept, deleted or set aside, and their space on the disk."""

import contextlib
import itertools
import pathlib
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.core.units import format_bytes
from jaxsp.runtime import run_dir, run_paths

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


def find_superseded(
    directory: pathlib.Path, retention: CheckpointConfig, eval_set: dict[str, str] | None
) -> list[int]:
    """Returns the steps of checkpoints that are neither among the latest nor among the best.

    Only checkpoints with a loss on `eval_set` are ranked. Of equal losses, the later is better.
    A numbered folder without a checkpoint's metadata is left out.
    """
    steps = [
        step
        for step in run_paths.list_steps(directory)
        if (directory / str(step) / reader.META_FILE).is_file()
    ]
    ranked = []
    for step in steps:
        with contextlib.suppress(UserError):  # a damaged one is not ranked
            meta = reader.read_meta(directory / str(step))
            digests = [(named or {}).get("digest") for named in (meta.eval_set, eval_set)]
            if meta.eval_loss is not None and digests[0] == digests[1] is not None:
                ranked.append((meta.eval_loss, -step))
    best = {-negative_step for _, negative_step in sorted(ranked)[: retention.keep_best]}
    return [step for step in steps[: -retention.keep_latest] if step not in best]


def delete_superseded(
    directory: pathlib.Path, retention: CheckpointConfig, eval_set: dict[str, str] | None
) -> None:
    """Deletes the checkpoints that `find_superseded` finds. Raises: OSError."""
    for step in find_superseded(directory, retention, eval_set):
        # renamed first: a folder whose name is a step is complete
        renamed = directory / f"{step}{DELETING_SUFFIX}"
        (directory / str(step)).rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)  # the next start removes the rest


def set_aside(checkpoint: pathlib.Path) -> pathlib.Path:
    """Moves a damaged checkpoint to the run's damaged/ folder, and returns its new path.

    All processes must call this together.
    """
    folder = checkpoint.parent.parent / run_paths.DAMAGED_DIR
    target = folder / checkpoint.name
    numbers = itertools.count(2)
    while target.exists():
        target = folder / f"{checkpoint.name}-{next(numbers)}"
    multihost_utils.sync_global_devices("all have chosen the same target")
    if run_dir.is_writer(checkpoint):
        folder.mkdir(exist_ok=True)
        checkpoint.rename(target)
    multihost_utils.sync_global_devices("the checkpoint is moved")
    return target


def tree_bytes(state: Any) -> int:
    """Returns the bytes of all arrays in a pytree; copies on several devices count once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def check_space(
    directory: pathlib.Path,
    retention: CheckpointConfig,
    *,
    checkpoint_bytes: int,
    num_checkpoints: int,
) -> str | None:
    """Compares the free space in a run directory with the space that checkpoints need.

    Their bytes count uncompressed, because it is unknown how much zstd leaves. Unfinished
    checkpoints count as free: they are removed before the first one is written.

    Args: num_checkpoints: number that the run will write at most.
    Returns: a warning if the disk is too small for all checkpoints that exist at the same time, one
        of them half written; otherwise None.
    Raises: UserError if the disk is too small for one more checkpoint.
    """
    free = _free_bytes(directory)
    if free is None:
        return None
    checkpoints = directory / run_paths.CHECKPOINTS_DIR
    for unfinished in list_unfinished(checkpoints):
        free += sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    if free < checkpoint_bytes:
        raise UserError(
            f"run.directory = {directory}: a checkpoint takes {format_bytes(checkpoint_bytes)}, "
            f"but only {format_bytes(free)} are free. Free some space, or use a folder on another "
            "disk."
        )
    num_kept = retention.keep_latest + retention.keep_best
    num_missing = num_kept + 1 - len(run_paths.list_steps(checkpoints))
    num_more = max(1, min(num_missing, num_checkpoints))
    if free < checkpoint_bytes * num_more:
        return (
            f"warning: the disk may become full: {format_bytes(free)} are free in {directory}, and "
            f"the run may need space for {num_more} more checkpoints of "
            f"{format_bytes(checkpoint_bytes)} at the same time"
        )
    return None


def describe_shortage(directory: pathlib.Path, checkpoint_bytes: int) -> str:
    """Formats the missing space after a failed write; empty if there is enough."""
    free = _free_bytes(directory)
    if free is None or free >= checkpoint_bytes:
        return ""
    needed = format_bytes(checkpoint_bytes)
    missing = format_bytes(checkpoint_bytes - free)
    return f" ({needed} needed, {format_bytes(free)} free, {missing} missing)"


def _free_bytes(directory: pathlib.Path) -> int | None:
    """Returns the free bytes of a folder's disk; None if they cannot be read."""
    paths = (directory.absolute(), *directory.absolute().parents)
    existing = next(path for path in paths if path.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None
