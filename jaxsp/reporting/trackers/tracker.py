"""Interface of trackers, which show the numbers of a run, and what they need to know of it."""

import abc
import contextlib
import dataclasses
import heapq
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxsp.config.schema import Config
from jaxsp.core import files
from jaxsp.runtime import run_paths

STATE_FILE = "trackers.json"
"""File of a run directory with the ids of the run in its trackers."""

_COMPLETE_KEY = "complete"

DEFAULT_PROJECT = "jaxsp"

Outcome = Literal["finished", "stopped", "failed"]
"""End of a process: all steps are done, it was stopped and can be resumed, or it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Numbers of a training step, or numbers or texts of an evaluation after it."""

    group: str
    """train, eval/NAME, task/NAME/LENGTH, or sample/NAME/NUMBER."""
    step: int
    numbers: dict[str, float]
    """Numbers by name: the group and the field, such as train/loss."""
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Texts of a sample by the name of the field; empty for other points."""

    @property
    def markdown(self) -> str:
        """The texts below each other, each as a block of code."""
        blocks = []
        for name, text in self.texts.items():
            indented = text.replace("\n", "\n    ")
            blocks.append(f"**{name}**\n\n    {indented}\n")
        return "\n".join(blocks)


class Tracker(abc.ABC):
    """A program or service that shows the numbers of a run.

    One thread calls all methods. Any of them may raise any exception, after which `start` is called
    again.
    """

    is_local = False
    """True if the numbers go to a file of this machine, which cannot be out of reach."""

    needs_thread = True
    """True if it may block or fail, so that a thread of its own must send the numbers."""

    def __init__(self, run: "TrackedRun"):
        self._run = run

    @classmethod
    def describe(cls, run: "TrackedRun") -> str:
        """Describes where the numbers are kept or sent, for the banner; empty if that is clear."""
        return ""

    @abc.abstractmethod
    def start(self) -> None:
        """Starts the run in the tracker, or continues it."""

    @abc.abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Records points, whose steps do not decrease."""

    @abc.abstractmethod
    def finish(self, outcome: Outcome) -> None:
        """Completes and closes the record of this process."""

    def has(self, point: Point) -> bool:
        """True if the tracker has the numbers of a point already, from an earlier process."""
        return False

    def sync(self) -> None:  # noqa: B027 - most trackers promise nothing about a power failure
        """Makes the recorded points survive a power failure. Raises: OSError."""

    def abandon(self) -> None:  # noqa: B027 - most trackers leave nothing
        """Ends what would delay the end of the process, after another method did not return.

        Called from another thread.
        """


class TrackedRun:
    """Facts about a run for its trackers, and its ids there."""

    def __init__(self, config: Config, *, from_step: int, is_resume: bool):
        self.directory = run_paths.local_dir(config.run)
        self.config: dict[str, Any] = config.model_dump(mode="json")
        self.project = config.logging.project
        """logging.project; None if the config does not set it."""
        self.name = config.logging.run_name
        """logging.run_name; None if the config does not set it."""
        self.from_step = from_step
        """Last step whose numbers were recorded by an earlier process."""
        self.shutdown_grace = config.run.shutdown_grace
        self._lock = threading.Lock()
        # a run that does not resume from a checkpoint of its own is new
        saved = files.read_json(self.directory / STATE_FILE) if is_resume else None
        self._ids: dict[str, Any] = saved or {}

    @property
    def default_name(self) -> str:
        """Name of the run directory."""
        return self.directory.resolve().name

    def read_id(self, tracker: str) -> Any:
        """Returns the id of the run in a tracker; None for a run that is new there."""
        return self._ids.get(tracker)

    def write_id(self, tracker: str, run_id: Any) -> None:
        """Keeps the id of the run in a tracker for processes that resume it. Raises: OSError."""
        with self._lock:
            self._ids[tracker] = run_id
            files.write_json(self.directory / STATE_FILE, self._ids)

    @property
    def complete(self) -> list[str]:
        """Trackers that have all values of a run that is done."""
        names = self.read_id(_COMPLETE_KEY)
        return names if isinstance(names, list) else []

    def write_complete(self, names: list[str]) -> None:
        """Keeps the names of these trackers. A failure is ignored: they receive values again."""
        if names != self.complete:
            with contextlib.suppress(OSError):
                self.write_id(_COMPLETE_KEY, names)


def make_point(fields: dict[str, Any]) -> Point:
    """Returns the numbers in the fields of a line of metrics.jsonl, eval.jsonl or tasks.jsonl, or
    the texts of a line of samples.jsonl."""
    group = "train"
    if "sample" in fields:
        group = f"sample/{fields['data']}/{fields['sample']}"
        texts = {name: str(fields.get(name)) for name in ("prompt", "answer", "reference")}
        return Point(group=group, step=fields["step"], numbers={}, texts=texts)
    if "task" in fields:
        group = f"task/{fields['task']}/{fields['length']}"
    elif "data" in fields:
        group = f"eval/{fields['data']}"
    numbers = dict(fields)
    for field, value in fields.items():
        if isinstance(value, dict):
            numbers |= {f"{field}/{name}": number for name, number in value.items()}
    return Point(
        group=group,
        step=fields["step"],
        numbers={
            f"{group}/{name}": float(number)
            for name, number in numbers.items()
            if name not in ("step", "length") and isinstance(number, int | float)
        },
    )


def read_points(*paths: pathlib.Path) -> Iterator[Point]:
    """Yields the points of metrics.jsonl, eval.jsonl, tasks.jsonl and samples.jsonl so far, given
    in this order; damaged lines are left out.

    A step comes before its evaluations, and these before the next step, also if lines are added
    meanwhile.
    """
    # in this order: an evaluation is written before the next step
    num_bytes = [path.stat().st_size if path.exists() else 0 for path in paths]
    points = (map(make_point, _read_lines(*file)) for file in zip(paths, num_bytes, strict=True))
    return heapq.merge(*points, key=lambda point: point.step)


def _read_lines(path: pathlib.Path, num_bytes: int) -> Iterator[dict[str, Any]]:
    """Yields the fields of the complete lines in the first bytes of a file."""
    if num_bytes == 0:
        return
    with path.open("rb") as file:
        while file.tell() < num_bytes:
            line = file.readline()
            fields = files.parse_json(line) if line.endswith(b"\n") else None
            if fields is not None and isinstance(fields.get("step"), int):
                yield fields
