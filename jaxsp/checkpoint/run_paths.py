"""Layout of a run directory: names of its files, and paths of its checkpoints."""

import hashlib
import pathlib
from collections.abc import Sequence

from jaxsp.system import run_lock

CHECKPOINTS_DIR = "checkpoints"
DAMAGED_DIR = "damaged"
CONFIG_FILE = run_lock.CONFIG_FILE

LAST_CHECKPOINT_FILE = "last_checkpoint.json"
"""File with the step of the latest complete checkpoint: without it, a run whose checkpoints have
vanished would look like one that has not written any yet."""

MASTER = "master"
OPT = "opt"  # item of a checkpoint with the optimizer state; absent without state (sgd)
META = "meta"
META_FILE = f"{META}/metadata"


def name_local(url: str) -> str:
    """Returns a name for the local copy of a URL, readable and unique: `first-1f0c83a2`."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    return f"{url.rpartition('/')[2][:100]}-{digest}"


def list_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a folder, complete or damaged, oldest first.
    Unfinished checkpoints are left out; they have longer names."""
    names = [path.name for path in folder.glob("*") if path.is_dir() and not _is_run_dir(path)]
    # Excludes 007, which the checkpoint of step 7 is never called
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def find_latest(
    path: str | pathlib.Path, *, exclude: Sequence[pathlib.Path] = ()
) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run or a folder; returns the path if it is a checkpoint."""
    directory = pathlib.Path(path).resolve()
    is_numbered = directory.name.isdecimal() and directory.parent.name == CHECKPOINTS_DIR
    has_items = (directory / META).is_dir() and (
        directory.name.isdecimal() or (directory / MASTER).is_dir()
    )
    if (is_numbered or has_items) and not _is_run_dir(directory):
        return directory if directory.is_dir() and directory not in exclude else None
    return find_latest_in_run(directory, exclude=exclude) or find_latest_in_run(
        directory, exclude=exclude, checkpoints=""
    )


def find_latest_in_run(
    directory: str | pathlib.Path,
    *,
    exclude: Sequence[pathlib.Path] = (),
    checkpoints: str = CHECKPOINTS_DIR,
) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run directory, which may have any name."""
    folder = pathlib.Path(directory).resolve() / checkpoints
    steps = reversed(list_steps(folder))
    return next((path for step in steps if (path := folder / str(step)) not in exclude), None)


def describe_lost_steps(directory: pathlib.Path, last: int) -> str:
    """Describes the steps that are lost if a run ends after step `last` without a checkpoint."""
    checkpoint = find_latest_in_run(directory)
    num_lost = last - (0 if checkpoint is None else int(checkpoint.name))
    lost = "1 step" if num_lost == 1 else f"{num_lost} steps"
    verb = "is" if num_lost == 1 else "are"
    if checkpoint is None:
        return f"No checkpoint has been written yet: {lost} since the start {verb} lost."
    lost = f"{lost} since the checkpoint of step {checkpoint.name} {verb}"
    return f"{lost if num_lost else 'Nothing is'} lost; the same command resumes from there."


def _is_run_dir(directory: pathlib.Path) -> bool:
    """True if a folder holds files that a run directory has, and a checkpoint never does."""
    return (directory / CHECKPOINTS_DIR).is_dir() or (directory / CONFIG_FILE).is_file()


def find_run_dir(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """Finds the run directory of a checkpoint; None if the checkpoint is not in one."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS_DIR else None
