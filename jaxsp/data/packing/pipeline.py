"""Feeds the steps: each process reads the shares of its own devices, ahead of the step that needs them."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

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
from jaxsp.data.packing.row_reader import DocumentOrigin, Documents, RowSlice
from jaxsp.runtime import device_mesh

BlockSpan = tuple[tuple[int, int], ...]
"""Begin and end of a block of a global array, per dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What a step consists of, over the whole mesh, known from the plan alone."""

    row_tokens: int
    """Length of its rows."""
    segment_lengths: np.ndarray
    num_rows: int
    """Rows with at least one piece."""
    epoch: int | None
    """Of the last of them, from 0; None where sources are mixed by weight."""
    tokens_per_source: tuple[int, ...]
    imbalance: float
    """Attention work (sum of squared piece lengths) of the group that has most, over the groups' mean; turn by turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """A step's blocks for this process's devices, by Batch field and span, each once however many devices hold it."""

    blocks: dict[str, dict[BlockSpan, np.ndarray]]
    counts: StepCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """What is dealt to one group for one turn."""

    microbatch: int
    group: int
    devices: tuple[int, ...]
    processes: tuple[int, ...]
    rows: tuple[int | None, ...]
    """By their numbers in the sequence of rows of this length; None for an empty one."""
    num_segments: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSegment:
    """A document, or a part of one, in a step."""

    row_index: int
    """By its number in the sequence of rows of this length."""
    origin: DocumentOrigin
    offset: int
    """The first of the document's tokens that are in it."""
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StepShape:
    """The arrays of steps with rows of one length."""

    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int
    shapes: dict[str, tuple[int, int, int]]
    """[turns, B, L] and [turns, B, M]."""


class BatchLoader:
    """The steps of a schedule, any of them by its index.

    A step's rows are sorted by attention work and dealt to the groups in turn (`batch.row_of_step`), so that groups that
    wait for each other have rows of similar work; a group's devices hold the shares of its rows, in the layout that attention
    asks for. Which rows a step has depends on the schedule alone.
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
        self._layout_degree = layout_degree
        self._documents, self._streams, self._schedule, self._mesh = (
            documents,
            streams,
            schedule,
            mesh,
        )
        self._num_groups, self._max_segments = (
            device_mesh.num_groups(mesh),
            config.data.max_segments_per_row,
        )
        self._specs = SPECS | ({"weights_BL": PER_TOKEN} if documents.has_weights else {})
        self._shardings = {name: NamedSharding(mesh, spec) for name, spec in self._specs.items()}
        self._step_shapes = [
            self._make_step_shape(config.with_row_tokens(stream.row_tokens)) for stream in streams
        ]
        self.num_steps = len(schedule)

    def _make_step_shape(self, config: Config) -> _StepShape:
        row_tokens, rows_per_microbatch = (
            config.data.max_row_tokens,
            config.batch.rows_per_microbatch,
        )
        slots = self._num_groups * rows_per_microbatch
        turns = num_microbatches(
            rows_per_step=config.batch.rows_per_step, global_microbatch_rows=slots
        )
        widths = {PER_TOKEN: row_tokens, PER_ROW: self._max_segments}
        return _StepShape(
            row_tokens=row_tokens,
            rows_per_step=config.batch.rows_per_step,
            rows_per_microbatch=rows_per_microbatch,
            shapes={name: (turns, slots, widths[spec]) for name, spec in self._specs.items()},
        )

    def read_step(self, step: int) -> HostBatch:
        """What this process needs of a step."""
        form, dealt, step_rows = self._sort_rows(step)
        chosen = self._schedule.step_rows(step)
        stream = self._streams[chosen.stream_index]
        documents = np.concatenate([row.document for row in step_rows])
        piece_lengths = np.concatenate([row.length for row in step_rows])
        tokens = np.bincount(
            self._documents.find_sources(documents),
            piece_lengths,
            minlength=len(self._documents.sources),
        )
        counts = StepCounts(
            row_tokens=form.row_tokens,
            segment_lengths=piece_lengths,
            num_rows=len([index for index in dealt if index is not None]),
            epoch=stream.find_epoch(chosen.first_row + chosen.num_rows - 1),
            tokens_per_source=tuple(tokens.astype(int).tolist()),
            imbalance=self._compute_imbalance(form, step_rows),
        )
        names = tuple(name for name, spec in self._specs.items() if spec == PER_TOKEN)
        per_token = self._read_blocks(
            form, step_rows, names, functools.partial(self._read_slice, form)
        )
        per_row = self._read_blocks(
            form,
            step_rows,
            ("starts_BM", "lengths_BM"),
            lambda row, *_: row_reader.make_slots(row, self._max_segments),
        )
        return HostBatch(blocks=per_token | per_row, counts=counts)

    def assign_rows(self, step: int) -> list[Assignment]:
        """Who gets which rows of a step, turn by turn."""
        form, dealt, step_rows = self._sort_rows(step)
        turns, _, _ = form.shapes["tokens_BL"]
        groups = self._mesh.devices.reshape(self._num_groups, -1)
        hands = []
        for turn, group in itertools.product(range(turns), range(self._num_groups)):
            places = [
                self._row_index(form, turn, slot)
                for slot in range(
                    group * form.rows_per_microbatch, (group + 1) * form.rows_per_microbatch
                )
            ]
            hands.append(
                Assignment(
                    microbatch=turn,
                    group=group,
                    devices=tuple(device.id for device in groups[group]),
                    processes=tuple(sorted({device.process_index for device in groups[group]})),
                    rows=tuple(dealt[place] for place in places),
                    num_segments=sum(len(step_rows[place].length) for place in places),
                    num_tokens=sum(int(step_rows[place].length.sum()) for place in places),
                )
            )
        return hands

    def row_tokens(self, step: int) -> int:
        """Length of a step's rows."""
        return self._step_shapes[self._schedule.step_rows(step).stream_index].row_tokens

    def list_segments(self, step: int) -> list[StepSegment]:
        """What a step learns from, row by row in the data's order: the same on every mesh."""
        _, dealt, step_rows = self._sort_rows(step)
        in_order = sorted(
            (number, row)
            for number, row in zip(dealt, step_rows, strict=True)
            if number is not None
        )
        return [
            StepSegment(
                row_index=number,
                origin=self._documents.find_origin(document),
                offset=first,
                num_tokens=num_tokens,
            )
            for number, row in in_order
            for document, first, num_tokens in zip(
                *(x.tolist() for x in (row.document, row.offset, row.length)), strict=True
            )
        ]

    def batches(self) -> Generator[tuple[Batch, StepCounts]]:
        """The steps in order; the next two are read while one is used.

        Ask for the next batch when a step is dispatched and before its numbers are fetched: it then travels to the
        devices while the step runs. An exception in a read is raised here and ends the iteration.
        """
        steps = iter(
            _StepDataset(self).to_iter_dataset(
                grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
            )
        )
        with contextlib.closing(steps):
            for host in steps:
                form = next(
                    form for form in self._step_shapes if form.row_tokens == host.counts.row_tokens
                )
                arrays = {
                    name: self._put_on_devices(form.shapes[name], name, blocks)
                    for name, blocks in host.blocks.items()
                }
                yield Batch(**arrays), host.counts

    def _put_on_devices(
        self, shape: tuple[int, int, int], name: str, blocks: dict[BlockSpan, np.ndarray]
    ) -> jax.Array:
        return jax.make_array_from_callback(
            shape, self._shardings[name], lambda index: blocks[_to_span(index, shape)]
        )

    def _sort_rows(self, step: int) -> tuple[_StepShape, list[int | None], list[PackedRow]]:
        """A step's rows in the order in which they are dealt, with their numbers; the most work first, empty ones last."""
        number, first, num_rows = self._schedule.step_rows(step)
        form, stream = self._step_shapes[number], self._streams[number]
        found = [stream.row(first + place) for place in range(num_rows)]
        order = sorted(range(len(found)), key=lambda place: -_attention_work(found[place]))
        empty = form.rows_per_step - len(found)
        dealt = [first + place for place in order] + [None] * empty
        return form, dealt, [found[place] for place in order] + [packing.EMPTY_ROW] * empty

    def _compute_imbalance(self, form: _StepShape, step_rows: Sequence[PackedRow]) -> float:
        turns, slots, _ = form.shapes["tokens_BL"]
        work = np.array(
            [
                [
                    _attention_work(step_rows[self._row_index(form, turn, slot)])
                    for slot in range(slots)
                ]
                for turn in range(turns)
            ]
        )
        of_groups = work.reshape(turns, self._num_groups, form.rows_per_microbatch).sum(-1)
        return float(of_groups.max(1).sum() / of_groups.mean(1).sum())

    def _read_blocks(
        self,
        form: _StepShape,
        step_rows: list[PackedRow],
        names: tuple[str, ...],
        part: Callable[[PackedRow, int, int], Any],
    ) -> dict[str, dict[BlockSpan, np.ndarray]]:
        """The blocks of arrays that are split alike, from the part that `part` reads of each row."""
        blocks: dict[str, dict[BlockSpan, np.ndarray]] = {name: {} for name in names}
        for span in self._local_spans(names[0], form.shapes[names[0]]):
            turns, slots, (begin, end) = span
            parts = [
                [
                    part(step_rows[self._row_index(form, turn, slot)], begin, end)
                    for slot in range(*slots)
                ]
                for turn in range(*turns)
            ]
            for name in names:
                field = name.split("_")[0]  # Batch's name without the dims
                blocks[name][span] = np.array(
                    [[getattr(one, field) for one in turn] for turn in parts]
                )
        return blocks

    def _read_slice(self, form: _StepShape, row: PackedRow, begin: int, end: int) -> RowSlice:
        """What lies in a row's places from `begin` to `end`."""
        spans = layout.spans(begin, end, row_tokens=form.row_tokens, degree=self._layout_degree)
        return row_reader.concatenate_slices(
            [self._documents.read_slice(row, *span) for span in spans]
        )

    def _row_index(self, form: _StepShape, turn: int, slot: int) -> int:
        return step_row_index(
            turn, slot, num_groups=self._num_groups, rows_per_microbatch=form.rows_per_microbatch
        )

    def _local_spans(self, name: str, shape: tuple[int, int, int]) -> list[BlockSpan]:
        """The different blocks of an array that this process's devices hold."""
        held = self._shardings[name].addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(_to_span(index, shape) for index in held))


class _StepDataset(grain.MapDataset[HostBatch]):
    """The door to grain's prefetch thread: element k is step k."""

    def __init__(self, pipeline: BatchLoader):
        super().__init__()
        self._pipeline = pipeline

    def __len__(self) -> int:
        return self._pipeline.num_steps

    def __getitem__(self, index: Any) -> Any:
        return self._pipeline.read_step(index)


def _to_span(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> BlockSpan:
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _attention_work(row: PackedRow) -> int:
    """What attention costs: the sum of the squared lengths of the pieces, which see nothing but themselves."""
    return int(np.sum(row.length.astype(np.int64) ** 2))
