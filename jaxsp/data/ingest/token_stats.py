"""Digest, extreme ids and checksums of cached tokens, and arrays that check what is read of them.

Ids are compared with their checksums in blocks, each when it is first read: a disk that changes a
bit cannot change what is learned, and opening a data set reads no tokens.
"""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.core import files
from jaxsp.core.batch import NO_LABEL
from jaxsp.data.ingest import record_cache
from jaxsp.data.ingest.record_cache import DamagedCacheError

if TYPE_CHECKING:
    import datasets

_COLUMNS = ("tokens", "labels")

BLOCK_IDS = 2**14
"""Ids with a common checksum: 64 KiB, about half of what a disk reads ahead. Checking one takes
30 us; the checksums of 1 TB take 64 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Facts about all tokens and labels of a data set."""

    digest: str
    """SHA-256 of all lengths and ids; it does not depend on how they are split into chunks."""
    extreme_ids: dict[str, list[tuple[int, int]]]
    """Lowest and highest id of each column, each with the first document that has it."""
    length_checksums: np.ndarray
    """CRC-32 of the lengths of each chunk's documents."""
    block_checksums: dict[str, np.ndarray]
    """CRC-32 of each block of each column, chunk after chunk."""
    paths: tuple[pathlib.Path, ...] = ()
    """Cached files with the ids, and the file with these statistics."""

    def check_lengths(self, dataset: "datasets.Dataset") -> None:
        """Checks the lengths of all documents. Raises: DamagedCacheError."""
        for column in self.block_checksums:
            lists = list(record_cache.read_lists(dataset, column))
            checksums = [_checksum(np.diff(offsets)) for offsets, _ in lists]
            has_lengths = checksums == self.length_checksums.tolist()
            num_blocks = sum(_count_blocks(ids) for _, ids in lists)
            if not has_lengths or num_blocks != len(self.block_checksums[column]):
                raise DamagedCacheError(self.paths, "the lengths of documents have changed")

    def check_blocks(self, column: str, chunks: list[np.ndarray]) -> "list[CheckedIds]":
        """Returns the chunks of a column, whose blocks are checked when they are first read."""
        ends = np.cumsum([_count_blocks(chunk) for chunk in chunks])[:-1]
        parts = np.split(self.block_checksums[column], ends)
        return [CheckedIds(*part, self.paths) for part in zip(chunks, parts, strict=True)]


class CheckedIds:
    """Ids of a chunk of a column. Several threads may read them."""

    def __init__(
        self,
        ids: np.ndarray,
        checksums: np.ndarray | None = None,
        paths: tuple[pathlib.Path, ...] = (),
    ):
        """Args: checksums: of each block; None: the ids are not checked."""
        self.ids = ids
        """All ids, whether they are checked or not."""
        self._checksums = checksums
        self._paths = paths
        num_blocks = 0 if checksums is None else len(checksums)
        self._is_unchecked = bytearray(b"\1" * num_blocks)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a range of ids without copying. Raises: DamagedCacheError."""
        first = start // BLOCK_IDS
        end = -(-stop // BLOCK_IDS)
        block = self._is_unchecked.find(1, first, end)
        while block >= 0:
            self._check(block)
            block = self._is_unchecked.find(1, block + 1, end)
        return self.ids[start:stop]

    def read_all(self) -> np.ndarray:
        """Returns all ids. Raises: DamagedCacheError."""
        return self.read(0, len(self.ids))

    def _check(self, block: int) -> None:
        assert self._checksums is not None, "no block is unchecked without checksums"
        start = block * BLOCK_IDS
        if _checksum(self.ids[start : start + BLOCK_IDS]) != self._checksums[block]:
            reason = f"the ids {start:,} to {start + BLOCK_IDS:,} of a chunk have changed"
            raise DamagedCacheError(self._paths, reason)
        self._is_unchecked[block] = 0


def compute(dataset: "datasets.Dataset") -> TokenStats:
    """Computes the statistics, about 0.6 GB per second."""
    digests = []
    extremes = {}
    blocks = {}
    chunk_lengths: list[int] = []
    for column in _COLUMNS:
        if column not in dataset.column_names:
            continue
        # lengths and values are hashed as two streams, so that chunk borders change nothing
        lengths = hashlib.sha256()
        values = hashlib.sha256()
        ends: list[tuple[int, int]] = []
        checksums: list[int] = []
        chunk_lengths = []
        num_documents = 0
        for offsets, ids in record_cache.read_lists(dataset, column):
            lengths.update(np.diff(offsets).astype("<i8").data)
            values.update(np.ascontiguousarray(ids, "<i4").data)
            chunk_lengths.append(_checksum(np.diff(offsets)))
            starts = range(0, len(ids), BLOCK_IDS)
            checksums += [_checksum(ids[start : start + BLOCK_IDS]) for start in starts]
            has_loss = np.flatnonzero(ids != NO_LABEL) if column == "labels" else None
            known = ids if has_loss is None else ids[has_loss]
            for index in (known.argmin(), known.argmax()) if len(known) else ():
                place = index if has_loss is None else has_loss[index]
                document = int(np.searchsorted(offsets, place, side="right")) - 1
                ends.append((int(known[index]), num_documents + document))
            num_documents += len(offsets) - 1
        digests += [column, lengths.hexdigest(), values.hexdigest()]
        blocks[column] = np.array(checksums, np.uint32)
        if ends:
            extremes[column] = [min(ends), max(ends, key=lambda end: (end[0], -end[1]))]
    return TokenStats(
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        extreme_ids=extremes,
        length_checksums=np.array(chunk_lengths, np.uint32),
        block_checksums=blocks,
    )


def open_or_make(
    records: "datasets.Dataset", fingerprint: str, make: "Callable[[], datasets.Dataset] | None"
) -> "tuple[datasets.Dataset, TokenStats]":
    """Returns the tokens of records, and their statistics.

    The cached files are complete once their statistics are written.

    Args:
        fingerprint: name of the tokens.
        make: tokenizes the records into the files `cache-FINGERPRINT*.arrow`; None: the records
            are tokens.
    Raises: DamagedCacheError if the cached records or tokens are damaged.
    """
    import datasets

    folder = _list_files(records)[0].parent
    stats_file = folder / f"counted-{fingerprint}.npz"
    with record_cache.build_once(stats_file):
        stats = read(stats_file)
        if stats is not None:
            tokenized = (
                records.rename_column("input_ids", "tokens")
                if make is None
                else datasets.concatenate_datasets(
                    [
                        record_cache.open_file(path, stats_file=stats_file)
                        for path in stats.paths[:-1]
                    ]
                )
            )
            stats.check_lengths(tokenized)
            return tokenized, stats
        can_write = os.access(folder, os.W_OK)
        if can_write:
            for leftover in folder.glob(f"cache-{fingerprint}*.arrow"):
                leftover.unlink()
        for path in _list_files(records):
            if not files.is_intact(path):
                reason = "its contents have changed" if path.exists() else "it is missing"
                raise DamagedCacheError((path,), reason)
        tokenized = make() if make else records.rename_column("input_ids", "tokens")
        stats = compute(tokenized)
        if can_write:
            stats = write(stats, stats_file, _list_files(tokenized))
        return tokenized, stats


def _list_files(dataset: "datasets.Dataset") -> list[pathlib.Path]:
    return [pathlib.Path(file["filename"]) for file in dataset.cache_files]


def write(stats: TokenStats, file: pathlib.Path, cached: list[pathlib.Path]) -> TokenStats:
    """Writes statistics beside the cached files, which count as complete from then on.

    Returns: the statistics with these paths.
    """
    for path in cached:
        files.sync(path)
    names = [path.name for path in cached]
    fields = {"digest": stats.digest, "ids": stats.extreme_ids, "files": names}
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {
        "fields": json.dumps(fields),
        "lengths": stats.length_checksums,
        **stats.block_checksums,
    }
    np.savez(buffer, **arrays)
    files.write_atomic(file, _add_checksum(buffer.getvalue()))
    return dataclasses.replace(stats, paths=(*cached, file))


def read(file: pathlib.Path) -> TokenStats | None:
    """Reads statistics; None if there are none. Raises: DamagedCacheError."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    if content != _add_checksum(content[4:]):
        raise DamagedCacheError((file,), "its contents have changed")
    arrays = np.load(io.BytesIO(content[4:]), allow_pickle=False)
    fields = json.loads(str(arrays["fields"]))
    return TokenStats(
        digest=fields["digest"],
        extreme_ids={
            column: [(low, at) for low, at in ends] for column, ends in fields["ids"].items()
        },
        length_checksums=arrays["lengths"],
        block_checksums={column: arrays[column] for column in _COLUMNS if column in arrays},
        paths=(*(file.parent / name for name in fields["files"]), file),
    )


def _count_blocks(ids: np.ndarray) -> int:
    return -(-len(ids) // BLOCK_IDS)


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data)


def _add_checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little") + content
