"""Counts the results of a long command and estimates the time left."""

import time
from collections.abc import Callable

from jaxsp.core import durations

CACHE_HIT_S = 1.0
"""Results that took less were not compiled, and say nothing about the time of the others."""


class Progress:
    """A count of results, such as `3 of 12, about 2 min left`."""

    def __init__(
        self, total: int, *, is_exact: bool = True, clock: Callable[[], float] = time.monotonic
    ):
        """Starts the first result.

        Args:
            total: number of results.
            is_exact: whether there will be that many; otherwise it is a usual number.
        """
        self.total = total
        self.count = 0
        self._is_exact = is_exact
        self._clock = clock
        self._began = clock()
        self._seconds: list[float] = []

    def advance(self) -> str:
        """Counts a result that has just been made, and returns the words for its line."""
        now = self._clock()
        self.count += 1
        if now - self._began >= CACHE_HIT_S:
            self._seconds.append(now - self._began)
        self._began = now
        total = self.total if self._is_exact else max(self.total, self.count + 1)
        words = f"{self.count} of {total}" if self._is_exact else f"{self.count} of about {total}"
        num_left = total - self.count
        if not num_left or not self._seconds:
            return words
        left_s = num_left * sum(self._seconds) / len(self._seconds)
        return f"{words}, about {durations.describe(round(left_s))} left"
