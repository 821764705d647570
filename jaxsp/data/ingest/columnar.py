"""Reads tables in parquet and Arrow files as Python records, in batches of bounded size."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from jaxsp.core.errors import UserError, at

LocatedRecord = tuple[str, Any, str | None]
"""Place of a record, such as `row 3`, the record, and the problem if it cannot be read. The place
is empty if the record is the whole file."""

_BATCH_BYTES = 2**24
"""Bytes of rows that are converted to Python objects together."""

Select = Callable[[list[str]], list[str]]
"""Returns the columns to read from a table with these columns; none if a required one is
missing."""


def rows_per_batch(num_rows: int, num_bytes: int, batch_bytes: int | None = None) -> int:
    """Number of rows with about `batch_bytes`; at least 1, at most 1000."""
    rows = (batch_bytes or _BATCH_BYTES) * num_rows // max(num_bytes, 1)
    return min(max(rows, 1), 1000)


def make_lists(arrays: list[np.ndarray]) -> pa.LargeListArray:
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays))


def locate_records(name: str, records: Iterable[LocatedRecord]) -> Iterator[LocatedRecord]:
    """Adds the name of a file or data set to the places of its records, and to errors."""
    with at(name):
        for place, record, problem in records:
            yield f"{name}, {place}" if place else name, record, problem


def read_batches(
    batches: Iterable[pa.RecordBatch], names: list[str], select: Select
) -> Iterator[LocatedRecord]:
    """Yields the rows of Arrow tables, counted from 1, as records with the selected columns. If a
    required column is missing, each record has the table's column names, with empty values."""
    selected = select(names)
    for name in selected:
        if names.count(name) > 1:
            raise UserError(f"has the column {name} twice. Rename or remove one of them.")
    number = 0
    for batch in batches:
        batch.validate()
        batch = batch.select(selected)
        for column in batch.columns:
            # a damaged offset would be read from outside of its memory
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # that is a problem of its row
                    raise
        num_rows = rows_per_batch(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, num_rows):
            part = batch.slice(start, num_rows)
            rows = _to_python(part) if selected else [(dict.fromkeys(names, ""), None)] * len(part)
            for row, problem in rows:
                number += 1
                yield f"row {number}", row, problem


def read_parquet(file: str, select: Select) -> Iterator[LocatedRecord]:
    """Yields the rows of a parquet file. Raises: pyarrow's errors if the file is damaged."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:
        names = table.schema_arrow.names
        groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
        num_bytes = sum(group.total_byte_size for group in groups)
        batches = table.iter_batches(
            # without the required columns, rows are only counted
            columns=select(names) or names[:1],
            batch_size=rows_per_batch(table.metadata.num_rows, num_bytes),
        )
        yield from read_batches(batches, names, select)


def read_arrow(file: str, select: Select) -> Iterator[LocatedRecord]:
    """Yields the rows of an Arrow file, or of one or more Arrow streams in a file.
    Raises: pyarrow's errors, or ValueError, if the file is damaged."""
    with pa.memory_map(file) as source:
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
            yield from read_batches(batches, table.schema.names, select)
            return
        source.seek(0)
        schema = pa.ipc.open_stream(source).schema

        def read_streams() -> Iterator[pa.RecordBatch]:
            source.seek(0)
            while source.tell() < source.size():
                stream = pa.ipc.open_stream(source)
                if stream.schema != schema:
                    raise ValueError("a second stream follows with other columns")
                yield from stream

        yield from read_batches(read_streams(), schema.names, select)
        # without this mark, a stream cut between two batches would look like a shorter stream
        source.seek(max(source.size() - 8, 0))
        if source.read(8) != b"\xff\xff\xff\xff\0\0\0\0":
            raise ValueError("the stream has no end")


def _to_python(batch: pa.RecordBatch) -> list[tuple[dict[str, Any] | None, str | None]]:
    """Returns the rows of a small batch, each with its problem if it cannot be read."""
    try:
        values = [_column_to_python(column) for column in batch.columns]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [(None, f"is not UTF-8 text ({error}).")]
        return [row for index in range(batch.num_rows) for row in _to_python(batch.slice(index, 1))]
    return [
        (dict(zip(batch.schema.names, row, strict=True)), None) for row in zip(*values, strict=True)
    ]


def _column_to_python(column: pa.Array) -> list[Any]:
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if is_list and pa.types.is_primitive(column.type.value_type):
        # 30 times as fast as conversion to Python numbers
        return [
            row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in column
        ]
    return [_parse_value(value, column.type) for value in column.to_pylist()]


_LIST_TYPES = (
    *(pa.ListType, pa.LargeListType, pa.FixedSizeListType),
    *(pa.ListViewType, pa.LargeListViewType),
)


def _parse_value(value: Any, kind: pa.DataType) -> Any:
    """Parses the JSON in a value, and drops null fields of objects. `datasets` writes a field as
    JSON if its type differs between records. A table gives each object the fields of all. A map
    stays pyarrow's list of pairs, with its nulls: it has only its own keys. Values of other types
    stay as they are."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(kind, _LIST_TYPES):
        return [_parse_value(item, kind.value_type) for item in value]
    if isinstance(kind, pa.MapType):
        return [
            (_parse_value(key, kind.key_type), _parse_value(item, kind.item_type))
            for key, item in value
        ]
    if isinstance(kind, pa.StructType):
        return {
            name: _parse_value(item, kind.field(name).type)
            for name, item in value.items()
            if item is not None
        }
    return value
