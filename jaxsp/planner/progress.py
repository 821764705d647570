"""Counts the results of a long command and estimates the time left."""

import statistics
import time
from collections.abc import Callable

from jaxsp.core import durations

CACHE_HIT_S = 1.0
"""Results that took less were not compiled, and say nothing about the time of the others."""


class Progress:
    """A count of results, such as `3 of 12, about 2 min left`."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic):
        """Starts the first of `total` results."""
        self._total = total
        self._count = 0
        self._clock = clock
        self._began = clock()
        self._seconds: list[float] = []

    def advance(self) -> str:
        """Counts a result that has just been made, and describes the progress for its line."""
        now = self._clock()
        self._count += 1
        if now - self._began >= CACHE_HIT_S:
            self._seconds.append(now - self._began)
        self._began = now
        text = f"{self._count} of {self._total}"
        num_left = self._total - self._count
        if num_left and self._seconds:
            left_s = num_left * statistics.mean(self._seconds)
            text += f", about {durations.describe(round(left_s))} left"
        return text
