"""Simulates the schedule of a compiled program on one device: what overlaps, and where it waits.

XLA orders the instructions of each computation. Kernels run one after another on the compute
stream, in that order. A collective, or a copy between host and device memory, starts at its
`-start` instruction on a stream of its own, after earlier ones of that stream; the compute stream
waits for it at its `-done`. One that has no such pair blocks the compute stream.

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
from jaxsp.planner.compile.hlo import HloModule, Instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledTransfer:
    """One collective or host copy of a program."""

    stream: str
    """Transfers of one stream run one after another."""
    seconds: float
    """Duration of one run if nothing else runs."""
    begin_line: int
    """Line number of the instruction that starts it."""
    end_line: int
    """Line number of the instruction that waits for it; `begin_line` if it blocks the compute
    stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExposedTime:
    """Time of a step in which the compute stream waits while one transfer runs."""

    num_runs: int
    seconds: float
    """Sum over all runs; at most the transfer's own seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated program."""

    seconds: float
    """Time from the first instruction until all streams are idle."""
    kernel_seconds: Mapping[int, float]
    """Seconds of all runs of each kernel, by line number."""
    exposed: Mapping[int, ExposedTime]
    """Waits for each transfer, by the line number where it begins."""


def simulate(
    program: HloModule,
    kernel_seconds: Mapping[int, float],
    transfers: Mapping[int, ScheduledTransfer],
) -> Timeline:
    """Simulates a program.

    Args:
        kernel_seconds: seconds of one run of each kernel, by line number.
        transfers: collectives and host copies, by the line number where they begin.
    """
    simulator = _Simulator(program, kernel_seconds, transfers)
    simulator.run(program.entry, runs=1)
    exposed = {
        line: ExposedTime(num_runs=runs, seconds=simulator.exposed_s[line])
        for line, runs in simulator.num_runs.items()
    }
    return Timeline(
        seconds=simulator.end_s, kernel_seconds=simulator.kernel_seconds, exposed=exposed
    )


class _TransferRun(NamedTuple):
    """One run of a transfer."""

    begin_line: int
    """Line number where the transfer begins."""
    begin_s: float
    """Seconds from the beginning of the program."""
    end_s: float


class _Simulator:
    """Clocks of all streams, in seconds from the beginning of the program."""

    def __init__(
        self,
        program: HloModule,
        kernels: Mapping[int, float],
        transfers: Mapping[int, ScheduledTransfer],
    ):
        self._program = program
        self._kernels = kernels
        self._transfers = transfers
        self._transfers_by_end_line: dict[int, list[ScheduledTransfer]] = {}
        for transfer in transfers.values():
            self._transfers_by_end_line.setdefault(transfer.end_line, []).append(transfer)
        self.compute_free_s = 0.0
        """Time when the compute stream is free."""
        self._queues: dict[str, list[_TransferRun]] = {}
        """Runs of each other stream, in order, except those that have ended."""
        self.exposed_s: collections.defaultdict[int, float] = collections.defaultdict(float)
        self.num_runs: collections.Counter[int] = collections.Counter()
        self.kernel_seconds: collections.defaultdict[int, float] = collections.defaultdict(float)

    @property
    def end_s(self) -> float:
        """Time when all streams are idle."""
        return max(
            [self.compute_free_s, *(run.end_s for queue in self._queues.values() for run in queue)]
        )

    def run(self, computation: str, *, runs: int) -> None:
        """Simulates a computation once, and counts it as `runs` executions."""
        for line in self._program.computations[computation]:
            transfer = self._transfers.get(line.line_number)
            if transfer is not None:
                self._start(transfer, runs)
            for ended in self._transfers_by_end_line.get(line.line_number, ()):
                self._wait(ended, runs)
            if transfer is not None:
                continue
            if (seconds := self._kernels.get(line.line_number)) is not None:
                self.compute_free_s += seconds
                self.kernel_seconds[line.line_number] += seconds * runs
            if line.opcode == "while":
                self._run_loop(line, runs)
            elif line.opcode == "conditional":
                self._run_slowest(line.called_computations, runs)
            elif line.opcode in ("call", "async-start"):
                for called in line.called_computations:
                    self.run(called, runs=runs)

    def _start(self, transfer: ScheduledTransfer, runs: int) -> None:
        queue = self._queues.setdefault(transfer.stream, [])
        begin = max([self.compute_free_s, *(run.end_s for run in queue)])
        queue.append(_TransferRun(transfer.begin_line, begin, begin + transfer.seconds))
        self.num_runs[transfer.begin_line] += runs

    def _wait(self, transfer: ScheduledTransfer, runs: int) -> None:
        """Waits for a transfer. Time in which an earlier one of its queue still runs counts for
        that one."""
        queue = self._queues.get(transfer.stream, [])
        until = max(
            [
                self.compute_free_s,
                *(run.end_s for run in queue if run.begin_line == transfer.begin_line),
            ]
        )
        for run in queue:
            self.exposed_s[run.begin_line] += (
                max(0.0, min(run.end_s, until) - max(run.begin_s, self.compute_free_s)) * runs
            )
        self.compute_free_s = until
        self._queues[transfer.stream] = [run for run in queue if run.end_s > until]

    def _run_loop(self, loop: Instruction, runs: int) -> None:
        body = loop.find_computation("body")
        trips = hlo.find_trip_count(loop, self._program)
        if trips == 0:
            return
        self.run(body, runs=runs)
        if trips == 1:
            return
        now = self.compute_free_s
        queues = {stream: list(queue) for stream, queue in self._queues.items()}
        self.run(body, runs=runs * (trips - 1))
        self._repeat_loop(now, queues, times=trips - 2)

    def _repeat_loop(
        self, now: float, queues: Mapping[str, list[_TransferRun]], *, times: int
    ) -> None:
        """Advances all clocks by `times` more iterations, each as long as the one that started at
        `now`.

        Transfers that began before the loop and end after it overlap all iterations, and keep their
        times.
        """
        seconds = times * (self.compute_free_s - now)
        self.compute_free_s += seconds
        for stream, queue in self._queues.items():
            old = queues.get(stream, [])
            self._queues[stream] = [
                run
                if run in old
                else _TransferRun(run.begin_line, run.begin_s + seconds, run.end_s + seconds)
                for run in queue
            ]

    def _run_slowest(self, branches: list[str], runs: int) -> None:
        self.run(max(branches, key=self._simulate_alone_s), runs=runs)

    def _simulate_alone_s(self, computation: str) -> float:
        """Seconds of a computation that starts with idle streams."""
        alone = _Simulator(self._program, self._kernels, self._transfers)
        alone.run(computation, runs=1)
        return alone.compute_free_s
