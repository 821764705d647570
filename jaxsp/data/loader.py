"""Loads the batches of a schedule: each process reads its own devices' shards, ahead of use."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.core import batch
from jaxsp.core.batch import PER_ROW, PER_TOKEN, SPECS, Batch, Pairs, step_row_index
from jaxsp.core.layout import Layout
from jaxsp.data.documents import Documents, make_slots
from jaxsp.data.packing import PackedRows, RowSchedule, RowStream
from jaxsp.system import device_mesh

BlockSpan = tuple[tuple[int, int], ...]
"""Begin and end of a block of a global array, per dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of a step over the whole mesh, computed from the packing plan only."""

    rows: PackedRows
    """The step's rows and their segments, in the order of `places`."""
    places: np.ndarray
    """[microbatches, B]: number in `rows` of each row of the batch."""
    num_rows: int
    """Number of rows with at least one segment."""
    epoch: int | None
    """Epoch of the step's last row, from 0; None if sources are mixed by weight."""
    tokens_per_source: tuple[int, ...]
    documents_P2: np.ndarray
    """Documents of each pair of the step, in the order of `Batch.pairs`; -1 for one that is in
    another step, which only evaluations have. Empty without pairs."""
    imbalance: float
    """Attention work of the slowest devices over the mean: see `compute_imbalance`."""

    @property
    def segment_lengths(self) -> np.ndarray:
        """Tokens of each segment."""
        return self.rows.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Blocks of a step for this process's devices, by Batch field and span. A block that several
    devices hold is there once."""

    blocks: dict[str, dict[BlockSpan, np.ndarray]]
    pairs: Pairs | None
    """Pairs of the step, as arrays of the host."""
    counts: StepCounts


class RowPlacement(NamedTuple):
    """Devices of the rows, the order of their tokens, and the number of rows."""

    mesh: jax.sharding.Mesh
    layout: Layout
    rows_per_step: int
    rows_per_microbatch: int
    """Rows per microbatch and sequence-parallel group."""
    has_ring_steps: bool = False
    """True if the devices of a group wait for each other in each ring step."""

    @property
    def num_groups(self) -> int:
        """Number of sequence-parallel groups."""
        return device_mesh.num_groups(self.mesh)


def number_documents(rows: PackedRows, block_rows: int) -> np.ndarray:
    """Number in the step of each segment's document, for documents in pairs.

    A pair that occurs twice, in two epochs, is two pairs of the step: one that lies in a row is
    told apart by the row, and one in two rows by their block.

    Args: block_rows: number of consecutive rows that belong together: see `PackedEpochs`.
    """
    document = rows.document.astype(np.int64)
    num_pairs = document.max(initial=0) // 2 + 1
    row = rows.row_of_segment
    keys = row * num_pairs + document // 2
    _, indices, counts = np.unique(keys, return_inverse=True, return_counts=True)
    first_free = (len(rows) + 1) * num_pairs
    split_keys = first_free + row // block_rows * num_pairs + document // 2
    keys = np.where(counts[indices] == 1, split_keys, keys)
    return 2 * np.unique(keys, return_inverse=True)[1] + document % 2


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
        stream: RowStream,
        schedule: RowSchedule,
        placement: RowPlacement,
    ):
        self._documents = documents
        self._stream = stream
        self._schedule = schedule
        self._placement = placement
        self._row_tokens = stream.row_tokens
        self._max_segments = stream.max_segments
        self._specs = dict(SPECS)
        if documents.has_weights:
            self._specs["weights_BL"] = PER_TOKEN
        self._specs |= dict.fromkeys(map("{}_BL".format, documents.number_names), PER_TOKEN)
        if documents.per_record == 2:
            self._specs["documents_BM"] = PER_ROW
        num_slots = placement.num_groups * placement.rows_per_microbatch
        num_microbatches, remainder = divmod(placement.rows_per_step, num_slots)
        assert remainder == 0, (placement.rows_per_step, num_slots)
        self._places = step_row_index(
            np.arange(num_microbatches)[:, None],
            np.arange(num_slots),
            num_groups=placement.num_groups,
            rows_per_microbatch=placement.rows_per_microbatch,
        )
        """[microbatches, B]: place of each row of the microbatches in a step's sorted rows."""
        self._shapes = {
            PER_TOKEN: (*self._places.shape, self._row_tokens),
            PER_ROW: (*self._places.shape, self._max_segments),
        }
        self.num_steps = len(schedule)

    def read_step(self, step: int) -> HostBatch:
        """Reads the blocks of a step for this process's devices."""
        documents = self._documents
        placement = self._placement
        rows, block_rows = self._sort_rows(step)
        pairs = None
        numbers = np.zeros(0, np.int32)
        documents_P2 = np.zeros((0, 2), np.int64)
        if documents.per_record == 2:
            numbers = number_documents(rows, block_rows)
            documents_P2 = np.full((numbers.max(initial=-1) // 2 + 1, 2), -1, np.int64)
            documents_P2.reshape(-1)[numbers] = rows.document
            max_pairs = batch.max_pairs(
                rows_per_step=placement.rows_per_step, max_segments=self._max_segments
            )
            references_D = np.zeros(2 * max_pairs, np.float32)
            is_desirable_P = np.zeros(max_pairs, bool)
            if documents.references is not None:
                references_D[numbers] = documents.references[rows.document]
            if documents.is_desirable is not None:
                is_desirable_P[numbers // 2] = documents.is_desirable[rows.document // 2]
            pairs = Pairs(references_P2=references_D.reshape(-1, 2), is_desirable_P=is_desirable_P)

        def read_slice(place: int, begin: int, end: int) -> dict[str, Any]:
            spans = placement.layout.spans(begin, end, row_tokens=self._row_tokens)
            parts = [documents.read_slice(rows.row(place), *span) for span in spans]
            if len(parts) == 1:
                return parts[0]
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

        def read_slots(place: int, begin: int, end: int) -> dict[str, Any]:
            row_numbers = numbers[slice(*rows.row_starts[place : place + 2])]
            return make_slots(rows.row(place), self._max_segments, row_numbers)

        first_row, num_rows = self._schedule.step_rows(step)
        tokens_per_source = np.bincount(
            documents.find_sources(rows.document), rows.length, minlength=len(documents.sources)
        )
        work = count_row_work(
            rows.starts,
            rows.length,
            rows.row_starts,
            row_tokens=self._row_tokens,
            layout=placement.layout,
        )
        # of each microbatch, group and row of a group, on each device
        shape = (len(self._places), placement.num_groups, -1, *work.shape[1:])
        counts = StepCounts(
            rows=rows,
            places=self._places,
            num_rows=num_rows,
            epoch=self._stream.find_epoch(first_row + num_rows - 1),
            tokens_per_source=tuple(tokens_per_source.astype(int).tolist()),
            documents_P2=documents_P2,
            imbalance=compute_imbalance(
                work[self._places].reshape(shape).sum(2), has_ring_steps=placement.has_ring_steps
            ),
        )
        blocks = self._read_blocks(PER_TOKEN, read_slice) | self._read_blocks(PER_ROW, read_slots)
        return HostBatch(blocks=blocks, pairs=pairs, counts=counts)

    def list_segments(self, step: int) -> list[dict[str, Any]]:
        """Describes the segments of a step in the order of its rows: the same on every mesh.
        Returns: as in `NonfiniteStep.documents`."""
        first_row, num_rows = self._schedule.step_rows(step)
        segments = []
        for row_index in range(first_row, first_row + num_rows):
            row = self._stream.row(row_index)
            arrays = (row.document.tolist(), row.offset.tolist(), row.length.tolist())
            for document, offset, num_tokens in zip(*arrays, strict=True):
                place = {"first_token": offset, "tokens": num_tokens}
                origin = self._documents.find_origin(document)
                segments.append({"row": row_index} | origin | place)
        return segments

    def batches(self) -> Generator[tuple[Batch, StepCounts]]:
        """Yields the steps in order; the next two are read while one is used. Request the next
        batch when a step is dispatched and before its metrics are fetched. It is then copied to the
        devices while the step runs. An exception in a read is raised here and ends the
        iteration."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        steps = iter(
            grain.MapDataset.range(self.num_steps).map(self.read_step).to_iter_dataset(options)
        )
        with contextlib.closing(steps):
            for host_batch in steps:
                arrays: dict[str, Any] = {
                    name: self._put(self._specs[name], blocks)
                    for name, blocks in host_batch.blocks.items()
                }
                if names := self._documents.number_names:
                    arrays["numbers_BL"] = {name: arrays.pop(f"{name}_BL") for name in names}
                if host_batch.pairs is not None:
                    arrays["pairs"] = jax.tree.map(self._put_whole, host_batch.pairs)
                yield Batch(**arrays), host_batch.counts

    def _put(self, spec: PartitionSpec, blocks: Mapping[BlockSpan, np.ndarray]) -> jax.Array:
        shape = self._shapes[spec]
        sharding = NamedSharding(self._placement.mesh, spec)
        (*_, block) = blocks.values()
        return jax.make_array_from_callback(
            (*shape, *block.shape[len(shape) :]),
            sharding,
            lambda index: blocks[_to_span(index, shape)],
        )

    def _put_whole(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self._placement.mesh, PartitionSpec())
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def _sort_rows(self, step: int) -> tuple[PackedRows, int]:
        """Returns the rows of a step, those with the most attention work first and empty rows last;
        and the number of consecutive rows that belong together."""
        first_row, num_rows = self._schedule.step_rows(step)
        rows = self._stream.rows(first_row, first_row + num_rows)
        # an evaluation scores documents one by one, and may have an odd number of rows
        block_rows = self._stream.block_rows if self._places.size % 2 == 0 else 1
        rows = rows.append_empty(num_rows + num_rows % block_rows)
        work = count_segment_pairs(rows.length, rows.row_starts)
        blocks = np.argsort(-work.reshape(-1, block_rows).sum(1), kind="stable")
        rows = rows.select_rows((blocks[:, None] * block_rows + np.arange(block_rows)).ravel())
        return rows.append_empty(self._places.size), block_rows

    def _read_blocks(
        self, spec: PartitionSpec, read_part: Callable[[int, int, int], dict[str, Any]]
    ) -> dict[str, dict[BlockSpan, np.ndarray]]:
        """Blocks of the Batch fields that are sharded by `spec`.
        Args: read_part: reads the fields of the row in a place, from `begin` to `end`."""
        names = [name for name, name_spec in self._specs.items() if name_spec == spec]
        blocks: dict[str, dict[BlockSpan, np.ndarray]] = {name: {} for name in names}
        sharding = NamedSharding(self._placement.mesh, spec)
        shape = self._shapes[spec]
        indices = sharding.addressable_devices_indices_map(shape).values()
        for span in dict.fromkeys(_to_span(index, shape) for index in indices):
            microbatches, slots, (begin, end) = span
            places = self._places[slice(*microbatches), slice(*slots)]
            parts = [read_part(place, begin, end) for place in places.ravel().tolist()]
            for name in names:
                field = name.rpartition("_")[0]  # without its dims
                values = np.array([part[field] for part in parts])
                blocks[name][span] = values.reshape(*places.shape, *values.shape[1:])
        return blocks


def _to_span(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> BlockSpan:
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=False))


def count_row_work(
    starts: np.ndarray,
    lengths: np.ndarray,
    row_starts: np.ndarray,
    *,
    row_tokens: int,
    layout: Layout,
) -> np.ndarray:
    """Counts the attention work of rows in each ring step on each device. [rows, steps, devices]

    In step s, a device attends to the keys of the device s places before it. Where rows keep their
    order, one step on one device stands for the group, whose devices share the heads.

    Args:
        starts, lengths: first token in its row, and tokens of each segment.
        row_starts: first segment of each row, and the number of segments.
    Units: twice the pairs of a query and a key before it: the squared length of a segment.
    """
    if layout.keeps_order:
        return count_segment_pairs(lengths, row_starts)[:, None, None]
    devices = layout.degree
    order = np.array(layout.chunk_order())
    borders = np.arange(layout.num_chunks + 1) * layout.chunk_tokens(row_tokens)
    # queries in one chunk and keys in another, twice if the keys come first
    factor_NN = 1.0 + np.sign(order[:, None] - order)
    work = []
    for begin, end in itertools.pairwise(row_starts):
        tokens_before = np.clip(borders - starts[begin:end, None], 0, lengths[begin:end, None])
        tokens_SN = np.diff(tokens_before, axis=1)[:, order].astype(np.float64)
        pairs_NN = tokens_SN.T @ tokens_SN * factor_NN
        work.append(pairs_NN.reshape(devices, len(order) // devices, devices, -1).sum((1, 3)))
    work_RDD = np.array(work, np.int64)
    here = np.arange(devices)
    return np.stack([work_RDD[:, here, (here - step) % devices] for step in range(devices)], 1)


def count_segment_pairs(lengths: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """Attention work of each row, by which rows are sorted: the squared lengths of its segments."""
    work_before = np.append(0, np.cumsum(lengths.astype(np.int64) ** 2))
    return np.diff(work_before[row_starts])


def compute_imbalance(work: np.ndarray, *, has_ring_steps: bool) -> float:
    """Work of the slowest devices relative to the mean: 1 is balanced.

    The devices of a group wait for each other in each ring step, or in each layer if there is no
    ring, and groups wait for each other in each microbatch.

    Args: work: [microbatches, groups, steps, devices].
    """
    if not has_ring_steps:
        work = work.sum(2, keepdims=True)
    slowest = work.max(3).sum(2).max(1).sum()
    mean = work.mean(3).sum(2).mean(1).sum()
    return float(slowest / mean) if mean else 1.0
