"""Free disk space, compared with the size of checkpoints before and during a run."""

import pathlib
import shutil
from typing import Any

import jax

from jaxsp.core.errors import UserError
from jaxsp.core.units import format_bytes
from jaxsp.run.config_file import Config
from jaxsp.runtime import run_paths


def tree_bytes(state: Any) -> int:
    """Returns the bytes of all arrays in a pytree; copies on several devices count once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def check(
    config: Config, *, checkpoint_bytes: int, num_steps: int, leftover_bytes: int = 0
) -> str | None:
    """Compares the free space in run.directory with the space that the run's checkpoints need.

    Their bytes count uncompressed, because it is unknown how much zstd leaves.

    Args:
        num_steps: number of remaining steps.
        leftover_bytes: space that is freed before the first checkpoint is written.
    Returns: a warning if the disk is too small for all checkpoints that exist at the same time, one
        of them half written; otherwise None.
    Raises: UserError if the disk is too small for one more checkpoint.
    """
    directory = run_paths.local_dir(config.run)
    free = _free_bytes(directory)
    if free is None:
        return None
    free += leftover_bytes
    if free < checkpoint_bytes:
        raise UserError(
            f"run.directory = {directory}: a checkpoint takes {format_bytes(checkpoint_bytes)}, "
            f"but only {format_bytes(free)} are free. Free some space, or use a folder on another "
            "disk."
        )
    num_existing = len(run_paths.list_steps(directory / run_paths.CHECKPOINTS_DIR))
    num_kept = config.checkpoint.keep_latest + config.checkpoint.keep_best
    num_writes = num_steps // (config.run.save_steps or 1) + 1 if config.run.save_every else 1
    num_more = max(1, min(num_kept + 1 - num_existing, num_writes))
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
