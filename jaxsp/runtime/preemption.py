"""Stopping a run on a signal: after the same step in all processes, with a checkpoint, where there is time for one."""

import dataclasses
import json
import os
import select
import signal
import threading
import time

import jax

from jaxsp.config.schema import RunConfig
from jaxsp.core import durations
from jaxsp.runtime import distributed, run_paths
from jaxsp.runtime.run_status import RunStatus

SIGNALS = (signal.SIGTERM, signal.SIGINT)

SAME_SIGNAL_S = 1.0
"""Signals so close together are one: a terminal or srun sends it to a launcher and to its processes, and the launcher passes it
on."""

_STOP_AFTER = "run.stop_after"

_STOP_KEY, _PROGRESS_KEY = "stop", "place"
"""What processes tell each other: that they were asked to stop, then how far they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessProgress:
    """How far a process is when it has heard that the run is to stop. It sends no step before all are heard."""

    num_dispatched: int | None
    """Steps sent to the devices since step 0; None before the first of this run."""
    remaining_s: float
    """Until they have ended."""
    step_s: float
    """For each more that another process has sent."""
    checkpoint_s: float
    """For a checkpoint; 0 where none was written yet."""
    is_signal: bool
    """Whether it was a signal, so that whoever sent it will not wait for long."""


class Preemption:
    """What ends a run early, from when it is entered until it is left: SIGTERM, SIGINT, run.stop_after, and other processes.

    Before the first step is sent, a signal ends the process at once. Python runs signal handlers between two bytecodes of
    the main thread, which waits for a step for minutes; so a thread reads the signals from a pipe. A process tells the
    others through the store that JAX keeps for them, and no step pays for it.
    """

    def __init__(self, config: RunConfig, status: RunStatus):
        self._config, self.status = config, status
        self.reason: str | None = None
        """What asked for a stop; None as long as nothing did."""
        self._start_time = time.monotonic()
        self._signal_time: float | None = None
        self._condition = threading.Condition()
        self._num_allowed: int | None = None
        self._progress: ProcessProgress | None = None
        self._stop_step: int | None = None
        """The step after which all processes stop; None as long as that is not known."""
        self._is_done = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def __enter__(self) -> "Preemption":
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._fd_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # deaf to one, as nohup's commands and those in the background of a shell are to Ctrl-C: it stays so
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda *_: None) for number in heard}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._closed.set()
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def should_dispatch(self, step: int) -> bool:
        """Whether a step is to be sent to the devices; called before each, in order."""
        with self._condition:
            # told where it is, this process stays there until it knows where the others are
            self._condition.wait_for(lambda: self._progress is None or self._stop_step is not None)
            if self._stop_step is not None and step > self._stop_step:
                return False
            self._num_allowed = step
            return True

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._poll_events()
            except (
                jax.errors.JaxRuntimeError
            ):  # process 0 does not answer; where it is gone, JAX ends this one
                time.sleep(distributed.POLL_INTERVAL_S)

    def _poll_events(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._pipe[0]], [], [], distributed.POLL_INTERVAL_S)
            for number in os.read(self._pipe[0], 64) if ready else b"":
                if number in SIGNALS:
                    self._handle_signal(signal.Signals(number))
            stop_after = self._config.stop_after
            if self.reason is None and stop_after is not None:
                elapsed_s = time.monotonic() - self._start_time
                if elapsed_s >= stop_after.total_seconds():
                    self._request_stop(f"{_STOP_AFTER} = {durations.to_text(stop_after)}")
            if self.reason is None and (asked := distributed.read_published(_STOP_KEY)):
                index, reason = min(asked.items())
                self._hold_dispatch(
                    reason if reason.startswith(_STOP_AFTER) else f"{reason} to process {index}"
                )
            if self.reason is not None and self._stop_step is None and not self._closed.is_set():
                self._decide_stop_step()

    def mark_done(self) -> None:
        """Notes that all is done: from now on there is nothing to stop."""
        self._is_done = True

    def _handle_signal(self, number: signal.Signals) -> None:
        if self._is_done:
            return
        if self._signal_time is None:
            self._signal_time = time.monotonic()
        elif time.monotonic() - self._signal_time > SAME_SIGNAL_S:
            distributed.log(f"left by a second {number.name}")
            code = 128 + number
            if distributed.this_process().index == 0:
                os._exit(code)  # JAX ends the others when process 0 is gone
            distributed.abort_job(code)
        if self.reason is None:
            self._request_stop(number.name)

    def _request_stop(self, reason: str) -> None:
        """Begins a stop, in all processes."""
        distributed.publish(_STOP_KEY, reason)
        self._hold_dispatch(reason)

    def _hold_dispatch(self, reason: str) -> None:
        """Holds back the next step, and tells where this process is."""
        with self._condition:
            self.reason = reason
            # let go, and not sent yet
            more = (
                max(0, self._num_allowed - self.status.num_dispatched)
                if self._num_allowed is not None
                else 0
            )
            self._progress = ProcessProgress(
                num_dispatched=self._num_allowed,
                remaining_s=self.status.remaining_s() + more * self.status.step_s,
                step_s=self.status.step_s,
                checkpoint_s=self.status.checkpoint_s or 0.0,
                is_signal=not reason.startswith(_STOP_AFTER),
            )
        distributed.publish(_PROGRESS_KEY, json.dumps(dataclasses.asdict(self._progress)))

    def _decide_stop_step(self) -> None:
        """When all have told where they are: where to stop, or to leave at once. All see the same, and decide alike."""
        assert self._progress is not None, "it was told"
        told = {
            index: ProcessProgress(**json.loads(place))
            for index, place in distributed.read_published(_PROGRESS_KEY).items()
        }
        if (
            distributed.is_connected() and distributed.this_process().index not in told
        ):  # there was nobody to tell yet
            distributed.publish(_PROGRESS_KEY, json.dumps(dataclasses.asdict(self._progress)))
            return
        places = told if distributed.is_connected() else {0: self._progress}
        if distributed.is_connected() and len(places) < distributed.this_process().num_processes:
            return
        sent = [
            place.num_dispatched for place in places.values() if place.num_dispatched is not None
        ]
        if not sent:
            self._exit("before the first step: nothing is lost")
        last = max(sent)
        rest_s = max(
            place.remaining_s + (last - place.num_dispatched) * place.step_s + place.checkpoint_s
            for place in places.values()
            if place.num_dispatched is not None
        )
        shutdown_grace = self._config.shutdown_grace
        is_signal = any(place.is_signal for place in places.values())
        if is_signal and rest_s > shutdown_grace.total_seconds():
            self._exit(
                f"at once: what was sent to the devices and a checkpoint would take about {rest_s:.0f} s, and run.shutdown_grace is "
                f"{durations.to_text(shutdown_grace)}. {self._describe_lost_steps(last)}"
            )
        with self._condition:
            self._stop_step = last
            self._condition.notify_all()
        if distributed.this_process().index == 0:
            distributed.log(stop_message(self.reason or "", stop_step=last, remaining_s=rest_s))

    def _describe_lost_steps(self, last: int) -> str:
        """What a run loses that leaves now."""
        found = run_paths.find_latest_in_run(self._config.directory)
        if found is None:
            return f"No checkpoint has been written yet: the {_count_steps(last, 'begun so far')} lost."
        since = last - int(found.name)
        lost = (
            f"The {_count_steps(since, f'since the checkpoint of step {found.name}')} lost"
            if since
            else "Nothing is lost"
        )
        return f"{lost}; the same command goes on from there."

    def _exit(self, words: str) -> None:
        if distributed.this_process().index == 0:
            distributed.log(f"stopped by {self.reason} {words}")
        distributed.exit_now(0)


def _count_steps(count: int, which: str) -> str:
    return f"1 step {which} is" if count == 1 else f"{count} steps {which} are"


def stop_message(reason: str, *, stop_step: int, remaining_s: float) -> str:
    """Messages of a run that stops.

    Args:
        last: the step that it finishes.
        rest_s: seconds until it has finished this step and written the checkpoint.
    """
    is_ctrl_c = reason == signal.SIGINT.name
    who = "" if is_ctrl_c else f"{reason}: "
    about = f" (about {durations.describe(round(remaining_s))})" if remaining_s >= 1 else ""
    again = "a second SIGTERM" if reason.startswith(signal.SIGTERM.name) else "Ctrl-C"
    again = "Ctrl-C again" if is_ctrl_c else again
    return f"{who}stopping after step {stop_step}, then writing a checkpoint{about}; {again}: leave at once without one"
