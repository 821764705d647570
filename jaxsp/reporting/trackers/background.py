"""Sends a run's numbers to a tracker from a thread, so that no step waits and no error ends it."""

import threading
import time
from collections.abc import Callable, Iterator

from jaxsp.core import redaction
from jaxsp.reporting.trackers.line_reader import LineReader
from jaxsp.reporting.trackers.tracker import Outcome, Point, Tracker
from jaxsp.runtime import distributed

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""Time between two attempts to reach a tracker that fails: doubled after each."""

SEND_INTERVAL_S = 1.0
"""Least time between two sends, so that fast steps share a request."""

MAX_LINES = 40
"""Number of steps per send: MLflow takes at most 1,000 numbers per request."""

MAX_ERROR_LENGTH = 150


class BackgroundTracker:
    """Thread that sends the lines of metrics.jsonl and eval.jsonl to a tracker.

    The files are the queue: lines that the tracker has not received yet, in this process or an
    earlier one, wait there at no cost. When the tracker fails, the thread prints one line and
    tries again, less and less often.
    """

    def __init__(
        self, name: str, tracker: Tracker, make_reader: Callable[[], LineReader], *, from_step: int
    ):
        self.name = name
        self._tracker = tracker
        self._make_reader = make_reader
        self._from_step = from_step
        self._sent: dict[str, int] = {}
        """Last step that the tracker has received, by group."""
        self._failure = ""
        self._has_printed_failure = False
        self._has_printed_recovery = False
        self._retry_s = FIRST_RETRY_S
        self._new_lines = threading.Event()
        self._finish_requested = threading.Event()
        self._outcome: Outcome = "finished"
        self._is_finished = False
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def notify(self) -> None:
        """Makes the thread send new lines; returns immediately."""
        self._new_lines.set()

    def request_finish(self, outcome: Outcome) -> None:
        """Makes the thread send the remaining lines and finish; returns immediately."""
        self._outcome = outcome
        self._finish_requested.set()
        self._new_lines.set()

    @property
    def is_local(self) -> bool:
        """True if the numbers go to a file of this machine."""
        return self._tracker.is_local

    @property
    def is_finished(self) -> bool:
        """True if the tracker has all numbers, and is closed."""
        return self._is_finished

    def wait(self, deadline: float) -> bool:
        """Waits for the thread until a time of time.monotonic(). Returns: whether it has ended."""
        if self._thread.ident:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def join(self, deadline: float) -> None:
        """Waits until the tracker is finished, or until a time of time.monotonic().

        Prints how many numbers it did not receive.
        """
        self.wait(deadline)
        if self._is_finished or not self._thread.ident:
            return
        self._is_abandoned = True
        reason = self._failure or "it does not answer"
        self._tracker.abandon()
        unsent = self._find_unsent()
        if unsent:
            count = sum(len(point.numbers) for point in unsent)
            steps = f"steps {unsent[0].step} to {unsent[-1].step}"
            distributed.log(
                f"{self.name}: {count:,} values of {steps} ARE NOT SENT: {reason}. "
                "metrics.jsonl and eval.jsonl have them"
            )
        else:
            distributed.log(f"{self.name}: has all values, but the run is not closed: {reason}")

    def _run(self) -> None:
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
            self._finish_requested.wait(self._retry_s)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _send_all(self) -> None:
        """Connects to the tracker, and sends all lines until the run ends."""
        self._tracker.start()
        reader = self._make_reader()
        while True:
            self._new_lines.clear()
            is_finishing = self._finish_requested.is_set()
            points = reader.read(MAX_LINES)
            new = [point for point in points if not self._tracker.has(point)]
            if new:
                self._tracker.log(new)
            for point in points:
                self._sent[point.group] = max(point.step, self._sent.get(point.group, -1))
            if points:
                self._record_success()
                continue
            if is_finishing:
                self._tracker.finish(self._outcome)
                self._record_success()
                return
            self._new_lines.wait()
            self._finish_requested.wait(SEND_INTERVAL_S)

    def _find_unsent(self) -> list[Point]:
        """Points of this process that the tracker has not received."""
        reader = self._make_reader()
        unsent: list[Point] = []
        while points := reader.read(1_000):
            unsent += [
                point
                for point in points
                if point.step > self._sent.get(point.group, self._from_step)
            ]
        return unsent

    def _record_failure(self, error: BaseException) -> None:
        self._failure = describe_error(error)
        if not self._has_printed_failure and not self._is_abandoned:
            self._has_printed_failure = True
            distributed.log(
                f"{self.name}: FAILS: {self._failure}. "
                "The run continues, and values wait in metrics.jsonl"
            )

    def _record_success(self) -> None:
        if self._failure and not self._has_printed_recovery:
            self._has_printed_recovery = True
            distributed.log(f"{self.name}: works again, and no value is missing")
        self._failure = ""
        self._retry_s = FIRST_RETRY_S


def describe_error(error: BaseException) -> str:
    """Describes an error in a line without secrets.

    It is the system's reason if there is one, such as a closed port.
    """
    for cause in _causes(error):
        if isinstance(cause, TimeoutError):
            return "it does not answer"
        if isinstance(cause, OSError) and cause.strerror:
            return redaction.redact(cause.strerror)
        if isinstance(cause, ConnectionError) and str(cause):
            return redaction.redact(str(cause))
    text = " ".join(redaction.redact(str(error)).split()).rstrip(".")
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[:MAX_ERROR_LENGTH].rpartition(' ')[0]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and the errors that it was raised from or, in urllib3, that it contains."""
    while error is not None:
        yield error
        contained = (value for value in error.args if isinstance(value, BaseException))
        error = error.__cause__ or error.__context__ or next(contained, None)
