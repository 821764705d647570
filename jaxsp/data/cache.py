"""The cache of tokens: an Arrow file for each source, written once, and mapped into memory.

After the table, the file has its statistics: their JSON, the number of its bytes, and its CRC-32.
Ids are compared with their checksums in blocks, each when it is first read: a disk that changes a
bit cannot change what is learned, and opening a data set reads no tokens.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.core import errors, files
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.core.units import MIB
from jaxsp.data.records import TOKEN_NUMBERS, RecordEntry
from jaxsp.system import distributed

if TYPE_CHECKING:
    import datasets

BLOCK_IDS = 2**14
"""Ids with a common checksum: 64 KiB, about half of what a disk reads ahead. Checking one takes
30 us; the checksums of 1 TB take 64 MB."""

_TAIL = struct.Struct("<QI")
"""Size and CRC-32 of the statistics, at the end of a file."""


class DamagedCacheError(NeedsAttentionError):
    """A cached file whose contents are not those that were written; it has been removed."""

    def __init__(self, path: pathlib.Path, reason: str):
        """Removes the file. Raises: UserError if that is not allowed."""
        self.path = path
        problem = f"{path} IS DAMAGED: {reason}"
        self.notice = f"{problem}. Rebuilding it"
        super().__init__(
            f"{problem}. It was removed; run the same command again to rebuild it and to resume "
            "from the latest checkpoint."
        )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"{problem}; it cannot be removed: {error.strerror}. Remove it, or set "
                "HF_DATASETS_CACHE to another folder."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Facts about all tokens, labels and numbers of tokens of a data set."""

    digests: Sequence[str]
    """Name of each column, SHA-256 of its lists' lengths, and of its ids. They do not depend on how
    the lists are split into chunks."""
    extreme_ids: Mapping[str, Sequence[Sequence[int]]]
    """Lowest and highest id of each column, each with the first document that has it."""
    block_checksums: dict[str, np.ndarray]
    """CRC-32 of each block of each column, chunk after chunk."""
    path: pathlib.Path = pathlib.Path()
    """Cached file with the ids."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()

    def check_blocks(self, column: str, chunks: list[np.ndarray]) -> "list[CheckedIds]":
        """Returns the chunks of a column, whose blocks are checked when they are first read."""
        ends = np.cumsum([_count_blocks(chunk) for chunk in chunks])[:-1]
        parts = np.split(self.block_checksums[column], ends)
        return [CheckedIds(*part, self.path) for part in zip(chunks, parts, strict=True)]


class CheckedIds:
    """Ids of a chunk of a column. Several threads may read them.
    Args: checksums: of each block; none if the ids are not checked."""

    def __init__(
        self,
        ids: np.ndarray,
        checksums: np.ndarray | Sequence[int] = (),
        path: pathlib.Path = pathlib.Path(),
    ):
        self.ids = ids
        """All ids, whether they are checked or not."""
        self._checksums = checksums
        self._path = path
        self._is_unchecked = bytearray(b"\1" * len(checksums))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a range of ids without copying. Raises: DamagedCacheError."""
        block = start // BLOCK_IDS
        while (block := self._is_unchecked.find(1, block, -(-stop // BLOCK_IDS))) >= 0:
            first = block * BLOCK_IDS
            if compute_block_checksums(self.ids[first : first + BLOCK_IDS]) != [
                self._checksums[block]
            ]:
                reason = f"the ids {first:,} to {first + BLOCK_IDS:,} of a chunk have changed"
                raise DamagedCacheError(self._path, reason)
            self._is_unchecked[block] = 0
        return self.ids[start:stop]

    def read_all(self) -> np.ndarray:
        """Returns all ids. Raises: DamagedCacheError."""
        return self.read(0, len(self.ids))


def compute_stats(dataset: "datasets.Dataset") -> TokenStats:
    """Computes the statistics of tokens, about 0.6 GB per second."""
    digests: list[str] = []
    extremes = {}
    blocks = {}
    for column in ("tokens", "labels", *TOKEN_NUMBERS):
        if column not in dataset.column_names:
            continue
        values = hashlib.sha256()
        ends: list[tuple[int, int]] = []
        checksums: list[int] = []
        num_documents = 0
        for offsets, ids in read_lists(dataset, column):
            dtype = "<f4" if column in TOKEN_NUMBERS else "<i4"
            values.update(np.ascontiguousarray(ids, dtype).data)
            checksums += compute_block_checksums(ids)
            has_loss = np.flatnonzero(ids != NO_LABEL) if column == "labels" else None
            known = ids if has_loss is None else ids[has_loss]
            has_ids = len(known) and column not in TOKEN_NUMBERS
            for index in (known.argmin(), known.argmax()) if has_ids else ():
                place = index if has_loss is None else has_loss[index]
                document = int(np.searchsorted(offsets, place, side="right")) - 1
                ends.append((int(known[index]), num_documents + document))
            num_documents += len(offsets) - 1
        digests += [column, _digest_lengths(dataset, column), values.hexdigest()]
        blocks[column] = np.array(checksums, np.uint32)
        if ends:
            extremes[column] = [min(ends), max(ends, key=lambda end: (end[0], -end[1]))]
    return TokenStats(digests=digests, extreme_ids=extremes, block_checksums=blocks)


def open_or_build(
    path: pathlib.Path, make_tables: Callable[[], Iterator[pa.Table]]
) -> "tuple[datasets.Dataset, TokenStats]":
    """Maps a cached file into memory. If it does not exist, one process writes it, and others wait.
    Raises: DamagedCacheError; UserError if it cannot be written."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path.with_suffix(".lock"))
            with lock.acquire(poll_interval=distributed.poll_interval_s(0.05)):
                if not path.exists():
                    _write(path, make_tables())
    except PermissionError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if error.errno not in files.DISK_FULL_ERRNOS:
            raise
        free = shutil.disk_usage(path.parent).free
        raise UserError(
            f"HF_DATASETS_CACHE = {path.parent.parent}: the disk or your quota is full "
            f"({free / MIB:,.0f} MiB of the disk are free). Free some space, or set "
            "HF_DATASETS_CACHE to a folder on a larger disk.",
            is_named=True,
        ) from error
    return open_file(path)


def _write(path: pathlib.Path, tables: Iterator[pa.Table]) -> None:
    """Writes tables to a file, which gets its name when it is complete."""
    first = next(tables)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = pathlib.Path(folder) / path.name
        with pa.ipc.new_stream(str(partial), first.schema) as stream:
            for table in itertools.chain([first], tables):
                stream.write_table(table)
        stats = compute_stats(_map_table(partial))
        checksums = {name: each.tobytes().hex() for name, each in stats.block_checksums.items()}
        content = json.dumps([stats.digests, stats.extreme_ids, checksums]).encode()
        with partial.open("ab") as file:
            file.write(content + _TAIL.pack(len(content), zlib.crc32(content)))
        partial.replace(path)  # what a power failure damages, its checksums show


def open_file(path: pathlib.Path) -> "tuple[datasets.Dataset, TokenStats]":
    """Maps a cached file into memory. Raises: DamagedCacheError."""
    try:
        with path.open("rb") as file:
            file.seek(-_TAIL.size, os.SEEK_END)
            size, checksum = _TAIL.unpack(file.read())
            file.seek(-_TAIL.size - size, os.SEEK_END)
            content = file.read(size)
        if zlib.crc32(content) != checksum:
            raise ValueError("its statistics have changed")
        digests, extreme_ids, checksums = json.loads(content)
        dataset = _map_table(path)
        dataset.data.table.validate()
    except Exception as error:  # Arrow and datasets raise errors of many kinds for damaged files
        if not files.is_damage(error):
            raise
        raise DamagedCacheError(path, errors.first_line(error)) from None
    blocks = {
        name: np.frombuffer(bytes.fromhex(text), np.uint32) for name, text in checksums.items()
    }
    for column, digest in zip(digests[::3], digests[1::3], strict=True):
        num_blocks = sum(_count_blocks(ids) for _, ids in read_lists(dataset, column))
        if (_digest_lengths(dataset, column), num_blocks) != (digest, len(blocks[column])):
            raise DamagedCacheError(path, "the lengths of documents have changed")
    stats = TokenStats(digests=digests, extreme_ids=extreme_ids, block_checksums=blocks, path=path)
    return dataset, stats


def _map_table(path: pathlib.Path) -> "datasets.Dataset":
    import datasets

    return datasets.Dataset.from_file(str(path))


def make_lists(arrays: Sequence[np.ndarray]) -> pa.LargeListArray:
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays))


def read_lists(dataset: "datasets.Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the chunks of a column of lists without copying: where each list begins and ends in
    the chunk's values (M + 1 offsets), and the values."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    for chunk in dataset.data.column(column).chunks:
        if len(chunk):
            offsets = chunk.offsets.to_numpy()
            # not flatten(), which reads anywhere in memory if the offsets are damaged
            yield offsets - offsets[0], chunk.values.to_numpy()[offsets[0] : offsets[-1]]


def find_bad_records(
    dataset: "datasets.Dataset", *, max_examples: int
) -> tuple[int, list[RecordEntry]]:
    """Returns the number of bad records, and place and problem of the first of them."""
    bad = dataset.data.table.select(["place", "problem"])
    bad = bad.filter(pc.is_valid(bad["problem"]))
    return len(bad), bad.slice(0, max_examples).to_pylist()


def _count_blocks(ids: np.ndarray) -> int:
    return -(-len(ids) // BLOCK_IDS)


def _digest_lengths(dataset: "datasets.Dataset", column: str) -> str:
    lengths = pc.list_value_length(dataset.data.column(column)).to_numpy()
    return hashlib.sha256(lengths.astype("<i8").data).hexdigest()


def compute_block_checksums(ids: np.ndarray) -> list[int]:
    """Checksum of each block of ids."""
    starts = range(0, len(ids), BLOCK_IDS)
    return [zlib.crc32(np.ascontiguousarray(ids[x : x + BLOCK_IDS]).data) for x in starts]
