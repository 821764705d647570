"""Cached records and tokens: Arrow files that are written once and mapped into memory."""

import contextlib
import itertools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.core import errors, files
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.core.units import MIB
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats.records import MAX_NAMED_RECORDS, RecordEntry, list_examples
from jaxsp.data.ingest import columnar
from jaxsp.system import distributed

if TYPE_CHECKING:
    import datasets

_BATCH_SIZE = 2**24
"""Characters or tokens that are written together: documents have a few to 100 million of them."""

_ID_LIST = pa.large_list(pa.int32())

_TYPES = {str: pa.large_string(), np.ndarray: _ID_LIST, float: pa.float64(), bool: pa.bool_()}
"""Arrow types of columns by the Python type of their values."""


class DamagedCacheError(NeedsAttentionError):
    """Cached files whose contents are not those that were written; they have been removed."""

    def __init__(self, paths: Sequence[pathlib.Path], reason: str):
        """Removes the files. Raises: UserError if that is not allowed."""
        self.path = paths[0]
        problem = f"{self.path} IS DAMAGED: {reason}"
        self.notice = f"{problem}. Rebuilding it"
        super().__init__(
            f"{problem}. It was removed; run the same command again to rebuild it and to resume "
            "from the latest checkpoint."
        )
        for path in paths:
            try:
                files.remove_with_checksum(path)
            except OSError as error:
                raise UserError(
                    f"{problem}; {path} cannot be removed: {error.strerror}. Remove it, or "
                    "set HF_DATASETS_CACHE to another folder."
                ) from None


def open_file(path: pathlib.Path, *, stats_file: pathlib.Path | None = None) -> "datasets.Dataset":
    """Maps a cached file into memory. Raises: DamagedCacheError if it is missing, empty or cut.
    Args: stats_file: its statistics, which are removed with a damaged file."""
    import datasets

    try:
        dataset = datasets.Dataset.from_file(str(path))
        dataset.data.table.validate()
    except Exception as error:  # Arrow and datasets raise errors of many kinds for damaged files
        if not files.is_damage(error):
            raise
        paths = (path,) if stats_file is None else (path, stats_file)
        raise DamagedCacheError(paths, errors.first_line(error)) from None
    return dataset


def write_cache(
    entries: Iterator[RecordEntry], columns: RecordEntry, path: pathlib.Path, *, desc: str
) -> None:
    """Writes entries to an Arrow file, which gets its name when it is complete, and its checksum.
    Args: columns: columns with the content of a record, and a value of each."""
    import datasets

    names = {"place": pa.string(), "problem": pa.string()}
    types = {name: _TYPES[type(value)] for name, value in columns.items()}
    schema = pa.schema(names | types)
    content = next(iter(columns))
    progress = datasets.utils.tqdm(entries, desc=desc, unit=" records", delay=3.0)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = pathlib.Path(folder) / path.name
        with pa.ipc.new_stream(str(partial), schema) as stream:
            batch: list[RecordEntry] = []
            size = 0
            for entry in itertools.chain(progress, [None]):
                if entry is not None:
                    batch.append(entry)
                    size += len(entry[content]) + 100  # a source may have a million empty ones
                if batch and (entry is None or size > _BATCH_SIZE):
                    lists = [[each[name] for each in batch] for name in schema.names]
                    arrays = [
                        columnar.make_lists(values) if kind == _ID_LIST else pa.array(values, kind)
                        for values, kind in zip(lists, schema.types, strict=True)
                    ]
                    stream.write_batch(pa.record_batch(arrays, schema=schema))
                    batch = []
                    size = 0
        files.sync(partial)
        files.write_checksum(path, content=partial)
        partial.replace(path)
    files.sync_dir(path.parent)


def read_lists(dataset: "datasets.Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the chunks of a column of lists without copying: where each list begins and ends in
    the chunk's values (M + 1 offsets), and the values."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    for chunk in dataset.data.column(column).chunks:
        if len(chunk):
            offsets = chunk.offsets.to_numpy()
            # not flatten(), which reads anywhere in memory if the offsets are damaged
            yield offsets - offsets[0], chunk.values.to_numpy()[offsets[0] : offsets[-1]]


@contextlib.contextmanager
def hide_progress_without_terminal() -> Iterator[None]:
    """Disables progress bars of `datasets` if stderr is not a terminal: they would fill logs."""
    import datasets

    hides = not (sys.stderr.isatty() or datasets.are_progress_bars_disabled())
    if hides:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def build_once(cached: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time look for a file and create it; the others wait, and find it.
    Raises: UserError if the disk is full while the file is created."""
    lock = cached.with_name(f"{cached.name}.lock")
    if not os.access(cached.parent, os.W_OK):  # a read-only cache needs no lock
        yield
        return
    try:
        interval_s = distributed.poll_interval_s(0.05)
        with filelock.FileLock(lock).acquire(poll_interval=interval_s):
            yield
    except Exception as error:
        cause: BaseException | None = error  # datasets wraps a full disk in its own error types
        while cause is not None and getattr(cause, "errno", None) not in files.DISK_FULL_ERRNOS:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        free = shutil.disk_usage(cached.parent).free
        raise UserError(
            f"HF_DATASETS_CACHE = {cached.parent.parent.parent}: the disk or your quota is full "
            f"({free / MIB:,.0f} MiB of the disk are free). Free some space, or set "
            "HF_DATASETS_CACHE to a folder on a larger disk.",
            is_named=True,
        ) from error


def find_bad_records(
    dataset: "datasets.Dataset", *, max_examples: int
) -> tuple[int, list[RecordEntry]]:
    """Returns the number of bad records, and place and problem of the first of them."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    count = 0
    examples: list[RecordEntry] = []
    for batch in dataset.data.select(["place", "problem"]).to_batches():
        if batch.column(1).null_count < len(batch):
            bad = batch.filter(pc.is_valid(batch.column(1)))
            count += len(bad)
            examples += bad.slice(0, max_examples - len(examples)).to_pylist()
    return count, examples


def check_bad_records(dataset: "datasets.Dataset", *, data: DataConfig) -> None:
    """Checks that data.on_bad_record allows the bad records of a dataset.
    Raises: UserError naming the first bad records, their number, and what to change."""
    count, examples = find_bad_records(dataset, max_examples=MAX_NAMED_RECORDS)
    is_skipped = data.on_bad_record == "skip" and count <= data.max_bad_records
    if not count or (is_skipped and count < len(dataset)):
        return
    summary = f"{count:,} of {len(dataset):,} records cannot be used"
    if count > MAX_NAMED_RECORDS:
        summary += f"; these are the first {MAX_NAMED_RECORDS}"
    suggestion = "leave them out: data.on_bad_record=skip"
    if count == len(dataset):
        suggestion = "correct format or fields of the source"
    elif data.on_bad_record == "skip":
        suggestion = f"raise data.max_bad_records from {data.max_bad_records} to {count} or more"
    elif count > data.max_bad_records:
        suggestion += f" data.max_bad_records={count}"
    raise UserError([*list_examples(examples), f"{summary}. Correct them, or {suggestion}."])
