"""Downsampling of long runs: mean, minimum and maximum of groups of neighboring lines."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of neighboring lines, one for each point of a chart."""

    starts: np.ndarray
    """Index of the first line of each group."""
    num_lines: int

    @property
    def is_exact(self) -> bool:
        """True if each group has one line."""
        return len(self.starts) == self.num_lines

    @property
    def lines_per_point(self) -> int:
        """Largest number of lines in a group."""
        if not self.num_lines:
            return 0
        return int(np.diff(self.starts, append=self.num_lines).max())

    def take_last(self, column: np.ndarray) -> np.ndarray:
        """Value of the last line of each group."""
        return column[np.append(self.starts[1:], self.num_lines) - 1] if self.num_lines else column

    def reduce(self, column: np.ndarray) -> dict[str, list[Any]] | None:
        """Values of a column; None if it has none.

        Returns: `{"mean": values}` if the groups are exact, otherwise also `min` and `max`, which
            are exact, and means rounded to seven digits. Missing values are left out of groups.
        """
        is_present = np.isfinite(column)
        if not is_present.any():
            return None
        if self.is_exact:
            return {"mean": to_json(column)}
        counts = np.add.reduceat(is_present.astype(float), self.starts)
        sums = np.add.reduceat(np.where(is_present, column, 0.0), self.starts)
        means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        return {
            "mean": [None if value is None else float(f"{value:.7g}") for value in to_json(means)],
            "min": to_json(np.fmin.reduceat(column, self.starts)),
            "max": to_json(np.fmax.reduceat(column, self.starts)),
        }


def group_lines(num_lines: int, *, max_points: int) -> Groups:
    """Divides lines into at most `max_points` groups of nearly equal size."""
    num_groups = min(num_lines, max_points)
    starts = np.arange(num_groups, dtype=np.int64) * num_lines // max(1, num_groups)
    return Groups(starts=starts, num_lines=num_lines)


def to_json(column: np.ndarray) -> list[Any]:
    """Numbers as JSON writes them shortest: null for NaN, and whole numbers without a point."""
    return [_to_json(value) for value in column.tolist()]


def _to_json(value: float) -> float | int | None:
    if value != value:
        return None
    return int(value) if value.is_integer() else value
