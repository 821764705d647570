"""Config of checkpoints: which are kept and which are deleted, and free space for them."""

import contextlib
import pathlib
import shutil
from typing import Annotated

from jaxsp.checkpoint import run_paths
from jaxsp.config.fields import ConfigSection, NonNegativeCount, PositiveCount, with_examples
from jaxsp.core import files
from jaxsp.core.errors import UserError

DELETING_SUFFIX = ".deleting"


class CheckpointConfig(ConfigSection):
    """Checkpoint retention."""

    keep_latest: PositiveCount = 2
    """Number of latest checkpoints to keep. Older ones are deleted when the next one is complete,
    so the disk must hold one more. The run does not start without space for one checkpoint."""
    keep_best: NonNegativeCount = 0
    """Number of checkpoints with the lowest loss on an eval set to keep, in addition to the latest
    ones. If it is not 0, the run evaluates before each checkpoint. A checkpoint that a stop writes
    is evaluated when the run resumes."""
    best_eval: Annotated[str | None, with_examples("held out", min_length=1)] = None
    """Name of the eval set whose loss ranks checkpoints for keep_best and decides early stopping.
    null: the first of data.eval, or held_out. After a change of this field or of that set's
    documents, earlier losses no longer count."""


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
    for path in list_unfinished(directory):
        shutil.rmtree(path, ignore_errors=True)


def delete_superseded(
    directory: pathlib.Path, config: CheckpointConfig, eval_set: dict[str, str] | None
) -> None:
    """Deletes checkpoints that are neither among the latest nor among the best.

    Only checkpoints with a loss on `eval_set` are ranked. Of equal losses, the later is better.
    A numbered folder without a checkpoint's metadata stays. Raises: OSError.
    """
    from jaxsp.checkpoint import reader  # imports jax, which the config is read without

    steps = run_paths.list_steps(directory)
    steps = [step for step in steps if (directory / str(step) / run_paths.META_FILE).is_file()]
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
