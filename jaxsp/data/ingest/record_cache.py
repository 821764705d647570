"""Writes records to an Arrow file that is mapped into memory, once for all processes."""

import contextlib
import errno
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pyarrow as pa

from jaxsp.core.errors import UserError
from jaxsp.data.ingest import columnar
from jaxsp.runtime import distributed

if TYPE_CHECKING:
    import datasets

RecordEntry = dict[str, Any]
"""Row of the Arrow file: place, problem and content of a record."""

_BATCH_SIZE = 2**24
"""Characters or tokens that are written together: documents have a few to 100 million of them."""

_ENTRY_OVERHEAD = 100
"""Characters added for each entry: a source may have a million empty documents."""

_LEADER_WAIT_S = 1.0
"""Seconds that other processes wait for process 0 to begin a file. It may run on another machine,
and never begin."""

_PROGRESS_DELAY_S = 3.0
"""Seconds of reading before a progress bar appears."""

_ID_LIST = pa.large_list(pa.int32())

_COLUMN_TYPES = {
    "place": pa.string(),
    "problem": pa.string(),
    "text": pa.large_string(),
    "record": pa.large_string(),
    "input_ids": _ID_LIST,
    "labels": _ID_LIST,
}


def write_cache(
    entries: Iterator[RecordEntry], columns: list[str], path: pathlib.Path, *, desc: str
) -> None:
    """Writes entries to an Arrow file, which gets its name when it is complete.

    Args:
        columns: columns with the content of a record.
        desc: label of the progress bar, which only process 0 shows.
    """
    import datasets

    schema = pa.schema({name: _COLUMN_TYPES[name] for name in ("place", "problem", *columns)})
    progress = datasets.utils.tqdm(
        entries,
        desc=desc,
        unit=" records",
        delay=_PROGRESS_DELAY_S,
        disable=distributed.this_process().index > 0,
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = pathlib.Path(folder) / path.name
        with pa.ipc.new_stream(str(partial), schema) as stream:
            batch: list[RecordEntry] = []
            size = 0
            for entry in progress:
                batch.append(entry)
                size += len(entry[columns[0]]) + _ENTRY_OVERHEAD
                if size > _BATCH_SIZE:
                    stream.write_batch(_to_record_batch(batch, schema))
                    batch = []
                    size = 0
            if batch:
                stream.write_batch(_to_record_batch(batch, schema))
        partial.replace(path)


def _to_record_batch(entries: list[RecordEntry], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        values = [entry[field.name] for entry in entries]
        is_list = field.type == _ID_LIST
        columns.append(columnar.make_lists(values) if is_list else pa.array(values, field.type))
    return pa.record_batch(columns, schema=schema)


def read_lists(dataset: "datasets.Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the chunks of a column of lists without copying.

    Yields: where each list begins and ends in the chunk's values (M + 1 offsets), and the values.
    """
    assert dataset._indices is None, "the table's order is not the dataset's"
    for chunk in dataset.data.column(column).chunks:
        if len(chunk):
            offsets = chunk.offsets.to_numpy()
            yield offsets - offsets[0], chunk.flatten().to_numpy()


@contextlib.contextmanager
def hide_progress_without_terminal() -> Iterator[None]:
    """Disables progress bars of `datasets` if stderr is not a terminal: they would fill logs."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextlib.contextmanager
def build_once(cached: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time look for a file and create it; the others wait, and find it.

    Process 0 goes first if it comes in time, because only its progress is shown.
    Raises: UserError if the disk is full while the file is created.
    """
    lock = cached.with_name(f"{cached.name}.lock")
    if not os.access(cached.parent, os.W_OK):  # a read-only cache needs no lock
        yield
        return
    if distributed.this_process().index > 0 and not lock.exists():
        deadline = time.monotonic() + _LEADER_WAIT_S
        while not lock.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # the lock's file is created first, and then locked
    try:
        with filelock.FileLock(lock):
            yield
    except Exception as error:  # datasets wraps a full disk in its own error types
        if not _is_disk_full(error):
            raise
        free = shutil.disk_usage(cached.parent).free
        raise UserError(
            f"HF_DATASETS_CACHE = {cached.parent.parent.parent}: the disk or your quota is full "
            f"({free / 2**20:,.0f} MiB of the disk are free). Free some space, or set "
            "HF_DATASETS_CACHE to a folder on a larger disk."
        ) from error


def _is_disk_full(error: BaseException | None) -> bool:
    """Returns True for a full disk or an exhausted quota, also as the cause of another error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
