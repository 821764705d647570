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

from jaxsp.config import schema
from jaxsp.core import batch, layout
from jaxsp.data.packing import mixing, packing, row_reader
from jaxsp.runtime import device_mesh

Span = tuple[tuple[int, int], ...]
"""Begin and end of a block of a global array, per dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a step consists of, over the whole mesh, known from the plan alone."""

    row_tokens: int
    """Length of its rows."""
    piece_lengths: np.ndarray
    num_rows: int
    """Rows with at least one piece."""
    epoch: int | None
    """Of the last of them, from 0; None where sources are mixed by weight."""
    tokens_of_sources: tuple[int, ...]
    imbalance: float
    """Attention work (sum of squared piece lengths) of the group that has most, over the groups' mean; turn by turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step's blocks for this process's devices, by Batch field and span, each once however many devices hold it."""

    blocks: dict[str, dict[Span, np.ndarray]]
    counts: Counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hand:
    """What is dealt to one group for one turn."""

    turn: int
    group: int
    devices: tuple[int, ...]
    processes: tuple[int, ...]
    rows: tuple[int | None, ...]
    """By their numbers in the sequence of rows of this length; None for an empty one."""
    num_pieces: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A document, or a part of one, in a step."""

    row: int
    """By its number in the sequence of rows of this length."""
    origin: row_reader.Origin
    first: int
    """The first of the document's tokens that are in it."""
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Form:
    """The arrays of steps with rows of one length."""

    row_tokens: int
    rows_per_step: int
    rows_at_once: int
    shapes: dict[str, tuple[int, int, int]]
    """[turns, B, L] and [turns, B, M]."""


class Pipeline:
    """The steps of a schedule, any of them by its index.

    A step's rows are sorted by attention work and dealt to the groups in turn (`batch.row_of_step`), so that groups that
    wait for each other have rows of similar work; a group's devices hold the shares of its rows, in the layout that attention
    asks for. Which rows a step has depends on the schedule alone.
    """

    def __init__(
        self,
        documents: row_reader.Documents,
        streams: Sequence[mixing.Stream],
        schedule: mixing.Schedule,
        *,
        mesh: jax.sharding.Mesh,
        settings: schema.Config,
        layout: int,
    ):
        self._degree = layout
        self._documents, self._streams, self._schedule, self._mesh = documents, streams, schedule, mesh
        self._num_groups, self._max_pieces = device_mesh.num_groups(mesh), settings.data.max_documents_per_row
        self._specs = batch.SPECS | ({"weights_BL": batch.PER_TOKEN} if documents.has_weights else {})
        self._shardings = {name: NamedSharding(mesh, spec) for name, spec in self._specs.items()}
        self._forms = [self._form(settings.for_rows_of(stream.row_tokens)) for stream in streams]
        self.num_steps = len(schedule)

    def _form(self, settings: schema.Config) -> _Form:
        row_tokens, rows_at_once = settings.data.longest_row, settings.batch.rows_at_once
        slots = self._num_groups * rows_at_once
        turns = batch.num_turns(rows_per_step=settings.batch.rows_per_step, rows_per_turn=slots)
        widths = {batch.PER_TOKEN: row_tokens, batch.PER_ROW: self._max_pieces}
        return _Form(
            row_tokens=row_tokens,
            rows_per_step=settings.batch.rows_per_step,
            rows_at_once=rows_at_once,
            shapes={name: (turns, slots, widths[spec]) for name, spec in self._specs.items()},
        )

    def read(self, step: int) -> HostStep:
        """What this process needs of a step."""
        form, dealt, step_rows = self._rows(step)
        chosen = self._schedule.rows(step)
        stream = self._streams[chosen.stream]
        documents = np.concatenate([row.document for row in step_rows])
        piece_lengths = np.concatenate([row.length for row in step_rows])
        tokens = np.bincount(self._documents.source_of(documents), piece_lengths, minlength=len(self._documents.sources))
        counts = Counts(
            row_tokens=form.row_tokens,
            piece_lengths=piece_lengths,
            num_rows=len([index for index in dealt if index is not None]),
            epoch=stream.epoch_of(chosen.first + chosen.num_rows - 1),
            tokens_of_sources=tuple(tokens.astype(int).tolist()),
            imbalance=self._imbalance(form, step_rows),
        )
        names = tuple(name for name, spec in self._specs.items() if spec == batch.PER_TOKEN)
        per_token = self._blocks(form, step_rows, names, functools.partial(self._share, form))
        per_row = self._blocks(
            form, step_rows, ("starts_BM", "lengths_BM"), lambda row, *_: row_reader.slots(row, self._max_pieces)
        )
        return HostStep(blocks=per_token | per_row, counts=counts)

    def deal(self, step: int) -> list[Hand]:
        """Who gets which rows of a step, turn by turn."""
        form, dealt, step_rows = self._rows(step)
        turns, _, _ = form.shapes["tokens_BL"]
        groups = self._mesh.devices.reshape(self._num_groups, -1)
        hands = []
        for turn, group in itertools.product(range(turns), range(self._num_groups)):
            places = [
                self._place(form, turn, slot) for slot in range(group * form.rows_at_once, (group + 1) * form.rows_at_once)
            ]
            hands.append(
                Hand(
                    turn=turn,
                    group=group,
                    devices=tuple(device.id for device in groups[group]),
                    processes=tuple(sorted({device.process_index for device in groups[group]})),
                    rows=tuple(dealt[place] for place in places),
                    num_pieces=sum(len(step_rows[place].length) for place in places),
                    num_tokens=sum(int(step_rows[place].length.sum()) for place in places),
                )
            )
        return hands

    def row_tokens(self, step: int) -> int:
        """Length of a step's rows."""
        return self._forms[self._schedule.rows(step).stream].row_tokens

    def pieces(self, step: int) -> list[Piece]:
        """What a step learns from, row by row in the data's order: the same on every mesh."""
        _, dealt, step_rows = self._rows(step)
        in_order = sorted((number, row) for number, row in zip(dealt, step_rows, strict=True) if number is not None)
        return [
            Piece(row=number, origin=self._documents.origin(document), first=first, num_tokens=num_tokens)
            for number, row in in_order
            for document, first, num_tokens in zip(*(x.tolist() for x in (row.document, row.first, row.length)), strict=True)
        ]

    def batches(self) -> Generator[tuple[batch.Batch, Counts]]:
        """The steps in order; the next two are read while one is used.

        Ask for the next batch when a step is dispatched and before its numbers are fetched: it then travels to the
        devices while the step runs. An exception in a read is raised here and ends the iteration.
        """
        steps = iter(_Steps(self).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
        with contextlib.closing(steps):
            for host in steps:
                form = next(form for form in self._forms if form.row_tokens == host.counts.row_tokens)
                arrays = {name: self._put(form.shapes[name], name, blocks) for name, blocks in host.blocks.items()}
                yield batch.Batch(**arrays), host.counts

    def _put(self, shape: tuple[int, int, int], name: str, blocks: dict[Span, np.ndarray]) -> jax.Array:
        return jax.make_array_from_callback(shape, self._shardings[name], lambda index: blocks[_span(index, shape)])

    def _rows(self, step: int) -> tuple[_Form, list[int | None], list[packing.Row]]:
        """A step's rows in the order in which they are dealt, with their numbers; the most work first, empty ones last."""
        number, first, num_rows = self._schedule.rows(step)
        form, stream = self._forms[number], self._streams[number]
        found = [stream.row(first + place) for place in range(num_rows)]
        order = sorted(range(len(found)), key=lambda place: -_work(found[place]))
        empty = form.rows_per_step - len(found)
        dealt = [first + place for place in order] + [None] * empty
        return form, dealt, [found[place] for place in order] + [packing.EMPTY] * empty

    def _imbalance(self, form: _Form, step_rows: Sequence[packing.Row]) -> float:
        turns, slots, _ = form.shapes["tokens_BL"]
        work = np.array([[_work(step_rows[self._place(form, turn, slot)]) for slot in range(slots)] for turn in range(turns)])
        of_groups = work.reshape(turns, self._num_groups, form.rows_at_once).sum(-1)
        return float(of_groups.max(1).sum() / of_groups.mean(1).sum())

    def _blocks(
        self, form: _Form, step_rows: list[packing.Row], names: tuple[str, ...], part: Callable[[packing.Row, int, int], Any]
    ) -> dict[str, dict[Span, np.ndarray]]:
        """The blocks of arrays that are split alike, from the part that `part` reads of each row."""
        blocks: dict[str, dict[Span, np.ndarray]] = {name: {} for name in names}
        for span in self._spans(names[0], form.shapes[names[0]]):
            turns, slots, (begin, end) = span
            parts = [
                [part(step_rows[self._place(form, turn, slot)], begin, end) for slot in range(*slots)] for turn in range(*turns)
            ]
            for name in names:
                field = name.split("_")[0]  # Batch's name without the dims
                blocks[name][span] = np.array([[getattr(one, field) for one in turn] for turn in parts])
        return blocks

    def _share(self, form: _Form, row: packing.Row, begin: int, end: int) -> row_reader.Share:
        """What lies in a row's places from `begin` to `end`."""
        spans = layout.spans(begin, end, row_tokens=form.row_tokens, degree=self._degree)
        return row_reader.joined([self._documents.share(row, *span) for span in spans])

    def _place(self, form: _Form, turn: int, slot: int) -> int:
        return batch.row_of_step(turn, slot, num_groups=self._num_groups, rows_at_once=form.rows_at_once)

    def _spans(self, name: str, shape: tuple[int, int, int]) -> list[Span]:
        """The different blocks of an array that this process's devices hold."""
        held = self._shardings[name].addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(_span(index, shape) for index in held))


class _Steps(grain.MapDataset[HostStep]):
    """The door to grain's prefetch thread: element k is step k."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self._pipeline = pipeline

    def __len__(self) -> int:
        return self._pipeline.num_steps

    def __getitem__(self, index: Any) -> Any:
        return self._pipeline.read(index)


def _span(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Span:
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _work(row: packing.Row) -> int:
    """What attention costs: the sum of the squared lengths of the pieces, which see nothing but themselves."""
    return int(np.sum(row.length.astype(np.int64) ** 2))
