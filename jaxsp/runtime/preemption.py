"""Stopping a run on a signal: after the same step in all processes, with a checkpoint, where there is time for one."""

import dataclasses
import json
import os
import select
import signal
import threading
import time

import jax

from jaxsp.config import schema
from jaxsp.core import durations
from jaxsp.runtime import distributed, run_paths, run_status

SIGNALS = (signal.SIGTERM, signal.SIGINT)

ONE_S = 1.0
"""Signals so close together are one: a terminal or srun sends it to a launcher and to its processes, and the launcher passes it
on."""

_STOP_AFTER = "run.stop_after"

_STOP, _PLACE = "stop", "place"
"""What processes tell each other: that they were asked to stop, then how far they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """How far a process is when it has heard that the run is to stop. It sends no step before all are heard."""

    sent: int | None
    """Steps sent to the devices since step 0; None before the first of this run."""
    rest_s: float
    """Until they have ended."""
    step_s: float
    """For each more that another process has sent."""
    save_s: float
    """For a checkpoint; 0 where none was written yet."""
    is_pressing: bool
    """Whether it was a signal, so that whoever sent it will not wait for long."""


class Stopping:
    """What ends a run early, from when it is entered until it is left: SIGTERM, SIGINT, run.stop_after, and other processes.

    Before the first step is sent, a signal ends the process at once. Python runs signal handlers between two bytecodes of
    the main thread, which waits for a step for minutes; so a thread reads the signals from a pipe. A process tells the
    others through the store that JAX keeps for them, and no step pays for it.
    """

    def __init__(self, settings: schema.Run, pace: run_status.Pace):
        self._settings, self.pace = settings, pace
        self.reason: str | None = None
        """What asked for a stop; None as long as nothing did."""
        self._began = time.monotonic()
        self._signalled: float | None = None
        self._changed = threading.Condition()
        self._sent: int | None = None
        self._place: Place | None = None
        self._last: int | None = None
        """The step after which all processes stop; None as long as that is not known."""
        self._is_over = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> "Stopping":
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
        self._left.set()
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def lets(self, step: int) -> bool:
        """Whether a step is to be sent to the devices; called before each, in order."""
        with self._changed:
            # told where it is, this process stays there until it knows where the others are
            self._changed.wait_for(lambda: self._place is None or self._last is not None)
            if self._last is not None and step > self._last:
                return False
            self._sent = step
            return True

    def _listen(self) -> None:
        while not self._left.is_set():
            try:
                self._hear()
            except jax.errors.JaxRuntimeError:  # process 0 does not answer; where it is gone, JAX ends this one
                time.sleep(distributed.HEAR_S)

    def _hear(self) -> None:
        while not self._left.is_set():
            ready, _, _ = select.select([self._pipe[0]], [], [], distributed.HEAR_S)
            for number in os.read(self._pipe[0], 64) if ready else b"":
                if number in SIGNALS:
                    self._signal(signal.Signals(number))
            minutes = self._settings.stop_after
            if self.reason is None and minutes is not None and time.monotonic() - self._began >= 60 * minutes:
                self._ask(f"{_STOP_AFTER} = {minutes:g}")
            if self.reason is None and (asked := distributed.told(_STOP)):
                index, reason = min(asked.items())
                self._begin(reason if reason.startswith(_STOP_AFTER) else f"{reason} to process {index}")
            if self.reason is not None and self._last is None and not self._left.is_set():
                self._decide()

    def over(self) -> None:
        """Notes that all is done: from now on there is nothing to stop."""
        self._is_over = True

    def _signal(self, number: signal.Signals) -> None:
        if self._is_over:
            return
        if self._signalled is None:
            self._signalled = time.monotonic()
        elif time.monotonic() - self._signalled > ONE_S:
            distributed.say(f"left by a second {number.name}")
            code = 128 + number
            if distributed.here().index == 0:
                os._exit(code)  # JAX ends the others when process 0 is gone
            distributed.fail(code)
        if self.reason is None:
            self._ask(number.name)

    def _ask(self, reason: str) -> None:
        """Begins a stop, in all processes."""
        distributed.tell(_STOP, reason)
        self._begin(reason)

    def _begin(self, reason: str) -> None:
        """Holds back the next step, and tells where this process is."""
        with self._changed:
            self.reason = reason
            # let go, and not sent yet
            more = max(0, self._sent - self.pace.num_sent) if self._sent is not None else 0
            self._place = Place(
                sent=self._sent,
                rest_s=self.pace.rest_s() + more * self.pace.step_s,
                step_s=self.pace.step_s,
                save_s=self.pace.save_s or 0.0,
                is_pressing=not reason.startswith(_STOP_AFTER),
            )
        distributed.tell(_PLACE, json.dumps(dataclasses.asdict(self._place)))

    def _decide(self) -> None:
        """When all have told where they are: where to stop, or to leave at once. All see the same, and decide alike."""
        assert self._place is not None, "it was told"
        told = {index: Place(**json.loads(place)) for index, place in distributed.told(_PLACE).items()}
        if distributed.talk() and distributed.here().index not in told:  # there was nobody to tell yet
            distributed.tell(_PLACE, json.dumps(dataclasses.asdict(self._place)))
            return
        places = told if distributed.talk() else {0: self._place}
        if distributed.talk() and len(places) < distributed.here().num_processes:
            return
        sent = [place.sent for place in places.values() if place.sent is not None]
        if not sent:
            self._leave("before the first step: nothing is lost")
        last = max(sent)
        rest_s = max(
            place.rest_s + (last - place.sent) * place.step_s + place.save_s
            for place in places.values()
            if place.sent is not None
        )
        grace_s = self._settings.grace_s
        if rest_s > grace_s and any(place.is_pressing for place in places.values()):
            self._leave(
                f"at once: what was sent to the devices and a checkpoint would take about {rest_s:.0f} s, and run.grace_s is "
                f"{grace_s:g}. {self._lost(last)}"
            )
        with self._changed:
            self._last = last
            self._changed.notify_all()
        if distributed.here().index == 0:
            distributed.say(stop_message(self.reason or "", last=last, rest_s=rest_s))

    def _lost(self, last: int) -> str:
        """What a run loses that leaves now."""
        found = run_paths.newest_of_run(self._settings.directory)
        if found is None:
            return f"No checkpoint has been written yet: the {_steps(last, 'begun so far')} lost."
        since = last - int(found.name)
        lost = f"The {_steps(since, f'since the checkpoint of step {found.name}')} lost" if since else "Nothing is lost"
        return f"{lost}; the same command goes on from there."

    def _leave(self, words: str) -> None:
        if distributed.here().index == 0:
            distributed.say(f"stopped by {self.reason} {words}")
        distributed.leave(0)


def _steps(count: int, which: str) -> str:
    return f"1 step {which} is" if count == 1 else f"{count} steps {which} are"


def stop_message(reason: str, *, last: int, rest_s: float) -> str:
    """Messages of a run that stops.

    Args:
        last: the step that it finishes.
        rest_s: seconds until it has finished this step and written the checkpoint.
    """
    is_ctrl_c = reason == signal.SIGINT.name
    who = "" if is_ctrl_c else f"{reason}: "
    about = f" (about {durations.describe(round(rest_s))})" if rest_s >= 1 else ""
    again = "a second SIGTERM" if reason.startswith(signal.SIGTERM.name) else "Ctrl-C"
    again = "Ctrl-C again" if is_ctrl_c else again
    return f"{who}stopping after step {last}, then writing a checkpoint{about}; {again}: leave at once without one"
