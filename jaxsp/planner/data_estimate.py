"""Estimates of a compiled step for the rows of a config's own data."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxsp.attention import RING_HOPS_SCOPE
from jaxsp.model import flops
from jaxsp.planner import data_rows
from jaxsp.planner.compile.compiled import PlannedStep
from jaxsp.planner.cost import comms, roofline
from jaxsp.planner.cost.comms import Collective
from jaxsp.planner.cost.roofline import StepEstimator, TimeEstimate
from jaxsp.planner.data_rows import DataRows, LengthData, StepBalance
from jaxsp.runtime import device_mesh

_NUM_GROUPS = 4
"""Groups of similar steps; each is simulated with the mean of its work. Between such steps, time
grows nearly in proportion to the work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataEstimate:
    """Rows of one length in an epoch of the data, and means over a sample of their steps."""

    num_rows: int
    num_steps: int
    num_tokens: float
    """Tokens of documents, without padding."""
    padding_fraction: float
    segments_per_row: float
    num_sampled_steps: int
    imbalance: float
    """Attention work of the slowest devices over the mean: `attention_imbalance` of training."""
    needed_hops: float | None
    """Fraction of the hops of a ring that some document needs; None without a ring."""
    made_hops: float | None
    """Fraction of the hops of a ring that a run makes; None without a ring."""
    unsent_bytes: float
    """Bytes of the compiled program that a device does not send in a step, for hops not made."""
    unpacked_steps: int | None
    """Steps of an epoch with one document per row: each in the shortest row that holds it. None if
    sources are mixed by weight."""
    unpacked_tokens: float | None
    """Tokens of those steps without padding."""
    unpacked_step_s: float | None
    """Estimated time of such a step, with this compiled program; None without an estimate."""

    @property
    def period(self) -> str:
        """Period of the rows: sources that are mixed by weight have no epoch."""
        return "the run" if self.unpacked_steps is None else "an epoch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """Attention of one step."""

    forward_flops: float
    balance: StepBalance


def estimate_data(
    step: PlannedStep,
    collectives: list[Collective],
    data: LengthData,
    estimator: StepEstimator | None,
) -> tuple[DataEstimate, float, TimeEstimate | None]:
    """Estimates a step for real rows.

    Returns: the estimate, the operations that a step needs as for MFU, and its time.
    """
    packed = data.packed
    works = _find_work(step, packed)
    mean = data_rows.average_balance([work.balance for work in works])
    ring_bytes = comms.sum_bytes(collectives, scope=RING_HOPS_SCOPE)
    has_ring = ring_bytes > 0
    time = None if estimator is None else _average_time(estimator, works, has_ring=has_ring)
    unpacked = data.unpacked
    unpacked_step_s = None
    if estimator is not None and unpacked is not None:
        alone = _find_work(step, unpacked)
        unpacked_step_s = _average_time(estimator, alone, has_ring=has_ring).step_s
    program = step.program
    step_flops = [
        flops.step_flops(program.model, _segment_lengths(rows), program.table)
        for rows in packed.steps
    ]
    estimate = DataEstimate(
        num_rows=packed.num_rows,
        num_steps=packed.num_steps,
        num_tokens=packed.num_tokens,
        padding_fraction=packed.padding_fraction,
        segments_per_row=packed.segments_per_row,
        num_sampled_steps=len(packed.steps),
        imbalance=mean.imbalance,
        needed_hops=mean.needed_hops if has_ring else None,
        made_hops=mean.made_hops if has_ring else None,
        unsent_bytes=(1 - mean.made_hops) * ring_bytes,
        unpacked_steps=None if unpacked is None else unpacked.num_steps,
        unpacked_tokens=None if unpacked is None else unpacked.num_tokens,
        unpacked_step_s=unpacked_step_s,
    )
    return estimate, float(np.mean(step_flops)), time


def _segment_lengths(rows: Sequence[data_rows.PackedRow]) -> np.ndarray:
    """Lengths of all segments of a step."""
    return np.concatenate([row.length for row in rows])


def _find_work(step: PlannedStep, rows: DataRows) -> list[StepWork]:
    """Finds the work of each sampled step, with the step's mesh and layout."""
    program = step.program
    return [
        StepWork(
            forward_flops=flops.attention_flops(program.model, _segment_lengths(step_rows)),
            balance=data_rows.compute_balance(
                step_rows,
                row_tokens=rows.row_tokens,
                config=program.config.batch,
                num_groups=device_mesh.num_groups(program.mesh),
                layout=step.choice.strategy.layout,
                has_ring_steps=step.choice.strategy.tokens.has_ring_steps,
            ),
        )
        for step_rows in rows.steps
    ]


def _average_time(
    estimator: StepEstimator, works: Sequence[StepWork], *, has_ring: bool
) -> TimeEstimate:
    """Estimates the mean time of steps."""
    ordered = sorted(works, key=lambda work: work.forward_flops)
    estimates = []
    counts = []
    for indices in np.array_split(np.arange(len(ordered)), min(_NUM_GROUPS, len(ordered))):
        group = [ordered[index] for index in indices]
        forward = np.array([work.forward_flops for work in group])
        imbalance = np.array([work.balance.imbalance for work in group])
        made_hops = data_rows.average_balance([work.balance for work in group]).made_hops
        total = forward.sum()
        estimates.append(
            estimator.estimate(
                float(forward.mean()),
                imbalance=float((imbalance * forward).sum() / total) if total else 1.0,
                hops_fraction=made_hops if has_ring else 1.0,
            )
        )
        counts.append(len(group))
    return roofline.average_estimates(estimates, counts)
