"""Sends a run's numbers to a tracker from a thread, so that no step waits and no error ends it."""

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from jaxsp.core import redaction
from jaxsp.processes import distributed
from jaxsp.reporting.trackers.tracker import Outcome, Point, Tracker

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""Time between two attempts to reach a tracker that fails: doubled after each."""

SEND_INTERVAL_S = 1.0
"""Time between two sends, so that fast steps share a request."""

MAX_POINTS = 40
"""Number of points per send."""

MAX_ERROR_LENGTH = 150


class BackgroundTracker:
    """Thread that sends points to a tracker.

    When it begins, and again after the tracker has failed, it sends all points of metrics.jsonl and
    eval.jsonl that the tracker does not have, then those that the run logs.
    """

    def __init__(
        self, name: str, tracker: Tracker, read_points: Callable[[], Iterator[Point]]
    ) -> None:
        """Starts the thread. Args: read_points: returns the points in the files so far."""
        self.name = name
        self._tracker = tracker
        self._read_points = read_points
        self._queue: collections.deque[Point] = collections.deque()
        self._logged: dict[str, int] = {}
        """Step of the last point that the run has logged, by group."""
        self._sent: dict[str, int] = {}
        """Step of the last point that the tracker has, by group."""
        self._failure = ""
        self._finish_requested = threading.Event()
        self._outcome: Outcome = "finished"
        self._is_finished = False
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, point: Point) -> None:
        """Lets the thread send a point whose line has been written; returns immediately."""
        self._logged[point.group] = point.step
        self._queue.append(point)

    def request_finish(self, outcome: Outcome) -> None:
        """Makes the thread send the remaining points and finish; returns immediately."""
        self._outcome = outcome
        self._finish_requested.set()

    def join(self, deadline: float) -> bool:
        """Waits until the tracker is finished, or until a time of time.monotonic().

        Prints which values it did not receive. Returns: whether it is finished.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._is_finished:
            return True
        self._is_abandoned = True
        reason = self._failure or "it does not answer"
        self._tracker.abandon()
        unsent = [step for group, step in self._logged.items() if self._sent.get(group, -1) < step]
        if unsent:
            last = self._sent.get("train", 0)
            distributed.log(
                f"{self.name}: values of steps {last + 1:,} to {max(unsent):,} ARE NOT SENT: "
                f"{reason}. metrics.jsonl and eval.jsonl have them"
            )
        else:
            distributed.log(f"{self.name}: has all values, but the run is not closed: {reason}")
        return False

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._is_abandoned:
            is_last_attempt = self._finish_requested.is_set()
            try:
                self._send_all()
                self._is_finished = True
                return
            # whatever a tracker raises, also SystemExit, must not end this thread
            except BaseException as error:
                self._record_failure(error)
            if is_last_attempt:
                return
            self._finish_requested.wait(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _send_all(self) -> None:
        """Connects to the tracker, and sends all points until the run ends."""
        self._queue.clear()  # the files have these points
        self._tracker.start()
        sent: dict[str, int] = {}
        points: Iterable[Point] = self._read_points()
        while True:
            is_finishing = self._finish_requested.is_set()
            while part := list(itertools.islice(points, MAX_POINTS)):
                new = [
                    point
                    for point in part
                    # points that were logged meanwhile are in the files and in the queue
                    if point.step > sent.get(point.group, -1) and not self._tracker.has(point)
                ]
                if new:
                    self._tracker.log(new)
                sent |= {point.group: point.step for point in part}
                self._sent = sent
                self._record_success()
            if is_finishing:
                self._tracker.finish(self._outcome)
                return
            self._finish_requested.wait(SEND_INTERVAL_S)
            points = self._take_logged()

    def _take_logged(self) -> Iterator[Point]:
        while self._queue:
            yield self._queue.popleft()

    def _record_failure(self, error: BaseException) -> None:
        if not self._failure and not self._is_abandoned:
            distributed.log(
                f"{self.name}: FAILS: {describe_error(error)}. "
                "The run continues, and values wait in metrics.jsonl"
            )
        self._failure = describe_error(error)

    def _record_success(self) -> None:
        if self._failure:
            distributed.log(f"{self.name}: works again, and no value is missing")
        self._failure = ""


def describe_error(error: BaseException) -> str:
    """Describes an error in a line without secrets.

    It is the system's reason if there is one, such as a closed port.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return "it does not answer"
        if isinstance(cause, OSError) and cause.strerror:
            return redaction.redact(cause.strerror)
        if isinstance(cause, ConnectionError) and str(cause):
            return redaction.redact(str(cause))
        # urllib3's errors contain their cause
        contained = (value for value in cause.args if isinstance(value, BaseException))
        cause = cause.__cause__ or cause.__context__ or next(contained, None)
    text = " ".join(redaction.redact(str(error)).split()).rstrip(".")
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[:MAX_ERROR_LENGTH].rpartition(' ')[0]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
