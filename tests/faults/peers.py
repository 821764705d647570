"""Faults in one of two processes: when both end, and what is left.

`python -m tests.faults.peers` tries all of them and prints a table (about 15 minutes on 2 cores).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from tests import commands, two_processes

NUM_STEPS = 14

FAULT_STEP = 7
"""Step after which the fault happens."""

DETERMINISTIC = (*commands.COUNTS, "learning_rate", "loss", "grad_norm", "token_accuracy")
"""Fields of metrics.jsonl that do not depend on time."""

NO_FAULT = "slow:0:0:none"
"""Argument of tests.faults.faulty for a run without a fault, in slow steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A fault in one of two processes."""

    event: str
    """Name of a signal, `raise` or `hang` (tests.faults.faulty), or `twice`: SIGTERM, and again
    after 1.5 s."""
    victim: int
    """Index of the process."""
    changes: tuple[str, ...] = ()
    """Changes of the config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a run after a fault."""

    codes: list[int]
    """Exit codes of both processes."""
    seconds: float
    """Seconds from the fault until both have ended. A process that is suspended is killed when the
    other one has ended."""
    output: str
    steps: list[int]
    """Steps in metrics.jsonl."""
    checkpoints: list[int]
    """Steps of the checkpoints."""

    @property
    def num_tracebacks(self) -> int:
        return self.output.count("Traceback (most recent call last)")


class Job:
    """A small run of two processes that share each row."""

    def __init__(self, folder: pathlib.Path, *, data: int = 1, seq: int = 2):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.config, self.metrics = two_processes.write_config(
            folder, name="run", data=data, seq=seq, steps=NUM_STEPS, devices=data * seq
        )

    def start(self, *changes: str, fault: str = NO_FAULT) -> list[subprocess.Popen]:
        """Starts both processes."""
        command = ("-m", "tests.faults.faulty", fault, self.config, *changes)
        env = {"JAX_PLATFORMS": "cpu"}
        return two_processes.start(*command, env=env, stderr=subprocess.STDOUT)

    def read_lines(self) -> list[dict]:
        """Lines of metrics.jsonl so far."""
        return commands.read_lines(self.metrics) if self.metrics.exists() else []

    def wait_for_step(self, step: int, processes: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + 400
        while len(self.read_lines()) < step:
            for process in processes:
                assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

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
        """Runs, or resumes, until the last step, and returns `deterministic_fields`."""
        processes = self.start()
        outcome = self.wait_for_end(processes, time.monotonic())
        assert outcome.codes == [0] * len(processes), outcome.output
        return deterministic_fields(self.read_lines())


def deterministic_fields(lines: list[dict]) -> list[dict]:
    return [{field: line[field] for field in ("step", *DETERMINISTIC)} for line in lines]


def cause_fault(job: Job, case: Case) -> Outcome:
    """Starts a run, causes the fault, and waits until all processes have ended."""
    is_internal = case.event in ("raise", "hang")
    fault = NO_FAULT
    if is_internal:
        fault = f"{case.event}:{FAULT_STEP}:{case.victim}:{job.folder / 'once'}"
    processes = job.start(*case.changes, fault=fault)
    try:
        job.wait_for_step(FAULT_STEP, processes)
        start_s = time.monotonic()
        if is_internal:
            return job.wait_for_end(processes, start_s)
        pids = [process.pid for process in processes]
        name = "SIGTERM" if case.event == "twice" else case.event
        os.kill(pids[case.victim], getattr(signal, name))
        if case.event == "twice":
            time.sleep(1.5)
            os.kill(pids[case.victim], signal.SIGTERM)
            start_s = time.monotonic()
        if case.event == "SIGSTOP":
            processes[1 - case.victim].wait(timeout=200)
            seconds = time.monotonic() - start_s
            processes[case.victim].kill()
            return dataclasses.replace(job.wait_for_end(processes, start_s), seconds=seconds)
        return job.wait_for_end(processes, start_s)
    finally:
        for process in processes:
            process.kill()


def cases() -> list[Case]:
    save = ("run.save_every=4",)
    changes_by_event: dict[str, tuple[str, ...]] = {
        "SIGTERM": (),
        "twice": (),
        "raise": save,
        "SIGKILL": save,
        "SIGSTOP": save,
        "hang": (*save, "run.step_timeout=18s"),
    }
    return [
        Case(event=event, victim=victim, changes=changes)
        for event, changes in changes_by_event.items()
        for victim in (0, 1)
    ]


COLUMNS = (
    "event",
    "in process",
    "all ended after",
    "exit codes",
    "tracebacks",
    "checkpoints",
    "resumed run",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="EVENT", help="one event instead of all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected = Job(pathlib.Path(folder, "expected")).run_to_end()
        assert len(expected) == NUM_STEPS
        print(f"| {' | '.join(COLUMNS)} |")
        print(f"| {' | '.join('---' for _ in COLUMNS)} |", flush=True)
        chosen = [case for case in cases() if args.only in (None, case.event)]
        for number, case in enumerate(chosen):
            job = Job(pathlib.Path(folder, str(number)))
            outcome = cause_fault(job, case)
            is_same = job.run_to_end() == expected
            values = (
                case.event,
                case.victim,
                f"{outcome.seconds:.1f} s",
                ", ".join(map(str, outcome.codes)),
                outcome.num_tracebacks,
                outcome.checkpoints,
                "same numbers" if is_same else "DIFFERS",
            )
            print(f"| {' | '.join(map(str, values))} |", flush=True)
            (pathlib.Path(folder) / f"{number}.log").write_text(json.dumps(outcome.output))


if __name__ == "__main__":
    main()
