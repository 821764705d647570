"""Estimates the time of a compiled step from published peak rates of its devices. Nothing is
measured.

A kernel takes the longer of two times: its matrix products at the rate of large products, and its
reads and writes at the rate of the memory. Attention by cuDNN takes its arithmetic at the rate of
flash attention, and blockwise attention at that of its own kernels, with an assumed time of their
launches. Kernels of gated delta nets are listed apart, without their projections. Left out: other
kernel launches, waiting for data, the slowdown of kernels that overlap collectives, and unequal
attention of devices, which training logs as `attention_imbalance`.

What overlaps follows from the schedule. XLA orders the instructions of each computation. Kernels
run one after another on the compute stream, in that order. A collective, or a copy between host and
device memory, starts at its `-start` instruction on a stream of its own, after earlier ones of that
stream; the compute stream waits for it at its `-done`. One that has no such pair blocks the compute
stream.

    compute     | kernel | kernel | kernel |     wait     | kernel |
    collective           |         all-gather             |

Two iterations of a loop are simulated; the second stands for all later ones. Of the switch between
kinds of layers, each branch takes its fraction of the time, one after another; of another
conditional, the slowest branch counts.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxsp.attention.kernels import blockwise
from jaxsp.attention.selection import AttentionChoice
from jaxsp.blocks import delta_net
from jaxsp.blocks.config import ModelConfig
from jaxsp.model import flops
from jaxsp.planning import gpus, hlo
from jaxsp.planning.gpus import Ceilings
from jaxsp.planning.hlo import Collective, Instruction, Program
from jaxsp.training.microbatch import TEACHER_SCOPE
from jaxsp.training.specs import StepSpec

MATMULS = "matrix products"
MEMORY_BANDWIDTH = "memory bandwidth"
ATTENTION = "attention"
DELTA_NETS = "delta nets"
EXPOSED_COLLECTIVES = "waiting for collectives"
EXPOSED_HOST_COPIES = "waiting for copies from and to the host"
CAUSES = (
    *(MATMULS, MEMORY_BANDWIDTH, ATTENTION, DELTA_NETS),
    *(EXPOSED_COLLECTIVES, EXPOSED_HOST_COPIES),
)
"""Causes of a step's time; their seconds add up to it."""

HIDDEN_COLLECTIVES = "collectives that overlap kernels"
HIDDEN_HOST_COPIES = "host copies that overlap kernels"

LIKELY_RANGE = (1.0, 1.3)
"""Likely range of a measured step's time over its estimate.

Published runs of other systems with cuDNN's attention took 0.98 to 1.13 times the estimate. One on
H100s limited to 500 W, with another kernel, took 1.45 times (scripts/bench/LOG.md).
"""

_IN_DELTA_NET = re.compile(rf"\b{delta_net.SCOPE}\)*/")
"""Part of the names of a delta net's operations, also of those that JAX derives from them."""

_IN_TEACHER = re.compile(rf"\b{TEACHER_SCOPE}\)*/")
"""The same of a teacher's operations."""

_TERA = 1e12
_GIGA = 1e9
_MICRO = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Work and time of a step on each device."""

    hardware_flops: float
    """Operations of the compiled program, with recomputation; attention's backward pass as in
    flash attention."""
    host_copy_bytes: tuple[float, float]
    """Bytes from and to host memory."""
    seconds: Mapping[str, float]
    """Time by cause. CAUSES add up to step_s; HIDDEN_COLLECTIVES and HIDDEN_HOST_COPIES are not
    part of it."""
    step_s: float
    transfer_seconds: Mapping[int, tuple[float, float]]
    """Seconds of all runs of each collective and host copy, and those that no kernel overlaps, by
    the line number where it begins."""


def sum_transfers(
    seconds: Mapping[int, tuple[float, float]], lines: Iterable[int]
) -> tuple[float, float]:
    """Seconds of the transfers that begin in these lines, and those not overlapped.

    Args: seconds: see `TimeEstimate.transfer_seconds`.
    """
    totals = [seconds[line] for line in lines]
    return sum((total for total, _ in totals), 0.0), sum((waited for _, waited in totals), 0.0)


def make_segment_lengths(*, rows: int, row_tokens: int, document_tokens: int) -> np.ndarray:
    """Segment lengths of rows that are full of equal documents; the last one of a row is cut."""
    lengths = np.full(-(-row_tokens // document_tokens), document_tokens)
    lengths[-1] = row_tokens - lengths[:-1].sum()
    return np.tile(lengths, rows)


def estimate_step(
    spec: StepSpec,
    text: str,
    *,
    ceilings: Ceilings,
    node_devices: int,
    segment_lengths: np.ndarray,
) -> TimeEstimate | None:
    """Estimates a step over segments of these lengths, on nodes of `node_devices` devices.

    None if the dtype is not bfloat16, which the published rates are for.

    Args: text: of the compiled step.
    """
    if spec.dtype != jnp.bfloat16:
        return None
    compiled = hlo.parse(text)
    kernels = hlo.read_kernel_costs(text)
    sends = {
        collective.begin_line: _schedule_collective(collective, ceilings, node_devices)
        for collective in hlo.parse_collectives(text)
    }
    copies = {}
    for kernel in kernels:
        if copied := max(kernel.bytes_from_host, kernel.bytes_to_host):
            stream = "to host" if kernel.bytes_to_host == copied else "from host"
            copy_s = copied / (ceilings.host_gb_s * _GIGA)
            copies[kernel.begin_line] = ScheduledTransfer(
                stream, copy_s, kernel.begin_line, kernel.end_line
            )
    lines: dict[str, list[int]] = {MATMULS: [], MEMORY_BANDWIDTH: [], DELTA_NETS: []}
    kernel_s = {}
    for kernel in kernels:
        if kernel.begin_line in copies:
            continue
        cause = MATMULS if kernel.flops else MEMORY_BANDWIDTH
        if _IN_DELTA_NET.search(kernel.op_name):
            cause = DELTA_NETS
        lines[cause].append(kernel.line_number)
        kernel_s[kernel.line_number] = max(
            kernel.flops / (kernel.efficiency * ceilings.matmul_tflops * _TERA),
            kernel.device_bytes / (ceilings.memory_gb_s * _GIGA),
            kernel.min_s,
        )
    prefix = spec.attention.library_kernel.custom_call_prefix
    is_call = lambda line: line.is_key_loop or (bool(prefix) and line.calls(prefix))
    runs = hlo.count_runs(compiled, is_call, include_branches=True)
    forward_rate = ceilings.attention_forward_tflops
    library_rates = (forward_rate, ceilings.attention_backward_tflops, forward_rate)
    attention_s: dict[int, float] = {}
    attention_operations = 0.0
    for is_library in (True, False):
        for number, count in enumerate(_count_attention(spec, segment_lengths, is_library)):
            calls = {
                line: num_runs
                for line, num_runs in runs
                if line.is_key_loop != is_library and _find_pass(line.attributes) == number
            }
            attention_operations += count
            if not calls:
                continue
            rate = library_rates[number] * _TERA
            if not is_library:
                rate = _find_loop_rate(compiled, calls, ceilings)
            call_s = count / rate / sum(calls.values())  # they take equal times
            attention_s |= {line.line_number: call_s for line in calls}
    lines[ATTENTION] = [*attention_s]
    timeline = Timeline(compiled, kernel_s | attention_s, sends | copies)
    timeline.run(compiled.entry, runs=1)
    transfer_seconds = {
        line: (transfer.seconds * timeline.num_runs[line], timeline.exposed_s[line])
        for line, transfer in (sends | copies).items()
    }
    seconds = {
        cause: sum((timeline.kernel_seconds[line] for line in of_cause), start=0.0)
        for cause, of_cause in lines.items()
    }
    collectives_s, exposed_collectives_s = sum_transfers(transfer_seconds, sends)
    copies_s, exposed_copies_s = sum_transfers(transfer_seconds, copies)
    seconds |= {
        EXPOSED_COLLECTIVES: exposed_collectives_s,
        EXPOSED_HOST_COPIES: exposed_copies_s,
        HIDDEN_COLLECTIVES: collectives_s - exposed_collectives_s,
        HIDDEN_HOST_COPIES: copies_s - exposed_copies_s,
    }

    def sum_runs(field: str) -> float:
        return sum((kernel.num_runs * getattr(kernel, field) for kernel in kernels), start=0.0)

    return TimeEstimate(
        hardware_flops=sum_runs("flops") + attention_operations,
        host_copy_bytes=(sum_runs("bytes_from_host"), sum_runs("bytes_to_host")),
        seconds=seconds,
        step_s=timeline.seconds,
        transfer_seconds=transfer_seconds,
    )


def _count_attention(
    spec: StepSpec, segment_lengths: np.ndarray, is_library: bool
) -> tuple[float, float, float]:
    """Operations of a device in the layers whose attention a library computes, or in the others:
    forward, backward, and of a teacher."""

    def count(model: ModelConfig, choice: AttentionChoice) -> float:
        chosen = []
        for layer, score in zip(model.attention_layers, model.layer_scores, strict=True):
            kernel, _ = choice.find_kernel(score.heads)
            if bool(kernel.custom_call_prefix) == is_library:
                chosen.append(layer)
        layers = dataclasses.replace(model, layers=tuple(chosen))
        return flops.attention_flops(layers, segment_lengths) / spec.mesh.size

    forward = count(spec.model, spec.attention)
    num_forward = 1.0 + spec.scores_pairs_first
    if not spec.remat_policy.is_attention_saved:
        num_forward += 1 + spec.remat_policy.num_extra_passes(spec.model.num_layers)
    teacher = spec.teacher
    of_teacher = 0.0 if teacher is None else count(teacher.model, teacher.attention)
    # five products instead of two: the scores again, and both gradients of both products
    return num_forward * forward, 2.5 * forward, of_teacher


def _find_loop_rate(
    compiled: Program, loops: Mapping[Instruction, int], ceilings: Ceilings
) -> float:
    """Operations per second of the key loops of a pass, weighted by their numbers of runs. The
    kernels of an iteration follow one another, because the host waits for the loop's condition."""
    launch_us, _ = gpus.ASSUMED["all"]["key_loop_launch_us"]
    operations = seconds = 0.0
    for loop, num_runs in loops.items():
        for kernel in hlo.read_iteration(compiled, loop):
            operations += num_runs * kernel.flops
            seconds += num_runs * max(
                kernel.flops / (ceilings.matmul_tflops * _TERA),
                kernel.device_bytes / (ceilings.memory_gb_s * _GIGA),
                launch_us * _MICRO,
            )
    return operations / seconds


def _find_pass(attributes: str) -> int:
    """Pass of a call of attention's kernel: 0 forward, 1 backward, 2 of a teacher."""
    if _IN_TEACHER.search(attributes):
        return 2
    return int("Backward" in attributes or blockwise.BACKWARD_SCOPE in attributes)


# Schedule


class ScheduledTransfer(NamedTuple):
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


def _schedule_collective(
    collective: Collective, ceilings: Ceilings, node_devices: int
) -> ScheduledTransfer:
    """Schedules a collective on the stream of those that share its links: all inside a node, or
    all between nodes.

    It takes as long as its busiest device inside a node (NVLink) or its busiest network card, and
    the latency of its hops: see `attention/nodes.py`.
    """
    load = collective.find_load(node_devices)
    seconds = sum(collective.bytes_by_dtype.values()) * max(
        load.link / (ceilings.link_gb_s * _GIGA), load.network / (ceilings.network_gb_s * _GIGA)
    )
    if seconds:
        seconds += load.link_hops * ceilings.link_hop_us * _MICRO
        seconds += load.network_hops * ceilings.network_hop_us * _MICRO
    stream = "network" if load.network else "links"
    return ScheduledTransfer(stream, seconds, collective.begin_line, collective.end_line)


class _TransferRun(NamedTuple):
    """One run of a transfer. Times are in seconds from the beginning of the program."""

    begin_line: int
    begin_s: float
    end_s: float


class Timeline:
    """Clocks of all streams, in seconds from the beginning of the program, and sums over all
    runs."""

    def __init__(
        self,
        compiled: Program,
        kernels: Mapping[int, float],
        transfers: Mapping[int, ScheduledTransfer],
    ):
        """Args: kernels: seconds of one run of each, by line number. transfers: collectives and
        host copies, by the line number where they begin."""
        self._program = compiled
        self._kernels = kernels
        self._transfers = transfers
        self._transfers_by_end_line: dict[int, list[ScheduledTransfer]] = {}
        for transfer in transfers.values():
            self._transfers_by_end_line.setdefault(transfer.end_line, []).append(transfer)
        self._compute_free_s = 0.0
        """Time when the compute stream is free."""
        self._queues: dict[str, list[_TransferRun]] = collections.defaultdict(list)
        """Runs of each other stream, in order, except those that have ended."""
        self.kernel_seconds: dict[int, float] = collections.defaultdict(float)
        """Seconds of all runs of each kernel, by line number."""
        self.exposed_s: dict[int, float] = collections.defaultdict(float)
        """Seconds in which the compute stream waits while a transfer runs, by the line number where
        it begins. At most the transfer's own seconds."""
        self.num_runs: dict[int, float] = collections.defaultdict(float)
        """Runs of each transfer, by the line number where it begins."""

    @property
    def seconds(self) -> float:
        """Time when all streams are idle."""
        ends = [run.end_s for queue in self._queues.values() for run in queue]
        return max([self._compute_free_s, *ends])

    def run(self, computation: str, *, runs: int, fraction: float = 1.0) -> None:
        """Simulates a computation once, and counts it as `runs` executions.

        Args: fraction: fraction of the runs in which it is executed. Its times are multiplied by
            it, so that they are means.
        """
        for line in self._program.computations[computation].values():
            transfer = self._transfers.get(line.line_number)
            if transfer is not None:
                queue = self._queues[transfer.stream]
                begin = max([self._compute_free_s, *(run.end_s for run in queue)])
                queue.append(
                    _TransferRun(transfer.begin_line, begin, begin + fraction * transfer.seconds)
                )
                self.num_runs[transfer.begin_line] += runs * fraction
            for ended in self._transfers_by_end_line.get(line.line_number, ()):
                self._wait(ended, runs)
            if transfer is not None:
                continue
            if (seconds := self._kernels.get(line.line_number)) is not None:
                self._compute_free_s += seconds * fraction
                self.kernel_seconds[line.line_number] += seconds * fraction * runs
            if line.opcode == "while" and not line.is_key_loop:
                self._run_loop(line, runs, fraction)
                continue
            fractions = hlo.find_kind_fractions(line)
            if line.opcode == "conditional" and not fractions:
                fractions = {max(line.called_computations, key=self._simulate_branch): 1.0}
            elif line.opcode in ("call", "async-start"):
                fractions = dict.fromkeys(line.called_computations, 1.0)
            for called, part in fractions.items():
                if part:
                    self.run(called, runs=runs, fraction=fraction * part)

    def _wait(self, ended: ScheduledTransfer, runs: int) -> None:
        """Lets the compute stream wait for a transfer. Time in which an earlier one of its queue
        still runs counts for that one."""
        queue = self._queues[ended.stream]
        ends = [run.end_s for run in queue if run.begin_line == ended.begin_line]
        until = max([self._compute_free_s, *ends])
        for run in queue:
            waited = min(run.end_s, until) - max(run.begin_s, self._compute_free_s)
            self.exposed_s[run.begin_line] += max(0.0, waited) * runs
        self._compute_free_s = until
        self._queues[ended.stream] = [run for run in queue if run.end_s > until]

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
