"""Simulates the schedule of a compiled program on one device: what overlaps, and where it waits.

XLA orders the instructions of each computation. Kernels run one after another on the compute stream, in that order. A
collective, or a copy between host and device memory, starts at its `-start` instruction on a stream of its own, after earlier
ones of that stream; the compute stream waits for it at its `-done`. One that has no such pair blocks the compute stream.

    compute     | kernel | kernel | kernel |     wait     | kernel |
    collective           |         all-gather             |

Two iterations of a loop are simulated; the second stands for all later ones. Of a conditional, the
slowest branch counts.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxsp.planner.compile import hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective or host copy of a program."""

    stream: str
    """Transfers of one stream run one after another."""
    seconds: float
    """Duration of one run, alone."""
    begin: int
    """Line number of the instruction that starts it."""
    end: int
    """Line number of the instruction that waits for it; `begin` if it blocks the compute stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waited:
    """Time of a step in which the compute stream waits while one transfer runs."""

    runs: int
    seconds: float
    """Sum over all runs; at most the transfer's own seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated program."""

    seconds: float
    """Time from the first instruction until all streams are idle."""
    kernels: Mapping[int, float]
    """Seconds of all runs of each kernel, by line number."""
    waited: Mapping[int, Waited]
    """Waits for each transfer, by the line number where it begins."""


def simulate(program: hlo.Program, kernels: Mapping[int, float], transfers: Mapping[int, Transfer]) -> Timeline:
    """Simulates a program.

    Args:
        kernels: seconds of one run of each kernel, by line number.
        transfers: collectives and host copies, by the line number where they begin.
    """
    simulator = _Simulator(program, kernels, transfers)
    simulator.run(program.entry, runs=1)
    waited = {line: Waited(runs=runs, seconds=simulator.waited[line]) for line, runs in simulator.runs.items()}
    return Timeline(seconds=simulator.end, kernels=simulator.spent, waited=waited)


class _Run(NamedTuple):
    """One run of a transfer."""

    line: int
    """Line number where the transfer begins."""
    begin: float
    """Seconds from the beginning of the program."""
    end: float


class _Simulator:
    """Clocks of all streams, in seconds from the beginning of the program."""

    def __init__(self, program: hlo.Program, kernels: Mapping[int, float], transfers: Mapping[int, Transfer]):
        self._program = program
        self._kernels = kernels
        self._transfers = transfers
        self._ends: dict[int, list[Transfer]] = {}
        for transfer in transfers.values():
            self._ends.setdefault(transfer.end, []).append(transfer)
        self.now = 0.0
        """Time when the compute stream is free."""
        self._queues: dict[str, list[_Run]] = {}
        """Runs of each other stream, in order, except those that have ended."""
        self.waited: collections.defaultdict[int, float] = collections.defaultdict(float)
        self.runs: collections.Counter[int] = collections.Counter()
        self.spent: collections.defaultdict[int, float] = collections.defaultdict(float)

    @property
    def end(self) -> float:
        """Time when all streams are idle."""
        return max([self.now, *(run.end for queue in self._queues.values() for run in queue)])

    def run(self, computation: str, *, runs: int) -> None:
        """Simulates a computation once, and counts it as `runs` executions."""
        for line in self._program.computations[computation]:
            transfer = self._transfers.get(line.number)
            if transfer is not None:
                self._start(transfer, runs)
            for ended in self._ends.get(line.number, ()):
                self._wait(ended, runs)
            if transfer is not None:
                continue
            if (seconds := self._kernels.get(line.number)) is not None:
                self.now += seconds
                self.spent[line.number] += seconds * runs
            if line.opcode == "while":
                self._loop(line, runs)
            elif line.opcode == "conditional":
                self._slowest(line.called, runs)
            elif line.opcode in ("call", "async-start"):
                for called in line.called:
                    self.run(called, runs=runs)

    def _start(self, transfer: Transfer, runs: int) -> None:
        queue = self._queues.setdefault(transfer.stream, [])
        begin = max([self.now, *(run.end for run in queue)])
        queue.append(_Run(transfer.begin, begin, begin + transfer.seconds))
        self.runs[transfer.begin] += runs

    def _wait(self, transfer: Transfer, runs: int) -> None:
        """Waits for a transfer. Time in which an earlier one of its queue still runs counts for
        that one."""
        queue = self._queues.get(transfer.stream, [])
        until = max([self.now, *(run.end for run in queue if run.line == transfer.begin)])
        for run in queue:
            self.waited[run.line] += max(0.0, min(run.end, until) - max(run.begin, self.now)) * runs
        self.now = until
        self._queues[transfer.stream] = [run for run in queue if run.end > until]

    def _loop(self, loop: hlo.Line, runs: int) -> None:
        body, trips = loop.attribute("body"), hlo.trip_count(loop, self._program)
        if trips == 0:
            return
        self.run(body, runs=runs)
        if trips == 1:
            return
        now, queues = self.now, {stream: list(queue) for stream, queue in self._queues.items()}
        self.run(body, runs=runs * (trips - 1))
        self._repeat(now, queues, times=trips - 2)

    def _repeat(self, now: float, queues: Mapping[str, list[_Run]], *, times: int) -> None:
        """Advances all clocks by `times` more iterations, each as long as the one that started at
        `now`.

        Transfers that began before the loop and end after it overlap all iterations, and keep their
        times.
        """
        seconds = times * (self.now - now)
        self.now += seconds
        for stream, queue in self._queues.items():
            old = queues.get(stream, [])
            self._queues[stream] = [
                run if run in old else _Run(run.line, run.begin + seconds, run.end + seconds) for run in queue
            ]

    def _slowest(self, branches: list[str], runs: int) -> None:
        self.run(max(branches, key=self._alone), runs=runs)

    def _alone(self, computation: str) -> float:
        """Seconds of a computation that starts with idle streams."""
        alone = _Simulator(self._program, self._kernels, self._transfers)
        alone.run(computation, runs=1)
        return alone.now
