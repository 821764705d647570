"""Graceful shutdown on a signal or after run.stop_after.

All processes stop after the same step and write a checkpoint.
`jax.experimental.multihost_utils.reached_preemption_sync_point` is not used. With JAX's service,
SIGTERM does not end a process that has not started training (test_distributed.py fails), nor does a
second one (test_preemption.py); SIGINT, SIGHUP and run.stop_after are unknown to it.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import jax

from jaxsp.core import units
from jaxsp.system import distributed
from jaxsp.system.watchdog import RunStatus

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that request a stop. A process gets SIGHUP when its terminal or ssh session closes."""

SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: a terminal sends one to mpirun or torchrun and to their
processes, and they forward it."""

_STOP_AFTER = "run.stop_after"


class ProcessProgress(NamedTuple):
    """Progress of a process at the time of a stop request, with expected seconds.
    It dispatches no further step until all processes have published theirs."""

    num_dispatched: int  # since step 0; 0 before the first step of this run
    remaining_s: float  # until the dispatched steps are finished and a checkpoint is written
    step_s: float  # for steps that only other processes have dispatched
    is_kill_expected: bool
    """False for run.stop_after, and for SIGHUP: a terminal that closes sends no SIGKILL. A
    scheduler sends one a while after SIGTERM or SIGINT."""


@dataclasses.dataclass(eq=False)
class Preemption:
    """Handles stop requests in the context of `listen`.

    They come from a signal, run.stop_after or another process. Before the first step is dispatched,
    a stop request ends the process immediately.

    Python runs signal handlers in the main thread only, between two bytecodes, and that thread may
    block for minutes until a step is finished. So another thread reads the signals from a pipe.
    """

    status: RunStatus
    _: dataclasses.KW_ONLY
    shutdown_grace: timedelta = timedelta.max
    stop_after: timedelta | None = None
    describe_loss: Callable[[int], str] = lambda last_step: ""
    """Describes what is lost if a run ends after this step without a checkpoint."""
    reason: str | None = None
    """Reason for the stop; None before a request."""
    is_done: bool = False
    """True if the run is finished: signals are ignored from now on."""
    _start_time: float = dataclasses.field(default_factory=time.monotonic)
    _signal_time: float | None = None
    _condition: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    _num_allowed: int = 0
    _progress: ProcessProgress | None = None
    _stop_step: int | None = None
    """Step after which all processes stop; None until they have decided."""
    _closed: threading.Event = dataclasses.field(default_factory=threading.Event)

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Context in which signals are handled, and requests of other processes.

        Ignored signals stay ignored: shells start background jobs with SIGINT ignored, and nohup
        starts commands with SIGHUP ignored.
        """
        pipe = os.pipe()
        os.set_blocking(pipe[1], False)
        old_fd = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        thread = threading.Thread(target=self._run, args=(pipe[0],), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            self._closed.set()
            os.write(pipe[1], b"\0")
            thread.join()
            for end in pipe:
                os.close(end)

    def should_dispatch(self, step: int) -> bool:
        """Decides whether to dispatch a step; must be called before each step, in order."""
        with self._condition:
            # Once its progress is published, this process waits for the decision
            self._condition.wait_for(lambda: self._progress is None or self._stop_step is not None)
            if self._stop_step is not None and step > self._stop_step:
                return False
            self._num_allowed = step
            return True

    def _run(self, signal_fd: int) -> None:
        """Thread: reads signals, run.stop_after and requests of other processes, and decides the
        stop step; also after process 0 did not answer."""
        while not self._closed.is_set():
            # A decision asks process 0, which answers a limited number of reads
            is_deciding = self.reason is not None
            interval_s = distributed.poll_interval_s() if is_deciding else distributed.POLL_S
            ready, _, _ = select.select([signal_fd], [], [], interval_s)
            numbers = os.read(signal_fd, 64) if ready else b""
            try:
                for number in numbers:
                    if number in SIGNALS and not self.is_done:
                        self._handle_signal(signal.Signals(number))
                if self.reason is None and self.stop_after is not None:
                    if time.monotonic() - self._start_time >= self.stop_after.total_seconds():
                        text = f"{_STOP_AFTER} = {units.format_duration(self.stop_after)}"
                        self._hold_dispatch(text, is_own=True)
                requests = distributed.last_read(distributed.STOP_KEY)
                if self.reason is None and requests:
                    index, reason = min(requests.items())
                    is_signal = not reason.startswith(_STOP_AFTER)
                    self._hold_dispatch(f"{reason} to process {index}" if is_signal else reason)
                if self.reason is not None and self._stop_step is None:
                    if not self._closed.is_set():
                        self._decide_stop_step(self.reason)
            except jax.errors.JaxRuntimeError:
                # Process 0 does not answer; if it is gone, JAX ends this process
                time.sleep(distributed.poll_interval_s())

    def _handle_signal(self, number: signal.Signals) -> None:
        """Requests a stop; ends all processes immediately if it is a second signal.
        SIGHUP is none: a terminal that closes may send several."""
        now = time.monotonic()
        if self._signal_time is None:
            self._signal_time = now
        elif number != signal.SIGHUP and now - self._signal_time > SAME_SIGNAL_S:
            distributed.log(f"ended by a second {number.name}")
            distributed.abort_job(128 + number)
        if self.reason is None:
            self._hold_dispatch(number.name, is_own=True)

    def _hold_dispatch(self, reason: str, *, is_own: bool = False) -> None:
        """Prevents the next dispatch; publishes this process's progress, and a request that is its
        own."""
        if is_own:
            distributed.publish(distributed.STOP_KEY, reason)
        with self._condition:
            self.reason = reason
            # Allowed steps count as dispatched: the loop dispatches them without asking again
            num_undispatched = max(0, self._num_allowed - self.status.num_dispatched)
            step_s = self.status.step_s
            remaining_s = self.status.remaining_s() + num_undispatched * step_s
            self._progress = ProcessProgress(
                num_dispatched=self._num_allowed,
                remaining_s=remaining_s + (self.status.checkpoint_s or 0.0),
                step_s=step_s,
                is_kill_expected=not reason.startswith((_STOP_AFTER, signal.SIGHUP.name)),
            )
        distributed.publish("progress", json.dumps(self._progress))

    def _decide_stop_step(self, reason: str) -> None:
        """Chooses the step to stop after, or exits, once the progress of all processes is known.

        All processes compute it from the same published progress, so they reach the same decision.
        """
        assert self._progress is not None, "set by _hold_dispatch"
        all_progress = [self._progress]
        process = distributed.this_process
        if distributed.is_connected():
            published = distributed.read_folder("progress").get("progress", {})
            if process.index not in published:
                # The stop request came before the processes were connected
                distributed.publish("progress", json.dumps(self._progress))
                return
            if len(published) < process.num_processes:
                return
            all_progress = [ProcessProgress(*json.loads(text)) for text in published.values()]
        last = max(each.num_dispatched for each in all_progress)
        remaining_s = max(
            each.remaining_s + (last - each.num_dispatched) * each.step_s
            for each in all_progress
            if each.num_dispatched or not last
        )
        is_kill_expected = any(each.is_kill_expected for each in all_progress)
        is_too_late = is_kill_expected and remaining_s > self.shutdown_grace.total_seconds()
        if not last:
            message = "ended before the first step: nothing is lost"
        elif is_too_late:
            message = (
                "ended immediately: the dispatched steps and a checkpoint would take about "
                f"{remaining_s:.0f} s, and run.shutdown_grace is "
                f"{units.format_duration(self.shutdown_grace)}. {self.describe_loss(last)}"
            )
        else:
            message = (
                f"stopping after step {last}, then writing a checkpoint (about "
                f"{units.format_seconds(round(remaining_s))}); a second signal, such as Ctrl-C, "
                "ends the run immediately without one"
            )
        if process.index == 0:
            distributed.log(f"{reason}: {message}")
        if not last or is_too_late:
            distributed.exit_now(0)
        with self._condition:
            self._stop_step = last
            self._condition.notify_all()
