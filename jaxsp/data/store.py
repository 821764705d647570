"""Tokenized sources, and their cache: a folder for each, written once, and mapped into memory.

    jaxsp/3f0c.../records.arrow   place, problem and number of tokens of each record
    jaxsp/3f0c.../tokens          int32, the ids of one record after another; so are labels
    jaxsp/3f0c.../meta.json       checksums of the arrays

Ids are compared with their checksums in blocks, each when it is first read: a disk that changes a
bit cannot change what is learned, and opening a data set reads no tokens.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.core import errors, files
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.core.units import MIB
from jaxsp.data.source import FIRST_TOKENS, TOKEN_NUMBERS
from jaxsp.system import distributed

NUM_TOKENS = "num_tokens"
"""Column of records: number of tokens of all documents of a record; 0 if it is bad."""

ARRAYS = {"tokens": np.int32, "labels": np.int32, "weights": np.float32} | dict.fromkeys(
    TOKEN_NUMBERS, np.float32
)
"""Names and types of the arrays with a number for each token."""

BLOCK_IDS = 2**14
"""Ids with a common checksum: 64 KiB, about half of what a disk reads ahead. Checking one takes
30 us; the checksums of 1 TB take 64 MB."""

_RECORDS = "records.arrow"
_META = "meta.json"

EncodedBatch = tuple[pa.Table, Mapping[str, np.ndarray]]
"""Records and arrays of some records: see `TokenizedSource`."""


class DamagedCacheError(NeedsAttentionError):
    """Cached tokens whose contents are not those that were written; they have been removed."""

    def __init__(self, path: pathlib.Path, reason: str):
        """Removes the file or folder. Raises: UserError if that is not allowed."""
        self.path = path
        problem = f"{path} IS DAMAGED: {reason}"
        self.notice = f"{problem}. Rebuilding it"
        super().__init__(
            f"{problem}. It was removed; run the same command again to rebuild it and to resume "
            "from the latest checkpoint."
        )
        removed = path.with_name(f"{path.name}.{os.getpid()}{files.PARTIAL_SUFFIX}")
        try:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                path.rename(removed)  # at once: another process must not open half of a folder
                (shutil.rmtree if removed.is_dir() else os.unlink)(removed)
        except OSError as error:
            raise UserError(
                f"{problem}; it cannot be removed: {error.strerror}. Remove it, or set "
                "HF_DATASETS_CACHE to another folder."
            ) from None


class CheckedIds:
    """Numbers in an array of a file. Several threads may read them.
    Args: checksums: of each block; none if the numbers are not checked."""

    def __init__(
        self,
        ids: np.ndarray,
        checksums: np.ndarray | Sequence[int] = (),
        path: pathlib.Path = pathlib.Path(),
    ):
        self.ids = ids
        """All numbers, whether they are checked or not."""
        self._checksums = checksums
        self._path = path
        self._is_unchecked = bytearray(b"\1" * len(checksums))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a range of numbers without copying. Raises: DamagedCacheError."""
        block = start // BLOCK_IDS
        while (block := self._is_unchecked.find(1, block, -(-stop // BLOCK_IDS))) >= 0:
            first = block * BLOCK_IDS
            checksums = compute_block_checksums(self.ids[first : first + BLOCK_IDS])
            if checksums != [self._checksums[block]]:
                reason = f"the ids {first:,} to {first + BLOCK_IDS:,} have changed"
                raise DamagedCacheError(self._path, reason)
            self._is_unchecked[block] = 0
        return self.ids[start:stop]


def compute_block_checksums(ids: np.ndarray) -> list[int]:
    """Checksum of each block of ids."""
    starts = range(0, len(ids), BLOCK_IDS)
    return [zlib.crc32(np.ascontiguousarray(ids[x : x + BLOCK_IDS]).data) for x in starts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedSource:
    """Records of a source, and the tokens of their documents."""

    records: pa.Table
    """A row for each record: its `place`; its `problem` if it is bad; NUM_TOKENS; for chats
    BARE_ANSWERS; for records of two documents FIRST_TOKENS, and Source.values."""
    arrays: Mapping[str, CheckedIds]
    """A number for each token, one record after another, by the names in ARRAYS. Labels are not
    shifted; without any, every token has a loss."""
    digest: str = ""
    """Digest of all lengths and arrays, wherever they come from."""

    @property
    def num_tokens(self) -> np.ndarray:
        """Number of tokens of each record."""
        return self.records[NUM_TOKENS].to_numpy()

    @property
    def per_record(self) -> int:
        """Number of documents of each record."""
        return 2 if FIRST_TOKENS in self.records.column_names else 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document."""
        if self.per_record == 1:
            return self.num_tokens
        first = self.records[FIRST_TOKENS].to_numpy()
        return np.stack([first, self.num_tokens - first], axis=1).ravel()

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """First token of each document in the arrays."""
        return np.cumsum(self.lengths) - self.lengths

    def find_place(self, document: int) -> str:
        """Returns the place of a document's record."""
        return self.records["place"][document // self.per_record].as_py()


def list_bad_records(records: pa.Table) -> list[str]:
    """Returns place and problem of each bad record."""
    if "problem" not in records.column_names:
        return []
    bad = records.filter(pc.is_valid(records["problem"]))
    return [f"{x['place']}: {x['problem']}" for x in bad.select(["place", "problem"]).to_pylist()]


def from_columns(columns: Mapping[str, Any]) -> TokenizedSource:
    """Returns tokens in memory. Args: columns: those of records, and lists by the names of
    arrays: the numbers of each record's tokens."""
    lists = {name: values for name, values in columns.items() if name in ARRAYS}
    others = {name: values for name, values in columns.items() if name not in ARRAYS}
    lengths = [*map(len, lists["tokens"])]
    places = [""] * len(lengths)
    arrays = {
        name: np.concatenate([np.zeros(0, ARRAYS[name]), *values]).astype(ARRAYS[name])
        for name, values in lists.items()
    }
    return TokenizedSource(
        records=pa.table({"place": places} | others | {NUM_TOKENS: np.array(lengths, np.int64)}),
        arrays={name: CheckedIds(values) for name, values in arrays.items()},
    )


def open_or_build(
    folder: pathlib.Path, make_batches: Callable[[], Iterator[EncodedBatch]]
) -> TokenizedSource:
    """Maps cached tokens into memory. If they do not exist, one process writes them, and others
    wait. Raises: DamagedCacheError; UserError if they cannot be written."""
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder.with_suffix(".lock"))
            with lock.acquire(poll_interval=distributed.poll_interval_s(0.05)):
                if not folder.exists():
                    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                        partial = pathlib.Path(temporary, folder.name)
                        partial.mkdir()
                        _write(partial, make_batches())
                        partial.rename(folder)  # what a power failure damages, its checksums show
    except PermissionError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if error.errno not in files.DISK_FULL_ERRNOS:
            raise
        free = shutil.disk_usage(folder.parent).free
        raise UserError(
            f"HF_DATASETS_CACHE = {folder.parent.parent}: the disk or your quota is full "
            f"({free / MIB:,.0f} MiB of the disk are free). Free some space, or set "
            "HF_DATASETS_CACHE to a folder on a larger disk.",
            is_named=True,
        ) from error
    return _open(folder)


def _write(folder: pathlib.Path, batches: Iterator[EncodedBatch]) -> None:
    """Writes the files of a folder."""
    digests: list[str] = []
    checksums = {}
    with contextlib.ExitStack() as stack:
        outputs: dict[str, Any] = {}
        stream = None
        for records, arrays in batches:
            if stream is None:
                output = pa.ipc.new_stream(str(folder / _RECORDS), records.schema)
                stream = stack.enter_context(output)
            stream.write_table(records)
            for name, values in arrays.items():
                if name not in outputs:
                    outputs[name] = stack.enter_context((folder / name).open("wb"))
                outputs[name].write(np.ascontiguousarray(values, ARRAYS[name]).data)
    files.write_checksum(folder / _RECORDS)
    lengths = hashlib.sha256(_read_records(folder)[NUM_TOKENS].to_numpy().data).hexdigest()
    for name in (name for name in ARRAYS if name in outputs):
        ids = _map_array(folder, name)
        digests += [name, lengths, hashlib.sha256(ids.data).hexdigest()]
        checksums[name] = np.array(compute_block_checksums(ids), np.uint32).tobytes().hex()
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    files.write_json(folder / _META, {"digest": digest, "checksums": checksums})
    files.write_checksum(folder / _META)


def _open(folder: pathlib.Path) -> TokenizedSource:
    """Maps a folder into memory. Raises: DamagedCacheError."""
    try:
        for name in (_RECORDS, _META):
            if not files.is_intact(folder / name):
                raise ValueError(f"{name} has changed")
        meta = json.loads((folder / _META).read_bytes())
        records = _read_records(folder)
        arrays = {}
        for name, checksums in meta["checksums"].items():
            ids = _map_array(folder, name)
            if len(ids) != records[NUM_TOKENS].to_numpy().sum():
                raise ValueError(f"{name} has another size")
            blocks = np.frombuffer(bytes.fromhex(checksums), np.uint32)
            arrays[name] = CheckedIds(ids, blocks, folder)
    except Exception as error:  # Arrow and NumPy raise errors of many kinds for damaged files
        if not files.is_damage(error):
            raise
        raise DamagedCacheError(folder, errors.first_line(error)) from None
    return TokenizedSource(records=records, arrays=arrays, digest=meta["digest"])


def _read_records(folder: pathlib.Path) -> pa.Table:
    with pa.memory_map(str(folder / _RECORDS)) as source:
        return pa.ipc.open_stream(source).read_all()


def _map_array(folder: pathlib.Path, name: str) -> np.ndarray:
    path = folder / name
    if not path.stat().st_size:  # NumPy cannot map an empty file
        return np.zeros(0, ARRAYS[name])
    return np.memmap(path, ARRAYS[name], "r")
