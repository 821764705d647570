"""Layout of a run directory: names of its files, and its checkpoints."""

import pathlib
from collections.abc import Sequence

CHECKPOINTS, DAMAGED = "checkpoints", "damaged"
"""The folders of a run's directory that they are in, and that those are moved to which cannot be used."""


CONFIG = "config.yaml"
"""File that marks a run's directory: once it exists, the run has begun."""


MASTER, OPT, META = "master", "opt", "meta"
"""A checkpoint's items; a run without optimizer state (sgd) has no second."""


def steps(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a folder, whole or damaged, the oldest first. One that was not finished has a longer name."""
    names = [path.name for path in folder.glob("*") if path.name.isdecimal() and path.is_dir() and not _is_run(path)]
    return sorted(int(name) for name in names if name == str(int(name)))


def newest(name: str | pathlib.Path, *, without: Sequence[pathlib.Path] = ()) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run's directory, or the checkpoint that is named.

    Args:    without: checkpoints to skip.
    Returns: None if there is none.
    """
    directory = pathlib.Path(name).resolve()
    is_numbered = directory.name.isdecimal() and directory.parent.name == CHECKPOINTS
    has_items = (directory / META).is_dir() and (directory.name.isdecimal() or (directory / MASTER).is_dir())
    if (is_numbered or has_items) and not _is_run(directory):
        return directory if directory.is_dir() and directory not in without else None
    return newest_of_run(directory, without=without) or _newest_in(directory, without)


def newest_of_run(directory: str | pathlib.Path, *, without: Sequence[pathlib.Path] = ()) -> pathlib.Path | None:
    """Finds the latest checkpoint of a run's directory, whatever the directory is called."""
    return _newest_in(pathlib.Path(directory).resolve() / CHECKPOINTS, without)


def _newest_in(folder: pathlib.Path, without: Sequence[pathlib.Path]) -> pathlib.Path | None:
    paths = [folder / str(number) for number in steps(folder)]
    return next((path for path in reversed(paths) if path not in without), None)


def _is_run(directory: pathlib.Path) -> bool:
    """Checks for what a run's directory holds and a checkpoint never does."""
    return (directory / CHECKPOINTS).is_dir() or (directory / CONFIG).is_file()


def before(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint of the same run before this one."""
    if not checkpoint.name.isdecimal():
        return None
    older = [number for number in steps(checkpoint.parent) if number < int(checkpoint.name)]
    return checkpoint.parent / str(older[-1]) if older else None


def run_of(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """The directory of the run that a checkpoint is in; None for one that lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None
