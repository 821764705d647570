"""Types of files that hold records: each is read as records, and a truncated file is an error."""

import collections
import csv
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from jaxsp.core.errors import UserError, at

TEXT_SUFFIXES = ".txt .md .text .rst .tex .html .htm .xml .log .py .yaml .yml".split()
"""Suffixes of plain text; a missing file with such a name is not looked up on the hub."""

_CODECS = {".gz": "gzip", ".zst": "zstd"}

_UNSUPPORTED_SUFFIXES = """.zip .xz .bz2 .lz4 .snappy .tar .tgz .7z .rar .npy .npz .pkl .pickle .pt
    .pth .bin .safetensors .h5 .pdf .docx .xlsx .epub .db .sqlite .orc .avro .feather .tfrecord
    .array_record""".split()
"""Suffixes of files that would be nonsense as plain text."""

_CHUNK_BYTES = 2**20

_MAX_CELL_CHARS = 2**30
"""Limit of a csv cell: a quote without its end makes one cell of the rest of the file."""

LocatedRecord = tuple[str, Any, str | None]
"""Place of a record, such as `row 3`, the record, and the problem if it cannot be read. The place
is empty if the record is the whole file."""

_BATCH_BYTES = 2**24
"""Bytes of rows that are converted to Python objects together."""

Select = Callable[[list[str]], list[str]]
"""Returns the columns to read from a table with these columns."""


def _read_text(file: str, select: Select) -> Iterator[LocatedRecord]:
    with _open_text(file) as stream:
        yield "", {"text": stream.read()}, None


def _read_json(file: str, select: Select) -> Iterator[LocatedRecord]:
    is_array = False
    with _open_text(file) as stream:
        if split_suffix(file)[0] == ".json":  # in .jsonl, a line with an array is one bad record
            blocks = iter(lambda: stream.read(4096), "")
            is_array = next(filter(None, (block.lstrip()[:1] for block in blocks)), "") == "["
    with _open_text(file) as stream:
        if is_array:
            for number, record in enumerate(_DECODER.decode(stream.read()), 1):
                yield f"record {number}", record, None
            return
        for number, line in enumerate(stream, 1):
            record = problem = None
            if not line.strip():
                continue
            try:
                record = _DECODER.decode(line.strip())
            except UserError as error:
                problem = str(error)
            except (ValueError, RecursionError) as error:
                problem = (
                    f"is not JSON ({error}); each line must be one record, or a .json file one "
                    "array of records."
                )
            yield f"line {number}", record, problem


def _read_csv(file: str, select: Select) -> Iterator[LocatedRecord]:
    csv.field_size_limit(_MAX_CELL_CHARS)  # applies to this process; Python's default is 131,072
    with _open_text(file) as stream:
        delimiter = "\t" if split_suffix(file)[0] == ".tsv" else ","
        table = csv.reader(stream, delimiter=delimiter, strict=True)
        names = next(table, [])
        if not names:
            raise UserError("its first line is empty. It must name the columns.")
        if len(set(names)) < len(names):
            raise UserError("its first line names a column twice. Rename one of them.")
        line = table.line_num + 1
        for cells in table:
            place = f"line {line}"
            line = table.line_num + 1
            if len(cells) == len(names):
                yield place, dict(zip(names, cells, strict=True)), None
            elif cells:
                problem = f"has {len(cells)} cells, but the first line names {len(names)} columns."
                yield place, None, problem


def _open_text(file: str) -> io.TextIOWrapper:
    """Opens a file, which may be compressed. A byte that is not UTF-8 becomes a surrogate, which no
    format accepts."""
    # unlike zlib, pyarrow reports a truncated stream
    stream = pa.input_stream(file, compression=split_suffix(file)[1], buffer_size=0)
    buffered = io.BufferedReader(stream, _CHUNK_BYTES)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")


def locate_records(name: str, records: Iterable[LocatedRecord]) -> Iterator[LocatedRecord]:
    """Adds the name of a file or data set to the places of its records, and to errors.
    Raises: UserError for damage, with the last record before it."""
    place = ""
    with at(name):
        try:
            for place, record, problem in records:
                yield f"{name}, {place}" if place else name, record, problem
        except UserError:
            raise
        except PermissionError:
            raise UserError(
                "no permission to read it. Change its permissions, or leave it out."
            ) from None
        # pyarrow's errors are ValueErrors or OSErrors
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            after = f"after {place}" if place else "before the end of its first record"
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"is broken {after} ({reason}). Copy or create it again: the number of missing "
                "records is unknown."
            ) from None


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises: UserError for a name that occurs twice; json keeps the last."""
    result = dict(pairs)
    if len(result) < len(pairs):
        ((name, _), *_) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise UserError(f"has {name} twice.")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def read_batches(
    batches: Iterable[pa.RecordBatch], names: list[str], select: Select
) -> Iterator[LocatedRecord]:
    """Yields the rows of Arrow tables as records with the selected columns."""
    selected = select(names)
    for name in selected:
        if names.count(name) > 1:
            raise UserError(f"has the column {name} twice. Rename or remove one of them.")
    number = 0
    for batch in batches:
        batch.validate()
        batch = batch.select(selected)
        batch.validate(full=True)  # a damaged offset would be read from outside of its memory
        num_rows = _rows_per_batch(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, num_rows):
            part = batch.slice(start, num_rows)
            columns = map(_column_to_python, part.columns)
            for row in zip(*columns, strict=True) if selected else [()] * len(part):
                number += 1
                yield f"row {number}", dict(zip(selected, row, strict=True)), None


def _rows_per_batch(num_rows: int, num_bytes: int) -> int:
    """Number of rows with about `_BATCH_BYTES`; at least 1, at most 1000."""
    rows = _BATCH_BYTES * num_rows // max(num_bytes, 1)
    return min(max(rows, 1), 1000)


def _read_parquet(file: str, select: Select) -> Iterator[LocatedRecord]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:
        names = table.schema_arrow.names
        groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
        num_bytes = sum(group.total_byte_size for group in groups)
        batches = table.iter_batches(
            columns=select(names) or names[:1],
            batch_size=_rows_per_batch(table.metadata.num_rows, num_bytes),
        )
        yield from read_batches(batches, names, select)


def _read_arrow(file: str, select: Select) -> Iterator[LocatedRecord]:
    """Yields the rows of an Arrow file, or of an Arrow stream in a file."""
    with pa.memory_map(file) as source:
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
            yield from read_batches(batches, table.schema.names, select)
            return
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        yield from read_batches(stream, stream.schema.names, select)
        end = source.tell()
        # without this mark, a stream cut between two batches would look like a shorter stream
        source.seek(max(source.size() - 8, 0))
        if source.read(8) != b"\xff\xff\xff\xff\0\0\0\0" or end < source.size():
            raise ValueError("it is not one whole Arrow stream")


def _column_to_python(column: pa.Array) -> list[Any]:
    is_list = isinstance(column.type, pa.ListType | pa.LargeListType)
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


_READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), ("json", _read_json)),
    **dict.fromkeys((".csv", ".tsv"), ("csv", _read_csv)),
    ".parquet": ("parquet", _read_parquet),
    ".arrow": ("arrow", _read_arrow),
}
"""Type and reader of files by suffix; any other file is plain text."""

TEXT = "text"

COMPRESSIBLE = (TEXT, "json", "csv")
"""Types that may be compressed as a whole."""


def split_suffix(file: str) -> tuple[str, str | None]:
    """Returns the suffix that names a file's type, and the codec that compresses it."""
    path = pathlib.PurePath(file.lower())
    codec = _CODECS.get(path.suffix)
    return (pathlib.PurePath(path.stem).suffix if codec else path.suffix), codec


def detect_file_type(file: str) -> tuple[str, Callable[[str, Select], Iterator[LocatedRecord]]]:
    """Returns the type that a file's name stands for, and its reader.
    Raises: UserError if files of this name are not supported."""
    suffix, codec = split_suffix(file)
    file_type, read = _READERS.get(suffix, (TEXT, _read_text))
    codec_suffix = pathlib.Path(file).suffix if codec else ""
    if suffix in _UNSUPPORTED_SUFFIXES or (codec and file_type not in COMPRESSIBLE):
        raise UserError(
            f"{file}: {suffix}{codec_suffix.lower()} files are not supported. Convert to .jsonl, "
            ".parquet or plain text."
        )
    if codec and not suffix:
        example = f"{file.removesuffix(codec_suffix)}.jsonl{codec_suffix}"
        raise UserError(
            f"{file}: its name does not show what is compressed. Rename it to {example} if it is "
            "lines of JSON."
        )
    return file_type, read


def read_file(file: str, select: Select, *, name: str | None = None) -> Iterator[LocatedRecord]:
    """Yields every record of a file in order; those that cannot be read have a problem instead.
    Args: name: the file's name in places and errors, if it has another one.
    Raises: UserError naming the file, and the last record before the damage."""

    def read() -> Iterator[LocatedRecord]:
        size = os.path.getsize(file)
        if split_suffix(file)[1] and not size:
            raise UserError("is empty, but a compressed file has a header. Copy it again.")
        if size < 1024 and pathlib.Path(file).read_bytes().startswith(b"version https://git-lfs"):
            raise UserError("is a git-lfs pointer, not the file. Run git lfs pull.")
        yield from detect_file_type(file)[1](file, select)

    return locate_records(name or file, read())
