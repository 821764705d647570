"""Two processes, one of which is stopped, fails, hangs or is killed: both end, and the same command
resumes with the numbers of a run that was not disturbed."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from jaxsp.core.errors import ExitCode
from tests import commands, messages, two_processes

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("default_signals")]

NUM_STEPS = 14

FAULT_STEP = 7
"""Step after which the fault happens."""

NO_FAULT = "slow:0:0:none"
"""Argument of tests.faults.faulty for a run without a fault, in slow steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a run after a fault."""

    codes: list[int]
    """Exit codes of both processes."""
    seconds: float
    """Seconds from the fault until both have ended, or until the other one if one is suspended."""
    output: str
    steps: list[int]
    """Steps in metrics.jsonl."""
    checkpoints: list[int]
    """Steps of the checkpoints."""


class Job:
    """A small run of two processes that share each row."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.config, self.metrics = two_processes.write_config(
            folder, name="run", data=1, seq=2, steps=NUM_STEPS, devices=2
        )

    def start(self, *changes: str, fault: str = NO_FAULT) -> list[subprocess.Popen]:
        """Starts both processes."""
        command = ("-m", "tests.faults.faulty", fault, self.config, *changes)
        env = {"JAX_PLATFORMS": "cpu"}
        return two_processes.start(*command, env=env, stderr=subprocess.STDOUT)

    def read_lines(self) -> list[dict]:
        """Lines of metrics.jsonl so far."""
        return commands.read_lines(self.metrics) if self.metrics.exists() else []

    def wait_for_end(self, processes: list[subprocess.Popen], start_s: float) -> Outcome:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
        paths = (self.metrics.parent / "checkpoints").glob("*")
        return Outcome(
            codes=[process.returncode for process in processes],
            seconds=time.monotonic() - start_s,
            output="".join(outputs),
            steps=[line["step"] for line in self.read_lines()],
            checkpoints=sorted(int(path.name) for path in paths if path.name.isdecimal()),
        )

    def run_to_end(self) -> list[dict]:
        """Runs, or resumes, until the last step, and returns the numbers of all steps."""
        outcome = self.wait_for_end(self.start(), time.monotonic())
        assert outcome.codes == [0, 0], outcome.output
        fields = (*commands.COUNTS, "learning_rate", "loss", "grad_norm", "token_accuracy")
        return [{field: line[field] for field in fields} for line in self.read_lines()]

    def disturb(self, event: str, victim: int, *changes: str) -> Outcome:
        """Starts the run, causes a fault, and waits until both processes have ended.

        Args: event: name of a signal, `raise` or `hang` (tests.faults.faulty), or `twice`: SIGTERM,
            and again after 1.5 s.
        """
        is_internal = event in ("raise", "hang")
        marker = self.folder / "once"
        fault = f"{event}:{FAULT_STEP}:{victim}:{marker}" if is_internal else NO_FAULT
        processes = self.start(*changes, fault=fault)
        try:
            deadline = time.monotonic() + 400
            while len(self.read_lines()) < FAULT_STEP:
                assert all(process.poll() is None for process in processes)
                assert time.monotonic() < deadline
                time.sleep(0.05)
            start_s = time.monotonic()
            if is_internal:
                return self.wait_for_end(processes, start_s)
            name = "SIGTERM" if event == "twice" else event
            os.kill(processes[victim].pid, getattr(signal, name))
            if event == "twice":
                time.sleep(1.5)
                os.kill(processes[victim].pid, signal.SIGTERM)
                start_s = time.monotonic()
            seconds = None
            if event == "SIGSTOP":
                processes[1 - victim].wait(timeout=200)
                seconds = time.monotonic() - start_s
                processes[victim].kill()
            outcome = self.wait_for_end(processes, start_s)
            return dataclasses.replace(outcome, seconds=seconds or outcome.seconds)
        finally:
            for process in processes:
                process.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Numbers of a run without a fault."""
    numbers = Job(tmp_path_factory.mktemp("expected")).run_to_end()
    assert len(numbers) == NUM_STEPS
    return numbers


def test_both_processes_stop_after_the_same_step_when_one_receives_a_signal(tmp_path):
    outcome = Job(tmp_path).disturb("SIGTERM", 1)
    assert outcome.codes == [0, 0], outcome.output
    last = outcome.steps[-1]
    assert outcome.checkpoints == [last]
    assert re.search(messages.containing("SIGTERM", "process 1", f"step {last}"), outcome.output)
    # One step was running, and the slow steps of the test allow one more to be dispatched
    assert last <= FAULT_STEP + 3


SAVE = "run.save_every=4"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("event", "changes", "codes", "limit_s", "parts"),
    [
        ("SIGTERM", [], {0}, 30, ["stopping after step"]),
        ("twice", [], {143}, 30, ["ended by a second SIGTERM"]),
        ("raise", [SAVE], {1}, 30, ["ZeroDivisionError: requested by the test", "exit code 1"]),
        ("hang", [SAVE, "run.step_timeout=9s"], {75}, 60, ["run.step_timeout", 'faulty.py", line']),
        ("SIGKILL", [SAVE], {-9, -6, 1}, 150, []),
        ("SIGSTOP", [SAVE], {-9, -6, 1}, 200, []),
    ],
)
def test_a_fault_in_one_of_two_processes_ends_both_and_the_same_command_resumes(
    tmp_path, expected, event, victim, changes, codes, limit_s, parts
):
    job = Job(tmp_path)
    outcome = job.disturb(event, victim, *changes)
    assert {*outcome.codes} <= codes, outcome.output
    assert outcome.seconds < limit_s
    for part in parts:
        assert part in outcome.output
    if event == "raise":
        assert outcome.output.count("Traceback (most recent call last)") == 1
    if event == "hang":
        assert outcome.codes == [ExitCode.HUNG] * 2
        assert outcome.checkpoints == [4]
    assert job.run_to_end() == expected
