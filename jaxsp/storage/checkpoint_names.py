"""Names of checkpoints in object stores, where each session of a run has folders of its own.

`checkpoints/400-3/` is the checkpoint of step 400 that session 3 has written; its local copy is
`checkpoints/400/`. A request of a session that was replaced may arrive late, and cannot be taken
back: it changes nothing in a checkpoint of another session.
"""

import re
from collections.abc import Iterable

from jaxsp.runtime import run_paths

META = f"{run_paths.META}/metadata"
"""File of a checkpoint that is uploaded last: with it, the checkpoint is complete."""

PARTS_DIR = "parts"
"""Folder of a checkpoint in the store with an empty object for each local copy that has shards."""

ALL = f"{run_paths.CHECKPOINTS_DIR}/"
"""Beginning of the names of all checkpoints."""

_PATTERN = re.compile(rf"{ALL}(\d+)-(\d+)/(.+)", re.DOTALL)


def make_prefix(step: int, session: int) -> str:
    """Returns the beginning of the names of a checkpoint's objects."""
    return f"{ALL}{step}-{session}/"


def find_complete(names: Iterable[str]) -> dict[int, str]:
    """Returns the prefix of each complete checkpoint, by step: that of the latest session."""
    sessions: dict[int, int] = {}
    for match in filter(None, map(_PATTERN.fullmatch, names)):
        if match[3] == META:
            step = int(match[1])
            sessions[step] = max(int(match[2]), sessions.get(step, 0))
    return {step: make_prefix(step, session) for step, session in sessions.items()}


def parse(name: str) -> tuple[int, int]:
    """Returns step and session of an object of a checkpoint; (-1, -1) for other objects."""
    match = _PATTERN.fullmatch(name)
    return (-1, -1) if match is None else (int(match[1]), int(match[2]))


def map_to_local(names: Iterable[str]) -> dict[str, str]:
    """Returns the objects that a local copy of a run consists of, by their names there.

    Incomplete checkpoints are left out, as are those that a later session has written again.
    """
    names = list(names)
    complete = find_complete(names)
    local = {}
    for name in names:
        match = _PATTERN.fullmatch(name)
        if match is None:
            if not name.startswith(ALL):
                local[name] = name
        elif name.startswith(complete.get(int(match[1]), ALL + "-")):
            if not match[3].startswith(f"{PARTS_DIR}/"):
                local[f"{ALL}{match[1]}/{match[3]}"] = name
    return local
