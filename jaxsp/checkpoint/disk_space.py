"""Free disk space, compared with the bytes of a checkpoint before and during a run."""

import pathlib
import shutil
from typing import Any

import jax

from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.runtime import run_paths
from jaxsp.training.memory_fit import format_bytes

MIN_COMPRESSED_FRACTION = 0.8
"""Lower bound of a checkpoint's bytes on disk as a fraction of its bytes in memory.

orbax compresses with zstd, which leaves 0.89 of random float32 weights with AdamW's moments.
"""


def tree_bytes(state: Any) -> int:
    """Bytes of all arrays in a pytree, each counted once however many devices hold a copy."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def check(
    config: Config, *, checkpoint_bytes: int, num_steps: int, leftover_bytes: int = 0
) -> str | None:
    """Compares the free space of run.directory with the space that the run's checkpoints need.

    Args:
        num_steps: number of steps to come.
        leftover_bytes: space that is freed before the first checkpoint is written.
    Returns: a warning if the disk is too small for all checkpoints that will be there at one time,
             one of them half written; None if it is not.
    Raises:  UserError if the disk is too small for one more checkpoint.
    """
    directory = pathlib.Path(config.run.directory)
    free = _free_bytes(directory)
    if free is None:
        return None
    free += leftover_bytes
    if free < MIN_COMPRESSED_FRACTION * checkpoint_bytes:
        raise UserError(
            f"run.directory = {directory}: a checkpoint takes {format_bytes(checkpoint_bytes)}, and only {format_bytes(free)} are free "
            "there. Make room, or name a folder on a disk that has more."
        )
    num_there = len(run_paths.list_steps(directory / run_paths.CHECKPOINTS_DIR))
    num_more = max(1, config.checkpoint.keep_latest + config.checkpoint.keep_best + 1 - num_there)
    if config.run.save_every is None:
        num_more = 1
    elif config.run.save_steps is not None:
        num_more = min(num_more, num_steps // config.run.save_steps + 1)
    if free < MIN_COMPRESSED_FRACTION * checkpoint_bytes * num_more:
        return (
            f"the disk may become full: {format_bytes(free)} are free in {directory}, and up to {num_more} more checkpoints of "
            f"{format_bytes(checkpoint_bytes)} will be there at one time"
        )
    return None


def describe_shortage(directory: pathlib.Path, checkpoint_bytes: int) -> str:
    """Formats what is missing for a checkpoint that could not be written; empty if nothing is."""
    free = _free_bytes(directory)
    if free is None or free >= checkpoint_bytes:
        return ""
    missing = format_bytes(checkpoint_bytes - free)
    return (
        f" ({format_bytes(checkpoint_bytes)} needed, {format_bytes(free)} free, {missing} missing)"
    )


def _free_bytes(directory: pathlib.Path) -> int | None:
    """Free bytes of the disk that a folder is or will be on; None if they cannot be read."""
    parents = directory.absolute().parents
    there = next(path for path in (directory.absolute(), *parents) if path.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None
