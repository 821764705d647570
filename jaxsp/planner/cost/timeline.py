"""Simulates the schedule of a compiled program on one device: what overlaps, and where it waits.

XLA orders the instructions of each computation. Kernels run one after another on the compute
stream, in that order. A collective, or a copy between host and device memory, starts at its
`-start` instruction on a stream of its own, after earlier ones of that stream; the compute stream
waits for it at its `-done`. One that has no such pair blocks the compute stream.

    compute     | kernel | kernel | kernel |     wait     | kernel |
    collective           |         all-gather             |

Two iterations of a loop are simulated; the second stands for all later ones. Of the switch between
kinds of layers, each branch takes its fraction of the time, one after another; of another
conditional, the slowest branch counts.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxsp.planner.compile import hlo
from jaxsp.planner.compile.hlo import HloModule, Instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledTransfer:
    """Place and duration of a collective or host copy in a program."""

    stream: str
    """Transfers of one stream run one after another."""
    seconds: float
    """Duration of one run if nothing else runs."""
    begin_line: int
    """Line number of the instruction that starts it."""
    end_line: int
    """Line number of the instruction that waits for it; `begin_line` if it blocks the compute
    stream."""


def simulate(
    program: HloModule,
    kernel_seconds: Mapping[int, float],
    transfers: Mapping[int, ScheduledTransfer],
) -> "Timeline":
    """Simulates a program.

    Args:
        kernel_seconds: seconds of one run of each kernel, by line number.
        transfers: collectives and host copies, by the line number where they begin.
    """
    timeline = Timeline(program, kernel_seconds, transfers)
    timeline.run(program.entry, runs=1)
    return timeline


class _TransferRun(NamedTuple):
    """One run of a transfer. Times are in seconds from the beginning of the program."""

    begin_line: int
    """Line number where the transfer begins."""
    begin_s: float
    end_s: float


class Timeline:
    """Clocks of all streams, in seconds from the beginning of the program, and sums over all
    runs."""

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
        self._compute_free_s = 0.0
        """Time when the compute stream is free."""
        self._queues: dict[str, list[_TransferRun]] = {}
        """Runs of each other stream, in order, except those that have ended."""
        self.kernel_seconds: collections.defaultdict[int, float] = collections.defaultdict(float)
        """Seconds of all runs of each kernel, by line number."""
        self.exposed_s: collections.defaultdict[int, float] = collections.defaultdict(float)
        """Seconds in which the compute stream waits while a transfer runs, by the line number where
        it begins. At most the transfer's own seconds."""
        self.num_runs: collections.defaultdict[int, float] = collections.defaultdict(float)
        """Runs of each transfer, by the line number where it begins."""

    @property
    def seconds(self) -> float:
        """Time when all streams are idle."""
        return max(
            [self._compute_free_s, *(run.end_s for queue in self._queues.values() for run in queue)]
        )

    def run(self, computation: str, *, runs: int, fraction: float = 1.0) -> None:
        """Simulates a computation once, and counts it as `runs` executions.

        Args: fraction: fraction of the runs in which it is executed. Its times are multiplied by
            it, so that they are means.
        """
        for line in self._program.computations[computation]:
            transfer = self._transfers.get(line.line_number)
            if transfer is not None:
                queue = self._queues.setdefault(transfer.stream, [])
                begin = max([self._compute_free_s, *(run.end_s for run in queue)])
                queue.append(
                    _TransferRun(transfer.begin_line, begin, begin + fraction * transfer.seconds)
                )
                self.num_runs[transfer.begin_line] += runs * fraction
            for ended in self._transfers_by_end_line.get(line.line_number, ()):
                # time in which an earlier one of its queue still runs counts for that one
                queue = self._queues.get(ended.stream, [])
                ends = [run.end_s for run in queue if run.begin_line == ended.begin_line]
                until = max([self._compute_free_s, *ends])
                for run in queue:
                    waited = min(run.end_s, until) - max(run.begin_s, self._compute_free_s)
                    self.exposed_s[run.begin_line] += max(0.0, waited) * runs
                self._compute_free_s = until
                self._queues[ended.stream] = [run for run in queue if run.end_s > until]
            if transfer is not None:
                continue
            if (seconds := self._kernels.get(line.line_number)) is not None:
                self._compute_free_s += seconds * fraction
                self.kernel_seconds[line.line_number] += seconds * fraction * runs
            if line.opcode == "while":
                self._run_loop(line, runs, fraction)
            elif kinds := hlo.find_kind_fractions(line):
                for called, part in kinds.items():
                    if part:
                        self.run(called, runs=runs, fraction=fraction * part)
            elif line.opcode == "conditional":
                slowest = max(line.called_computations, key=self._simulate_branch)
                self.run(slowest, runs=runs, fraction=fraction)
            elif line.opcode in ("call", "async-start"):
                for called in line.called_computations:
                    self.run(called, runs=runs, fraction=fraction)

    def _run_loop(self, loop: Instruction, runs: int, fraction: float) -> None:
        """Simulates two iterations, and repeats the second.

        Transfers that began before the loop and end after it overlap all iterations, and keep their
        times.
        """
        body = loop.find_computation("body")
        num_trips = hlo.find_trip_count(loop, self._program)
        if num_trips > 0:
            self.run(body, runs=runs, fraction=fraction)
        if num_trips < 2:
            return
        begin_s = self._compute_free_s
        older = {run for queue in self._queues.values() for run in queue}
        self.run(body, runs=runs * (num_trips - 1), fraction=fraction)
        skipped_s = (num_trips - 2) * (self._compute_free_s - begin_s)
        self._compute_free_s += skipped_s
        for stream, queue in self._queues.items():
            self._queues[stream] = [
                run
                if run in older
                else run._replace(begin_s=run.begin_s + skipped_s, end_s=run.end_s + skipped_s)
                for run in queue
            ]

    def _simulate_branch(self, computation: str) -> float:
        """Seconds of the compute stream in a computation that starts with idle streams."""
        branch = Timeline(self._program, self._kernels, self._transfers)
        branch.run(computation, runs=1)
        return branch._compute_free_s
