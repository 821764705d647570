"""Tables in files of parquet and Arrow, row by row as Python objects: no more of them at a time than memory holds."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from jaxsp.core.errors import UserError

LocatedRecord = tuple[str, Any, str | None]
"""Where a record stands, what it is, and why nobody can tell what it is, if so."""

_BATCH_BYTES = 2**24
"""Bytes of rows that become Python objects at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordColumns:
    """What a format takes from a record, by the record's own names."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def select_from(self, names: list[str]) -> list[str]:
        """Those to read from a table; none where one is missing that is required, for then no row can be used."""
        if not set(self.required) <= set(names):
            return []
        return [name for name in (*self.required, *self.optional) if name in names]


def read_batches(
    batches: Iterable[pa.RecordBatch], names: list[str], columns: RecordColumns, *, place: str
) -> Iterator[LocatedRecord]:
    """The rows of Arrow tables, counted from 1, as records with the columns that are wanted.

    Where a column that is required does not exist, a row is only the names of those that do, with nothing in them.
    """
    wanted = columns.select_from(names)
    if doubled := [name for name in wanted if names.count(name) > 1]:
        raise UserError(
            f"{place}: has the column {doubled[0]} twice. Rename one of them, or leave it out."
        )
    number = 0
    for batch in batches:
        batch.validate()
        batch = batch.select(wanted)
        at_once = max(_BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
        for start in range(0, batch.num_rows, min(at_once, 1000)):
            part = batch.slice(start, min(at_once, 1000))
            for row, problem in (
                _to_python(part) if wanted else [(dict.fromkeys(names, ""), None)] * part.num_rows
            ):
                number += 1
                yield f"{place}, row {number}", row, problem


def read_parquet(file: str, columns: RecordColumns) -> Iterator[LocatedRecord]:
    """The rows of a parquet file. Raises: what pyarrow raises where it is broken."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:
        names = table.schema_arrow.names
        num_bytes = sum(
            table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)
        )
        batch_size = min(max(_BATCH_BYTES * table.metadata.num_rows // max(num_bytes, 1), 1), 1000)
        # of a table without the columns that are wanted, the rows are only counted
        batches = table.iter_batches(
            columns=columns.select_from(names) or names[:1], batch_size=batch_size
        )
        yield from read_batches(batches, names, columns, place=file)


def read_arrow(file: str, columns: RecordColumns) -> Iterator[LocatedRecord]:
    """The rows of an Arrow file, or of a stream in a file. Raises: what pyarrow raises where it is broken, or ValueError."""
    with pa.memory_map(file) as source:
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
            yield from read_batches(batches, table.schema.names, columns, place=file)
            return
        source.seek(0)
        first = pa.ipc.open_stream(source)
        streams = itertools.chain(first, _read_later_streams(source, first.schema))
        yield from read_batches(streams, first.schema.names, columns, place=file)
        # a stream that is cut between two batches reads like a shorter one, but for this mark
        source.seek(max(source.size() - 8, 0))
        if source.read(8) != b"\xff\xff\xff\xff\0\0\0\0":
            raise ValueError("the stream has no end")


def _read_later_streams(source: pa.NativeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches of the streams that follow the first one in a file, such as `cat` makes."""
    while source.tell() < source.size():
        stream = pa.ipc.open_stream(source)
        if stream.schema != schema:
            raise ValueError("a second stream follows with other columns")
        yield from stream


def _to_python(batch: pa.RecordBatch) -> list[tuple[dict[str, Any] | None, str | None]]:
    """The rows of a small batch, or what is wrong with them."""
    try:
        values = [_column_to_python(column) for column in batch.columns]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [(None, f"is not UTF-8 text ({error})")]
        return [row for index in range(batch.num_rows) for row in _to_python(batch.slice(index, 1))]
    return [
        (dict(zip(batch.schema.names, row, strict=True)), None) for row in zip(*values, strict=True)
    ]


def _column_to_python(column: pa.Array) -> list[Any]:
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if lists and pa.types.is_primitive(
        column.type.value_type
    ):  # as Python's own numbers they would take 30 times as long
        return [
            one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column
        ]
    values = column.to_pylist()
    return (
        [_parse_value(value, column.type) for value in values]
        if _needs_parsing(column.type)
        else values
    )


def _needs_parsing(kind: pa.DataType) -> bool:
    """True if an Arrow type has objects, or JSON: `datasets` writes what has different types in different records so."""
    if isinstance(kind, pa.MapType):
        inner = [kind.key_type, kind.item_type]
    else:
        inner = [kind.field(index).type for index in range(kind.num_fields)]
    return isinstance(kind, pa.JsonType | pa.StructType) or any(map(_needs_parsing, inner))


_LIST_TYPES = (
    *(pa.ListType, pa.LargeListType, pa.FixedSizeListType),
    *(pa.ListViewType, pa.LargeListViewType),
)


def _parse_value(value: Any, kind: pa.DataType) -> Any:
    """Parses the JSON in a value, and drops null fields of objects.

    A table gives each object the fields of all. A map stays pyarrow's list of pairs, with its
    nulls: it has only its own keys. Values of other types stay as they are.
    """
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(kind, _LIST_TYPES):
        return [_parse_value(one, kind.value_type) for one in value]
    if isinstance(kind, pa.MapType):
        return [
            (_parse_value(key, kind.key_type), _parse_value(item, kind.item_type))
            for key, item in value
        ]
    if isinstance(kind, pa.StructType):
        return {
            name: _parse_value(one, kind.field(name).type)
            for name, one in value.items()
            if one is not None
        }
    return value
