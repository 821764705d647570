"""Layout of a run directory: names of its files, and its checkpoints."""

import pathlib
from collections.abc import Sequence

CHECKPOINTS_DIR, DAMAGED_DIR = "checkpoints", "damaged"
"""The folders of a run's directory that they are in, and that those are moved to which cannot be used."""


CONFIG_FILE = "config.yaml"
"""File that marks a run's directory: once it exists, the run has begun."""


MASTER, OPT, META = "master", "opt", "meta"
"""A checkpoint's items; a run without optimizer state (sgd) has no second."""


def list_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a folder, whole or damaged, the oldest first. One that was not finished has a longer name."""
    names = [
        path.name
        for path in folder.glob("*")
        if path.name.isdecimal() and path.is_dir() and not _is_run_dir(path)
    ]
    return sorted(int(name) for name in names if name == str(int(name)))


def find_latest(
    path: str | pathlib.Path, *, exclude: Sequence[pathlib.Path] = ()
) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run's directory, or the checkpoint that is named.

    Args:    without: checkpoints to skip.
    Returns: None if there is none.
    """
    directory = pathlib.Path(path).resolve()
    is_numbered = directory.name.isdecimal() and directory.parent.name == CHECKPOINTS_DIR
    has_items = (directory / META).is_dir() and (
        directory.name.isdecimal() or (directory / MASTER).is_dir()
    )
    if (is_numbered or has_items) and not _is_run_dir(directory):
        return directory if directory.is_dir() and directory not in exclude else None
    return find_latest_in_run(directory, exclude=exclude) or _latest_in(directory, exclude)


def find_latest_in_run(
    directory: str | pathlib.Path, *, exclude: Sequence[pathlib.Path] = ()
) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run's directory, whatever the directory is called."""
    return _latest_in(pathlib.Path(directory).resolve() / CHECKPOINTS_DIR, exclude)


def _latest_in(folder: pathlib.Path, exclude: Sequence[pathlib.Path]) -> pathlib.Path | None:
    paths = [folder / str(number) for number in list_steps(folder)]
    return next((path for path in reversed(paths) if path not in exclude), None)


def _is_run_dir(directory: pathlib.Path) -> bool:
    """Checks for what a run's directory holds and a checkpoint never does."""
    return (directory / CHECKPOINTS_DIR).is_dir() or (directory / CONFIG_FILE).is_file()


def find_previous(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint of the same run before this one."""
    if not checkpoint.name.isdecimal():
        return None
    older = [number for number in list_steps(checkpoint.parent) if number < int(checkpoint.name)]
    return checkpoint.parent / str(older[-1]) if older else None


def find_run_dir(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """The directory of the run that a checkpoint is in; None for one that lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS_DIR else None
