"""Feeds the steps: each process reads the shares of its own devices, ahead of the step that needs them."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxsp.core import batch
from jaxsp.core import mesh as meshes
from jaxsp.data import packing, rows

Span = tuple[tuple[int, int], ...]
"""Begin and end of a block of a global array, per dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a step consists of, over the whole mesh, known from the plan alone."""

    piece_lengths: np.ndarray
    num_rows: int
    """Rows with at least one piece."""
    epoch: int
    """Of the last of them, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step's blocks for this process's devices, by Batch field and span, each once however many devices hold it."""

    blocks: dict[str, dict[Span, np.ndarray]]
    counts: Counts


class Pipeline:
    """The steps of a run from `first_row` on, any of them by its index.

    Rows are dealt to the groups in turn (`batch.row_of_step`); a group's devices hold the shares of its rows. Which
    rows a step has depends on `first_row` and `rows_per_step` alone. Rows from `total_rows` on, in the last step, are empty.
    """

    def __init__(
        self,
        documents: rows.Documents,
        epochs: packing.Epochs,
        *,
        mesh: jax.sharding.Mesh,
        rows_per_step: int,
        rows_at_once: int,
        row_tokens: int,
        max_pieces: int,
        total_rows: int,
        first_row: int = 0,
    ):
        self._documents, self._epochs = documents, epochs
        self._num_groups, self._rows_at_once = meshes.num_groups(mesh), rows_at_once
        self._rows_per_step, self._max_pieces = rows_per_step, max_pieces
        self._first_row, self._total_rows = first_row, total_rows
        slots = self._num_groups * rows_at_once
        turns = batch.num_turns(rows_per_step=rows_per_step, rows_per_turn=slots)
        self._shapes = {
            name: (turns, slots, row_tokens if spec == batch.PER_TOKEN else max_pieces) for name, spec in batch.SPECS.items()
        }
        self._shardings = {name: NamedSharding(mesh, spec) for name, spec in batch.SPECS.items()}
        self.num_steps = -(-(total_rows - first_row) // rows_per_step)

    def read(self, step: int) -> HostStep:
        """What this process needs of a step."""
        first = self._first_row + step * self._rows_per_step
        last = min(first + self._rows_per_step, self._total_rows)
        step_rows = [self._epochs.row(index) for index in range(first, last)]
        counts = Counts(
            piece_lengths=np.concatenate([row.length for row in step_rows]),
            num_rows=len(step_rows),
            epoch=self._epochs.epoch_of(last - 1),
        )
        step_rows += [packing.EMPTY] * (self._rows_per_step - len(step_rows))
        per_token = self._blocks(step_rows, ("tokens_BL", "labels_BL", "positions_BL"), self._documents.share)
        per_row = self._blocks(step_rows, ("starts_BM", "lengths_BM"), lambda row, *_: rows.slots(row, self._max_pieces))
        return HostStep(blocks=per_token | per_row, counts=counts)

    def batches(self) -> Generator[tuple[batch.Batch, Counts]]:
        """The steps in order; the next two are read while one is used.

        Ask for the next batch when a step is dispatched and before its numbers are fetched: it then travels to the
        devices while the step runs. An exception in a read is raised here and ends the iteration.
        """
        steps = iter(_Steps(self).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
        with contextlib.closing(steps):
            for host in steps:
                yield batch.Batch(**{name: self._put(name, blocks) for name, blocks in host.blocks.items()}), host.counts

    def _put(self, name: str, blocks: dict[Span, np.ndarray]) -> jax.Array:
        shape = self._shapes[name]
        return jax.make_array_from_callback(shape, self._shardings[name], lambda index: blocks[_span(index, shape)])

    def _blocks(
        self, step_rows: list[packing.Row], names: tuple[str, ...], part: Callable[[packing.Row, int, int], Any]
    ) -> dict[str, dict[Span, np.ndarray]]:
        """The blocks of arrays that are split alike, from the part that `part` reads of each row."""
        blocks: dict[str, dict[Span, np.ndarray]] = {name: {} for name in names}
        for span in self._spans(names[0]):
            turns, slots, (begin, end) = span
            parts = [[part(step_rows[self._row(turn, slot)], begin, end) for slot in range(*slots)] for turn in range(*turns)]
            for name in names:
                field = name.split("_")[0]  # Batch's name without the dims
                blocks[name][span] = np.array([[getattr(one, field) for one in turn] for turn in parts])
        return blocks

    def _row(self, turn: int, slot: int) -> int:
        return batch.row_of_step(turn, slot, num_groups=self._num_groups, rows_at_once=self._rows_at_once)

    def _spans(self, name: str) -> list[Span]:
        """The different blocks of an array that this process's devices hold."""
        held = self._shardings[name].addressable_devices_indices_map(self._shapes[name]).values()
        return list(dict.fromkeys(_span(index, self._shapes[name]) for index in held))


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
