"""Reads the points of metrics.jsonl and eval.jsonl while a run appends to them."""

import json
import pathlib
from typing import Any

from jaxsp.reporting.trackers import tracker
from jaxsp.reporting.trackers.tracker import Point


class _File:
    """Complete lines of a file that may not exist yet."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._offset = 0

    def read(self, max_lines: int | None = None) -> list[dict[str, Any]]:
        """Returns the fields of the next lines; leaves out damaged lines."""
        records: list[dict[str, Any]] = []
        if not self._path.exists():
            return records
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while max_lines is None or len(records) < max_lines:
                line = file.readline()
                if not line.endswith(b"\n"):  # the end, or a line that is being written
                    break
                self._offset += len(line)
                try:
                    fields = json.loads(line)
                    if isinstance(fields["step"], int):
                        records.append(fields)
                except (ValueError, TypeError, KeyError):  # a damaged disk can leave anything
                    continue
        return records


class LineReader:
    """Points of a run, in the order of their steps."""

    def __init__(self, metrics: pathlib.Path, evals: pathlib.Path):
        self._metrics = _File(metrics)
        self._evals = _File(evals)
        self._waiting: list[Point] = []

    def read(self, max_lines: int) -> list[Point]:
        """Returns the next points, those of at most `max_lines` steps; empty at the end.

        A step comes before its evaluations, and these before the next step. metrics.jsonl is read
        first: at that time, eval.jsonl has all evaluations before the last step that was read.
        """
        steps = [tracker.make_point(line, group="train") for line in self._metrics.read(max_lines)]
        self._waiting += [
            tracker.make_point(line, group=f"eval/{line.get('data')}")
            for line in self._evals.read()
        ]
        due = self._waiting
        self._waiting = []
        if len(steps) == max_lines:
            last_step = steps[-1].step
            self._waiting = [point for point in due if point.step > last_step]
            due = [point for point in due if point.step <= last_step]
        return sorted([*steps, *due], key=lambda point: point.step)
