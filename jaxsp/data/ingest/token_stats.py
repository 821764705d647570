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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.core import files
from jaxsp.core.batch import NO_LABEL
from jaxsp.data.ingest import record_cache
from jaxsp.data.ingest.record_cache import DamagedCacheError

if TYPE_CHECKING:
    import datasets

BLOCK_IDS = 2**14
"""Ids with a common checksum: 64 KiB, about half of what a disk reads ahead. Checking one takes
30 us; the checksums of 1 TB take 64 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Facts about all tokens and labels of a data set."""

    digests: tuple[str, ...]
    """Name of each column, SHA-256 of its lists' lengths, and of its ids. They do not depend on how
    the lists are split into chunks."""
    extreme_ids: dict[str, list[tuple[int, int]]]
    """Lowest and highest id of each column, each with the first document that has it."""
    block_checksums: dict[str, np.ndarray]
    """CRC-32 of each block of each column, chunk after chunk."""
    paths: tuple[pathlib.Path, ...] = ()
    """Cached files with the ids, and the file with these statistics."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()

    def check_lengths(self, dataset: "datasets.Dataset") -> None:
        """Checks the lengths of all documents. Raises: DamagedCacheError."""
        for column, digest in zip(self.digests[::3], self.digests[1::3], strict=True):
            lengths = hashlib.sha256()
            num_blocks = 0
            for offsets, ids in record_cache.read_lists(dataset, column):
                lengths.update(_encode_lengths(offsets))
                num_blocks += _count_blocks(ids)
            if (lengths.hexdigest(), num_blocks) != (digest, len(self.block_checksums[column])):
                raise DamagedCacheError(self.paths, "the lengths of documents have changed")

    def check_blocks(self, column: str, chunks: list[np.ndarray]) -> "list[CheckedIds]":
        """Returns the chunks of a column, whose blocks are checked when they are first read."""
        ends = np.cumsum([_count_blocks(chunk) for chunk in chunks])[:-1]
        parts = np.split(self.block_checksums[column], ends)
        return [CheckedIds(*part, self.paths) for part in zip(chunks, parts, strict=True)]


class CheckedIds:
    """Ids of a chunk of a column. Several threads may read them.
    Args: checksums: of each block; none if the ids are not checked."""

    def __init__(
        self,
        ids: np.ndarray,
        checksums: np.ndarray | Sequence[int] = (),
        paths: tuple[pathlib.Path, ...] = (),
    ):
        self.ids = ids
        """All ids, whether they are checked or not."""
        self._checksums = checksums
        self._paths = paths
        self._is_unchecked = bytearray(b"\1" * len(checksums))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a range of ids without copying. Raises: DamagedCacheError."""
        block = start // BLOCK_IDS
        while (block := self._is_unchecked.find(1, block, -(-stop // BLOCK_IDS))) >= 0:
            first = block * BLOCK_IDS
            if _checksum(self.ids[first : first + BLOCK_IDS]) != self._checksums[block]:
                reason = f"the ids {first:,} to {first + BLOCK_IDS:,} of a chunk have changed"
                raise DamagedCacheError(self._paths, reason)
            self._is_unchecked[block] = 0
        return self.ids[start:stop]

    def read_all(self) -> np.ndarray:
        """Returns all ids. Raises: DamagedCacheError."""
        return self.read(0, len(self.ids))


def compute(dataset: "datasets.Dataset") -> TokenStats:
    """Computes the statistics, about 0.6 GB per second."""
    digests: list[str] = []
    extremes = {}
    blocks = {}
    for column in ("tokens", "labels"):
        if column not in dataset.column_names:
            continue
        lengths = hashlib.sha256()
        values = hashlib.sha256()
        ends: list[tuple[int, int]] = []
        checksums: list[int] = []
        num_documents = 0
        for offsets, ids in record_cache.read_lists(dataset, column):
            lengths.update(_encode_lengths(offsets))
            values.update(np.ascontiguousarray(ids, "<i4").data)
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
    return TokenStats(digests=tuple(digests), extreme_ids=extremes, block_checksums=blocks)


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
                datasets.concatenate_datasets(
                    [
                        record_cache.open_file(path, stats_file=stats_file)
                        for path in stats.paths[:-1]
                    ]
                )
                if make
                else records.rename_column("input_ids", "tokens")
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
    Returns: the statistics with these paths."""
    for path in cached:
        files.sync(path)
    names = [path.name for path in cached]
    fields = json.dumps({"digests": stats.digests, "ids": stats.extreme_ids, "files": names})
    arrays: dict[str, Any] = {"fields": fields, **stats.block_checksums}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = buffer.getvalue()
    files.write_atomic(file, _checksum(content).to_bytes(4, "little") + content)
    return dataclasses.replace(stats, paths=(*cached, file))


def read(file: pathlib.Path) -> TokenStats | None:
    """Reads statistics; None if there are none. Raises: DamagedCacheError."""
    if not file.exists():
        return None
    content = file.read_bytes()
    if _checksum(content[4:]) != int.from_bytes(content[:4], "little") or len(content) < 4:
        raise DamagedCacheError((file,), "its contents have changed")
    arrays = dict(np.load(io.BytesIO(content[4:]), allow_pickle=False))
    fields = json.loads(str(arrays.pop("fields")))
    ids = {column: [(low, at) for low, at in ends] for column, ends in fields["ids"].items()}
    return TokenStats(
        digests=tuple(fields["digests"]),
        extreme_ids=ids,
        block_checksums=arrays,
        paths=(*(file.parent / name for name in fields["files"]), file),
    )


def _count_blocks(ids: np.ndarray) -> int:
    return -(-len(ids) // BLOCK_IDS)


def _encode_lengths(offsets: np.ndarray) -> memoryview:
    return np.diff(offsets).astype("<i8").data


def _checksum(values: np.ndarray | bytes) -> int:
    return zlib.crc32(values if isinstance(values, bytes) else np.ascontiguousarray(values).data)
