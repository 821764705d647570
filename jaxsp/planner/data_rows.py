"""Rows of a config's own data: their number in an epoch, and a sample of its steps."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxsp.attention import ring_hops
from jaxsp.config.data_schema import BatchConfig
from jaxsp.config.schema import Config
from jaxsp.core import balance
from jaxsp.core.layout import Layout
from jaxsp.data.packing import loader, packing
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule, RowStream
from jaxsp.data.packing.packing import PackedRow

MAX_SAMPLED_STEPS = 64
"""Number of steps of each row length that estimates are means over, spread over the epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRows:
    """Rows of one length in an epoch, and some of its steps."""

    row_tokens: int
    num_rows: int
    num_steps: int
    num_tokens: float
    """Tokens of documents, without padding."""
    num_segments: float
    steps: tuple[tuple[PackedRow, ...], ...]
    """Rows of the sampled steps. The last step of an epoch may have fewer rows than others."""

    @property
    def padding_fraction(self) -> float:
        """Fraction of the rows' tokens that is padding."""
        return 1 - self.num_tokens / (self.num_rows * self.row_tokens)

    @property
    def segments_per_row(self) -> float:
        return self.num_segments / self.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthData:
    """Rows of one length as training packs them, and with one document in each."""

    packed: DataRows
    unpacked: DataRows | None
    """The same documents, one per row: the shortest row that holds it. None if sources are mixed
    by weight; documents that are repeated do not count twice."""


def read_rows(data: PackedDataset, config: Config) -> dict[int, LengthData]:
    """Reads the rows of each length that the documents need, the shortest first.

    An epoch is a pass over all documents. With sources that are mixed by weight it is the run.
    """
    if data.source_weights is None:
        schedule = data.make_schedule(config, epochs=1)
    else:
        schedule = data.make_schedule(config, num_steps=config.run.steps)
    unpacked: dict[int, DataRows] = {}
    if data.source_weights is None:
        unpacked = _unpack(data, config)
    return {
        stream.row_tokens: LengthData(
            packed=_read_stream(data, stream, schedule, index),
            unpacked=unpacked.get(stream.row_tokens),
        )
        for index, stream in enumerate(data.streams)
        if _find_steps(schedule, index).size
    }


def _find_steps(schedule: RowSchedule, stream_index: int) -> np.ndarray:
    """Steps of a schedule with rows of a stream."""
    if schedule.stream_of_step is None:
        return np.arange(schedule.num_steps)
    return np.flatnonzero(schedule.stream_of_step == stream_index)


def _read_stream(
    data: PackedDataset, stream: RowStream, schedule: RowSchedule, index: int
) -> DataRows:
    found = _find_steps(schedule, index)
    steps = []
    for step in found[_spread(len(found))].tolist():
        step_rows = schedule.step_rows(step)
        last = step_rows.first_row + step_rows.num_rows
        steps.append(tuple(stream.row(row) for row in range(step_rows.first_row, last)))
    num_rows = schedule.rows_consumed(schedule.num_steps)[index]
    if data.source_weights is None:
        plan = stream.parts[0].plan_epoch(0)
        num_tokens = float(plan.length.sum())
        num_segments = float(len(plan.length))
    else:
        sampled = [row for rows in steps for row in rows]
        factor = num_rows / len(sampled)
        num_tokens = factor * sum(int(row.length.sum()) for row in sampled)
        num_segments = factor * sum(len(row.length) for row in sampled)
    return DataRows(
        row_tokens=stream.row_tokens,
        num_rows=num_rows,
        num_steps=len(found),
        num_tokens=num_tokens,
        num_segments=num_segments,
        steps=tuple(steps),
    )


def _spread(count: int) -> np.ndarray:
    """Indices of at most MAX_SAMPLED_STEPS of `count` steps, at equal distances."""
    if count <= MAX_SAMPLED_STEPS:
        return np.arange(count)
    return np.linspace(0, count - 1, MAX_SAMPLED_STEPS).round().astype(int)


def _unpack(data: PackedDataset, config: Config) -> dict[int, DataRows]:
    """Puts each document, or each segment of one that is longer than all rows, into its own row."""
    row_lengths = [stream.row_tokens for stream in data.streams]
    segments = data.documents.segments.length
    segments = np.random.default_rng(config.run.seed).permutation(segments)
    length_index = np.searchsorted(row_lengths, segments)
    unpacked = {}
    for index, row_tokens in enumerate(row_lengths):
        chosen = segments[length_index == index]
        if not len(chosen):
            continue
        rows_per_step = config.with_row_tokens(row_tokens).batch.rows_per_step
        num_steps = -(-len(chosen) // rows_per_step)
        unpacked[row_tokens] = DataRows(
            row_tokens=row_tokens,
            num_rows=len(chosen),
            num_steps=num_steps,
            num_tokens=float(chosen.sum()),
            num_segments=float(len(chosen)),
            steps=tuple(
                _make_single_rows(chosen[step * rows_per_step : (step + 1) * rows_per_step])
                for step in _spread(num_steps).tolist()
            ),
        )
    return unpacked


def _make_single_rows(lengths: np.ndarray) -> tuple[PackedRow, ...]:
    """Makes rows of one segment each."""
    zero = np.zeros(1, np.int32)
    return tuple(
        PackedRow(document=zero, offset=zero, length=np.array([length])) for length in lengths
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBalance:
    """Attention work of a step's devices."""

    imbalance: float
    """Work of the slowest devices over the mean, as `attention_imbalance` of metrics.jsonl."""
    needed_hops: float
    """Fraction of the hops of a ring that some document needs: mean of the microbatches."""
    made_hops: float
    """Fraction of the hops of a ring that are made: all hops if one of them is far."""


def compute_balance(
    rows: Sequence[PackedRow],
    *,
    row_tokens: int,
    config: BatchConfig,
    num_groups: int,
    layout: Layout,
    has_ring_steps: bool,
) -> StepBalance:
    """Computes the balance of a step whose rows are dealt to groups as the loader deals them."""
    places = loader.find_places(config, num_groups)
    ordered = sorted(rows, key=lambda row: -loader.attention_work(row))
    ordered += [packing.EMPTY_ROW] * (places.size - len(ordered))
    work = np.array(
        [
            balance.count_row_work(row.starts, row.length, row_tokens=row_tokens, layout=layout)
            for row in ordered
        ]
    )
    work = loader.split_by_group(work[places], num_groups).sum(2)
    needed = [balance.count_needed_hops(microbatch) for microbatch in work]
    made = [_count_made_hops(microbatch, layout) for microbatch in work]
    max_hops = max(1, layout.degree - 1)
    return StepBalance(
        imbalance=balance.compute_imbalance(work, has_ring_steps=has_ring_steps),
        needed_hops=float(np.mean(needed)) / max_hops,
        made_hops=float(np.mean(made)) / max_hops,
    )


def _count_made_hops(work: np.ndarray, layout: Layout) -> int:
    """Number of hops that a ring makes for a microbatch.

    Args: work: [groups, steps, devices].
    """
    num_needed = balance.count_needed_hops(work)
    if layout.keeps_order:
        return num_needed
    near = ring_hops.near_hops(layout.degree)
    num_near = int(np.count_nonzero(work.sum((0, 2))[near]))
    return num_needed if num_needed == num_near else layout.degree - 1


def average_balance(balances: Sequence[StepBalance]) -> StepBalance:
    """Averages the balance of several steps."""
    fields = [field.name for field in dataclasses.fields(StepBalance)]
    return StepBalance(
        **{field: float(np.mean([getattr(step, field) for step in balances])) for field in fields}
    )
