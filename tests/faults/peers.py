"""Two processes, of which one meets its fate: who ends when, and what is left.

`python -m tests.faults.peers` does all of it and prints a table (about 15 minutes on 2 cores).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import time

from tests import test_launch

STEPS = 14

AT = 7
"""The step after which it happens."""

SAME = (*test_launch.COUNTS, "loss", "grad_norm", "token_accuracy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What happens to whom."""

    event: str
    """The name of a signal, or what tests.faults.faulty knows; `twice` is SIGTERM, and again after 1.5 s."""
    victim: int
    launched: bool
    """By jaxsp.launch; else as srun and torchrun start processes."""
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended."""

    codes: list[int]
    """Of the launcher, or of both processes."""
    seconds: float
    """From the event until all are gone. A process that is stopped is killed then, where there is no launcher."""
    said: str
    steps: list[int]
    """In metrics.jsonl."""
    saved: list[int]
    """Checkpoints."""

    @property
    def tracebacks(self) -> int:
        return self.said.count("Traceback (most recent call last)")


class Job:
    """A small run by two processes that share each row."""

    def __init__(self, folder: pathlib.Path, *, data: int = 1, seq: int = 2):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.file, self.metrics = test_launch.write_config(
            folder, name="run", data=data, seq=seq, steps=STEPS, devices=data * seq
        )

    def start(
        self, *words: str, launched: bool, fault: str = "slow:0:0:none"
    ) -> list[subprocess.Popen]:
        """The launcher, or both processes."""
        faulty = (sys.executable, "-m", "tests.faults.faulty", fault)
        if launched:
            python = self.folder / "python"
            python.write_text(f'#!/bin/sh\nexec {" ".join(faulty)} "$@"\n')
            python.chmod(python.stat().st_mode | stat.S_IXUSR)
            program = f"import sys; from jaxsp import cli, launch; sys.executable = {str(python)!r}; cli.run_command(launch.main)"
            return [
                self._begin(sys.executable, "-c", program, "--processes", "2", self.file, *words)
            ]
        from jaxsp import launch

        place = [
            "--coordinator",
            f"127.0.0.1:{launch.free_port()}",
            "--num-processes",
            "2",
            "--process-id",
        ]
        return [self._begin(*faulty, self.file, *words, *place, str(index)) for index in range(2)]

    def _begin(self, *words: object) -> subprocess.Popen:
        return subprocess.Popen(
            [*map(str, words)],
            cwd=test_launch.REPO,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lines(self) -> list[dict]:
        return test_launch.read_lines(self.metrics) if self.metrics.exists() else []

    def wait_for(self, step: int, begun: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + 400
        while len(self.lines()) < step:
            assert all(one.poll() is None for one in begun), [
                one.communicate()[0] for one in begun if one.poll() is not None
            ]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self, begun: list[subprocess.Popen], since: float) -> Outcome:
        said = [one.communicate(timeout=400)[0] for one in begun]
        saved = [
            int(path.name)
            for path in (self.metrics.parent / "checkpoints").glob("*")
            if path.name.isdecimal()
        ]
        return Outcome(
            codes=[one.returncode for one in begun],
            seconds=time.monotonic() - since,
            said="".join(said),
            steps=[line["step"] for line in self.lines()],
            saved=sorted(saved),
        )

    def all_steps(self, **how) -> list[dict]:
        """Runs to the end, and gives the numbers of each step that do not depend on time."""
        begun = self.start(**{"launched": True, **how})
        outcome = self.end(begun, time.monotonic())
        assert outcome.codes == [0] * len(begun), outcome.said
        return numbers(self.lines())


def numbers(lines: list[dict]) -> list[dict]:
    return [{field: line[field] for field in ("step", *SAME)} for line in lines]


def happen(job: Job, case: Case) -> Outcome:
    """Starts a run, lets it happen, and waits until all are gone."""
    fault = (
        f"{case.event}:{AT}:{case.victim}:{job.folder / 'once'}"
        if case.event in ("raise", "hang")
        else "slow:0:0:none"
    )
    begun = job.start(*case.words, launched=case.launched, fault=fault)
    try:
        job.wait_for(AT, begun)
        since = time.monotonic()
        if case.event not in ("raise", "hang"):
            pids = [one.pid for one in begun]
            if case.launched:
                pids = sorted(test_launch.children(begun[0].pid), key=test_launch.rank_of)
            name = "SIGTERM" if case.event == "twice" else case.event
            os.kill(pids[case.victim], getattr(signal, name))
            if case.event == "twice":
                time.sleep(1.5)
                os.kill(pids[case.victim], signal.SIGTERM)
                since = time.monotonic()
            if case.event == "SIGSTOP" and not case.launched:
                begun[1 - case.victim].wait(timeout=100)
                outcome_s = time.monotonic() - since
                begun[case.victim].kill()
                return dataclasses.replace(job.end(begun, since), seconds=outcome_s)
        return job.end(begun, since)
    finally:
        for one in begun:
            one.kill()


def cases() -> list[Case]:
    return [
        Case(event=event, victim=victim, launched=launched, words=words)
        for event, words in (
            ("SIGTERM", ()),
            ("twice", ()),
            ("raise", ("run.save_every=4",)),
            ("SIGKILL", ("run.save_every=4",)),
            ("SIGSTOP", ("run.save_every=4",)),
            ("hang", ("run.save_every=4", "run.step_timeout=18s")),
        )
        for victim in (0, 1)
        for launched in (False, True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="an event")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        right = Job(pathlib.Path(folder, "straight")).all_steps()
        assert len(right) == STEPS
        print(
            "| event | to process | started by | all gone after | exit codes | tracebacks | checkpoints | run again |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for number, case in enumerate(case for case in cases() if given.only in (None, case.event)):
            job = Job(pathlib.Path(folder, str(number)))
            outcome = happen(job, case)
            again = job.all_steps(launched=case.launched) == right
            by = "launch" if case.launched else "two commands"
            codes = ", ".join(map(str, outcome.codes))
            state = "as never stopped" if again else "DIFFERS"
            row = (
                case.event,
                case.victim,
                by,
                f"{outcome.seconds:.1f} s",
                codes,
                outcome.tracebacks,
                outcome.saved,
                state,
            )
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            (pathlib.Path(folder) / f"{number}.log").write_text(json.dumps(outcome.said))


if __name__ == "__main__":
    main()
