"""Reads the points of metrics.jsonl and eval.jsonl while a run appends to them."""

import pathlib
from typing import Any

from jaxsp.core import files
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
                fields = files.parse_json(line)
                if fields is not None and isinstance(fields.get("step"), int):
                    records.append(fields)
        return records


class LineReader:
    """Points of a run, in the order of their steps."""

    def __init__(self, metrics: pathlib.Path, evals: pathlib.Path):
        self._metrics = _File(metrics)
        self._evals = _File(evals)
        self._waiting: list[Point] = []
        """Evaluations after a step that may not have been read yet."""
        self._last_step = -1

    def read(self, max_lines: int) -> list[Point]:
        """Returns the next points, those of at most `max_lines` steps; empty at the end.

        A step comes before its evaluations, and these before the next step.
        """
        while True:
            points = self._read_due(max_lines)
            if points or not self._waiting:
                return points

    def _read_due(self, max_lines: int) -> list[Point]:
        """Returns the next points, but keeps evaluations after a step that it has not read.

        The run writes a step, its evaluations, and then the next step. metrics.jsonl is read first,
        so each step is returned with all evaluations before it. Meanwhile the run may write more
        steps and an evaluation after them, which waits until metrics.jsonl has been read again.
        """
        known = self._waiting
        lines = self._metrics.read(max_lines)
        steps = [tracker.make_point(line, group="train") for line in lines]
        if steps:
            self._last_step = steps[-1].step
        max_step = self._last_step
        if len(steps) < max_lines and known:
            # metrics.jsonl was read up to its end after they had been written
            max_step = max(max_step, *(point.step for point in known))
        new = [
            tracker.make_point(line, group=f"eval/{line.get('data')}")
            for line in self._evals.read()
        ]
        evals = [*known, *new]
        self._waiting = [point for point in evals if point.step > max_step]
        due = [point for point in evals if point.step <= max_step]
        return sorted([*steps, *due], key=lambda point: point.step)
