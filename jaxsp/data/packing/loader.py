"""Loads the batches of a schedule: each process reads its own devices' shards, ahead of use."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxsp.config.schema import Config
from jaxsp.core import layout
from jaxsp.core.batch import PER_ROW, PER_TOKEN, SPECS, Batch, num_microbatches, step_row_index
from jaxsp.data.packing import packing, row_reader
from jaxsp.data.packing.mixing import RowSchedule, RowStream
from jaxsp.data.packing.packing import PackedRow
from jaxsp.data.packing.row_reader import Documents, RowSlice
from jaxsp.data.packing.step_records import (
    Assignment,
    BlockSpan,
    HostBatch,
    StepCounts,
    StepSegment,
)
from jaxsp.runtime import device_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StepShape:
    """Array shapes of steps with rows of one length."""

    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int
    shapes: dict[str, tuple[int, int, int]]
    """[microbatches, B, L] or [microbatches, B, M] of each Batch field."""

    @property
    def num_microbatches(self) -> int:
        return self.shapes["tokens_BL"][0]

    @property
    def num_slots(self) -> int:
        """Number of rows in a microbatch over the whole mesh."""
        return self.shapes["tokens_BL"][1]


class _SortedRows(NamedTuple):
    """A step's rows, sorted for the groups: the most attention work first, empty rows last."""

    shape: _StepShape
    indices: list[int | None]
    """Indices in the sequence of rows of this length; None for an empty row."""
    rows: list[PackedRow]


class BatchLoader:
    """Batches of a schedule; any step can be read by its index.

    A step's rows are sorted by attention work and dealt to the groups in rotation
    (`batch.step_row_index`), so that groups that wait for each other have rows of similar work.
    Within a group, each device holds its shard of every row, in the layout that attention requires.
    Which rows a step has depends on the schedule only.
    """

    def __init__(
        self,
        documents: Documents,
        streams: Sequence[RowStream],
        schedule: RowSchedule,
        *,
        mesh: jax.sharding.Mesh,
        config: Config,
        layout_degree: int,
    ):
        self._documents = documents
        self._streams = streams
        self._schedule = schedule
        self._mesh = mesh
        self._layout_degree = layout_degree
        self._num_groups = device_mesh.num_groups(mesh)
        self._max_segments = config.data.max_segments_per_row
        self._specs = dict(SPECS)
        if documents.has_weights:
            self._specs["weights_BL"] = PER_TOKEN
        self._shardings = {name: NamedSharding(mesh, spec) for name, spec in self._specs.items()}
        self._step_shapes = [
            self._make_step_shape(config.with_row_tokens(stream.row_tokens)) for stream in streams
        ]
        self.num_steps = len(schedule)

    def _make_step_shape(self, config: Config) -> _StepShape:
        rows_per_step = config.batch.rows_per_step
        num_slots = self._num_groups * config.batch.rows_per_microbatch
        microbatches = num_microbatches(
            rows_per_step=rows_per_step, global_microbatch_rows=num_slots
        )
        widths = {PER_TOKEN: config.data.max_row_tokens, PER_ROW: self._max_segments}
        return _StepShape(
            row_tokens=config.data.max_row_tokens,
            rows_per_step=rows_per_step,
            rows_per_microbatch=config.batch.rows_per_microbatch,
            shapes={
                name: (microbatches, num_slots, widths[spec]) for name, spec in self._specs.items()
            },
        )

    def read_step(self, step: int) -> HostBatch:
        """Reads the blocks of a step for this process's devices."""
        sorted_rows = self._sort_rows(step)
        token_fields = tuple(name for name, spec in self._specs.items() if spec == PER_TOKEN)
        read_slice = functools.partial(self._read_slice, sorted_rows.shape.row_tokens)
        per_token = self._read_blocks(sorted_rows, token_fields, read_slice)
        per_row = self._read_blocks(
            sorted_rows,
            ("starts_BM", "lengths_BM"),
            lambda row, *_: row_reader.make_slots(row, self._max_segments),
        )
        return HostBatch(blocks=per_token | per_row, counts=self._count_step(step, sorted_rows))

    def _count_step(self, step: int, sorted_rows: _SortedRows) -> StepCounts:
        step_rows = self._schedule.step_rows(step)
        stream = self._streams[step_rows.stream_index]
        documents = np.concatenate([row.document for row in sorted_rows.rows])
        segment_lengths = np.concatenate([row.length for row in sorted_rows.rows])
        tokens_per_source = np.bincount(
            self._documents.find_sources(documents),
            segment_lengths,
            minlength=len(self._documents.sources),
        )
        return StepCounts(
            row_tokens=sorted_rows.shape.row_tokens,
            segment_lengths=segment_lengths,
            num_rows=step_rows.num_rows,
            epoch=stream.find_epoch(step_rows.first_row + step_rows.num_rows - 1),
            tokens_per_source=tuple(tokens_per_source.astype(int).tolist()),
            imbalance=self._compute_imbalance(sorted_rows),
        )

    def assign_rows(self, step: int) -> list[Assignment]:
        """Returns the rows of each group in each microbatch of a step."""
        shape, indices, rows = self._sort_rows(step)
        devices_of_group = self._mesh.devices.reshape(self._num_groups, -1)
        assignments = []
        for microbatch, group in itertools.product(
            range(shape.num_microbatches), range(self._num_groups)
        ):
            first_slot = group * shape.rows_per_microbatch
            places = [
                self._row_index(shape, microbatch, slot)
                for slot in range(first_slot, first_slot + shape.rows_per_microbatch)
            ]
            devices = devices_of_group[group]
            assignments.append(
                Assignment(
                    microbatch=microbatch,
                    group=group,
                    devices=tuple(device.id for device in devices),
                    processes=tuple(sorted({device.process_index for device in devices})),
                    rows=tuple(indices[place] for place in places),
                    num_segments=sum(len(rows[place].length) for place in places),
                    num_tokens=sum(int(rows[place].length.sum()) for place in places),
                )
            )
        return assignments

    def row_tokens(self, step: int) -> int:
        """Length of a step's rows."""
        return self._step_shapes[self._schedule.step_rows(step).stream_index].row_tokens

    def list_segments(self, step: int) -> list[StepSegment]:
        """Returns the segments of a step in the order of its rows: the same on every mesh."""
        step_rows = self._schedule.step_rows(step)
        stream = self._streams[step_rows.stream_index]
        segments = []
        for row_index in range(step_rows.first_row, step_rows.first_row + step_rows.num_rows):
            row = stream.row(row_index)
            arrays = (row.document.tolist(), row.offset.tolist(), row.length.tolist())
            for document, offset, num_tokens in zip(*arrays, strict=True):
                segments.append(
                    StepSegment(
                        row_index=row_index,
                        origin=self._documents.find_origin(document),
                        offset=offset,
                        num_tokens=num_tokens,
                    )
                )
        return segments

    def batches(self) -> Generator[tuple[Batch, StepCounts]]:
        """Yields the steps in order; the next two are read while one is used.

        Request the next batch when a step is dispatched and before its metrics are fetched. It is
        then copied to the devices while the step runs. An exception in a read is raised here and
        ends the iteration.
        """
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        steps = iter(_StepDataset(self).to_iter_dataset(options))
        shapes = {shape.row_tokens: shape.shapes for shape in self._step_shapes}
        with contextlib.closing(steps):
            for host_batch in steps:
                step_shapes = shapes[host_batch.counts.row_tokens]
                arrays = {
                    name: self._put_on_devices(step_shapes[name], name, blocks)
                    for name, blocks in host_batch.blocks.items()
                }
                yield Batch(**arrays), host_batch.counts

    def _put_on_devices(
        self, shape: tuple[int, int, int], name: str, blocks: dict[BlockSpan, np.ndarray]
    ) -> jax.Array:
        return jax.make_array_from_callback(
            shape, self._shardings[name], lambda index: blocks[_to_span(index, shape)]
        )

    def _sort_rows(self, step: int) -> _SortedRows:
        stream_index, first_row, num_rows = self._schedule.step_rows(step)
        shape = self._step_shapes[stream_index]
        stream = self._streams[stream_index]
        rows = [stream.row(first_row + place) for place in range(num_rows)]
        order = sorted(range(num_rows), key=lambda place: -_attention_work(rows[place]))
        num_empty = shape.rows_per_step - num_rows
        return _SortedRows(
            shape,
            [first_row + place for place in order] + [None] * num_empty,
            [rows[place] for place in order] + [packing.EMPTY_ROW] * num_empty,
        )

    def _compute_imbalance(self, sorted_rows: _SortedRows) -> float:
        shape, _, rows = sorted_rows
        places = [
            self._row_index(shape, microbatch, slot)
            for microbatch in range(shape.num_microbatches)
            for slot in range(shape.num_slots)
        ]
        work = np.array([_attention_work(rows[place]) for place in places])
        by_group = work.reshape(
            shape.num_microbatches, self._num_groups, shape.rows_per_microbatch
        ).sum(-1)
        return float(by_group.max(1).sum() / by_group.mean(1).sum())

    def _read_blocks(
        self,
        sorted_rows: _SortedRows,
        names: tuple[str, ...],
        read_part: Callable[[PackedRow, int, int], Any],
    ) -> dict[str, dict[BlockSpan, np.ndarray]]:
        """Blocks of Batch fields that are sharded alike.

        Args:
            read_part: reads the fields of a row from `begin` to `end`.
        """
        shape, _, rows = sorted_rows
        blocks: dict[str, dict[BlockSpan, np.ndarray]] = {name: {} for name in names}
        for span in self._local_spans(names[0], shape.shapes[names[0]]):
            microbatches, slots, (begin, end) = span
            parts = [
                [
                    read_part(rows[self._row_index(shape, microbatch, slot)], begin, end)
                    for slot in range(*slots)
                ]
                for microbatch in range(*microbatches)
            ]
            for name in names:
                attribute = name.split("_")[0]  # the Batch field without its dims
                blocks[name][span] = np.array(
                    [[getattr(part, attribute) for part in row_parts] for row_parts in parts]
                )
        return blocks

    def _read_slice(self, row_tokens: int, row: PackedRow, begin: int, end: int) -> RowSlice:
        """Reads the places `begin` to `end` of a row in the layout that attention requires."""
        spans = layout.spans(begin, end, row_tokens=row_tokens, degree=self._layout_degree)
        return row_reader.concatenate_slices(
            [self._documents.read_slice(row, *span) for span in spans]
        )

    def _row_index(self, shape: _StepShape, microbatch: int, slot: int) -> int:
        return step_row_index(
            microbatch,
            slot,
            num_groups=self._num_groups,
            rows_per_microbatch=shape.rows_per_microbatch,
        )

    def _local_spans(self, name: str, shape: tuple[int, int, int]) -> list[BlockSpan]:
        """Distinct blocks of an array on this process's devices."""
        indices = self._shardings[name].addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(_to_span(index, shape) for index in indices))


class _StepDataset(grain.MapDataset[HostBatch]):
    """Adapter for grain's prefetch thread: element k is step k."""

    def __init__(self, loader: BatchLoader):
        super().__init__()
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.num_steps

    def __getitem__(self, index: Any) -> Any:
        return self._loader.read_step(index)


def _to_span(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> BlockSpan:
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _attention_work(row: PackedRow) -> int:
    """Attention work of a row: the sum of the squared segment lengths."""
    return int(np.sum(row.length.astype(np.int64) ** 2))
