"""Folders and files of checkpoints: creating, recording, deleting, and setting them aside."""

import contextlib
import itertools
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import jax

from jaxsp.checkpoint import reader
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.runtime import run_dir, run_paths

DELETING_SUFFIX = ".deleting"


def is_unfinished(path: pathlib.Path) -> bool:
    """True for a folder of a run that was killed while it wrote or deleted a checkpoint."""
    step, _, suffix = path.name.partition(".")
    items = {run_paths.MASTER, run_paths.OPT, run_paths.META}
    return (
        step.isdecimal()
        and f".{suffix}" in (files.PARTIAL_SUFFIX, DELETING_SUFFIX)
        and {child.name for child in path.iterdir()} <= items
    )


def leftover_bytes(directory: pathlib.Path) -> int:
    """Returns the size of unfinished checkpoints, which `remove_leftovers` frees."""
    leftovers = filter(is_unfinished, directory.glob("*"))
    contents = itertools.chain.from_iterable(path.rglob("*") for path in leftovers)
    return sum(path.stat().st_size for path in contents if path.is_file())


def remove_leftovers(directory: pathlib.Path) -> None:
    """Removes unfinished checkpoints."""
    for path in filter(is_unfinished, directory.glob("*")):
        shutil.rmtree(path, ignore_errors=True)


def make_dirs(partial: pathlib.Path, items: Iterable[str]) -> None:
    """Makes the folders of a checkpoint's items, after removing those of a failed write."""
    if partial.exists():
        shutil.rmtree(partial)
    for name in (*items, run_paths.META):
        (partial / name).mkdir(parents=True)


def write_meta(checkpoint: pathlib.Path, meta: CheckpointMeta) -> None:
    """Writes a checkpoint's metadata atomically: a crash leaves either the old or the new file."""
    files.write_atomic(checkpoint / run_paths.META / "metadata", reader.to_json(meta))


def record_complete(directory: pathlib.Path, step: int) -> None:
    """Makes the name of a complete checkpoint survive a power failure, and records its step."""
    files.sync_dir(directory)
    files.write_json(directory.parent / run_paths.LAST_CHECKPOINT_FILE, {"step": step})


def delete_superseded(
    directory: pathlib.Path, retention: CheckpointConfig, eval_set: dict[str, str] | None
) -> None:
    """Deletes the checkpoints that `find_superseded` finds. Raises: OSError."""
    steps = run_paths.list_steps(directory)
    for step in find_superseded(directory, steps, retention, eval_set):
        delete(directory / str(step))


def delete(checkpoint: pathlib.Path) -> None:
    """Deletes a checkpoint. It is renamed first: a folder named only by its step is complete."""
    renamed = checkpoint.with_name(f"{checkpoint.name}{DELETING_SUFFIX}")
    checkpoint.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)  # the next start removes the rest


def find_superseded(
    directory: pathlib.Path,
    steps: Sequence[int],
    retention: CheckpointConfig,
    eval_set: dict[str, str] | None,
) -> list[int]:
    """Returns the steps of checkpoints to delete: neither among the latest nor among the best.

    Only checkpoints with a loss on `eval_set` are ranked. Of equal losses, the later is better.
    A numbered folder without a checkpoint's metadata is never deleted.
    """
    steps = [
        step for step in steps if (directory / str(step) / run_paths.META / "metadata").is_file()
    ]
    kept = set(steps[-retention.keep_latest :])
    losses = {step: _read_loss(directory / str(step), eval_set) for step in steps}
    ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
    kept |= {-negative_step for _, negative_step in ranked[: retention.keep_best]}
    return [step for step in steps if step not in kept]


def _read_loss(checkpoint: pathlib.Path, eval_set: dict[str, str] | None) -> float | None:
    """Returns a checkpoint's loss on an eval set; None if it has none or is damaged."""
    with contextlib.suppress(UserError):
        meta = reader.read_meta(checkpoint)
        if eval_set and meta.eval_set and meta.eval_set["digest"] == eval_set["digest"]:
            return meta.eval_loss
    return None


def set_aside(checkpoint: pathlib.Path) -> pathlib.Path:
    """Moves a damaged checkpoint to the run's damaged/ folder, and returns its new path.

    Process 0 moves it; all processes must call this together.
    """
    folder = checkpoint.parent.parent / run_paths.DAMAGED_DIR
    numbered = (folder / f"{checkpoint.name}-{number}" for number in itertools.count(2))
    paths = itertools.chain([folder / checkpoint.name], numbered)
    target = next(path for path in paths if not path.exists())
    # all processes have stopped reading it, and have chosen the same target
    reader.raise_on_all_processes(checkpoint, lambda: None)
    if jax.process_index() == 0:
        folder.mkdir(exist_ok=True)
        checkpoint.rename(target)
    reader.raise_on_all_processes(checkpoint, lambda: None)
    if jax.process_index() > 0 and run_dir.is_writer(checkpoint):
        folder.mkdir(exist_ok=True)
        checkpoint.rename(target)
    return target
