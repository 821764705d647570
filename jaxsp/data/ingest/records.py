"""Files of every kind, read into records one after another; what is broken is never taken for the end of a file."""

import codecs
import collections
import contextlib
import csv
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jaxsp.core.errors import UserError
from jaxsp.data.ingest import columnar
from jaxsp.data.ingest.columnar import RecordColumns

FILE_TYPES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""What the end of a name stands for; any other is plain text, one document a file."""

CODECS = {".gz": "gzip", ".zst": "zstd"}

_UNSUPPORTED_SUFFIXES = """.zip .xz .bz2 .lz4 .snappy .tar .tgz .7z .rar .npy .npz .pkl .pickle .pt .pth .bin .safetensors .h5 .pdf .docx
    .xlsx .epub .db .sqlite .orc .avro .feather .tfrecord .array_record""".split()
"""Ends of names of what would make nonsense as plain text."""

_CHUNK_BYTES = 2**20
"""Bytes that are read from a compressed file, or looked through in a JSON array, at a time."""

_HEAD_BYTES = 2**16
"""Bytes that are read at a time until there is something other than spaces."""

_MAX_CELL_CHARS = 2**30
"""Characters of a csv cell: a quote that nobody closes makes one cell of the rest of the file."""

_TAIL_CHARS = 16
"""Characters before the end within which a JSON value may be cut: `-Infinity` and `\\ud83d\\ude00` are 9 and 12."""


def split_suffix(file: str) -> tuple[str, str | None]:
    """The end of a name that says what kind of file it is, and how it is compressed."""
    path = pathlib.PurePath(file.lower())
    codec = CODECS.get(path.suffix)
    return (pathlib.PurePath(path.stem).suffix if codec else path.suffix), codec


def detect_file_type(file: str) -> str:
    """What kind of file a name promises: json, csv, parquet, arrow or text. Raises: UserError for what is not read."""
    suffix, codec = split_suffix(file)
    if suffix in _UNSUPPORTED_SUFFIXES or (
        codec and FILE_TYPES.get(suffix) in ("parquet", "arrow")
    ):
        both = suffix + pathlib.Path(file).suffix.lower() * bool(codec)
        raise UserError(
            f"{file}: {both} files are not read. Make .jsonl, .parquet or plain text files of them."
        )
    if codec and not suffix:
        example = f"{file.removesuffix(pathlib.Path(file).suffix)}.jsonl{pathlib.Path(file).suffix}"
        raise UserError(
            f"{file}: its name does not say what is compressed. Call it {example} if it is lines of JSON."
        )
    return FILE_TYPES.get(suffix, "text")


def read_file(file: str, columns: RecordColumns) -> Iterator[columnar.LocatedRecord]:
    """Every record of a file in order: none is left out, those that cannot be read have a problem instead.

    Raises: UserError naming the file and the last record before the place where it is broken.
    """
    last = ""
    try:
        _check_file(file)
        for found in _READERS[detect_file_type(file)](file, columns):
            last = found[0]
            yield found
    except PermissionError:
        raise UserError(
            f"{file}: may not be read. Change its permissions, or leave it out."
        ) from None
    except (
        OSError,
        ValueError,
        csv.Error,
        RecursionError,
    ) as error:  # pyarrow's errors are ValueErrors or OSErrors
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file}: is broken {f'after {last[len(file) + 2 :]}' if last else 'before the end of its first record'} "
            f"({' '.join(str(error).split()).rstrip('.')}). Copy or make it again: nobody can say how many records are missing."
        ) from None


def _check_file(file: str) -> None:
    """Raises: UserError for a pointer in place of a file, and for nothing at all where a compressed file should be."""
    size = os.path.getsize(file)
    if split_suffix(file)[1] and not size:
        raise UserError(f"{file}: is empty, not even compressed. Copy or make it again.")
    if size < 1024 and pathlib.Path(file).read_bytes().startswith(b"version https://git-lfs"):
        raise UserError(f"{file}: is a pointer of git-lfs, not the file itself: git lfs pull.")


@contextlib.contextmanager
def _open_decompressed(file: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed."""
    codec = split_suffix(file)[1]
    with contextlib.ExitStack() as stack:
        if codec is None:
            yield stack.enter_context(open(file, "rb"))
        else:
            compressed = stack.enter_context(pa.OSFile(file, "rb"))
            plain = pa.CompressedInputStream(
                compressed, codec
            )  # unlike zlib alone, it notices where one is cut short
            yield stack.enter_context(io.BufferedReader(plain, _CHUNK_BYTES))


def _read_text(file: str, columns: RecordColumns) -> Iterator[columnar.LocatedRecord]:
    with _open_decompressed(file) as stream:
        document = stream.read()
    try:
        yield file, {"text": document.decode("utf-8-sig")}, None
    except UnicodeDecodeError as error:
        yield file, None, f"is not UTF-8 text ({error})"


def _is_json_array(file: str) -> bool:
    """Whether a file is one array of records; in lines of JSON, a line that is an array is a mistake in that line."""
    if split_suffix(file)[0] != ".json":
        return False
    with _open_decompressed(file) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        while not head and (chunk := stream.read(_HEAD_BYTES)):
            head = chunk.lstrip()
        return head.startswith(b"[")


def _read_json(file: str, columns: RecordColumns) -> Iterator[columnar.LocatedRecord]:
    is_array = _is_json_array(file)
    with _open_decompressed(file) as stream:
        if is_array:
            for number, (record, problem) in enumerate(_read_json_array(stream), 1):
                yield f"{file}, record {number}", record, problem
            return
        decoder, doubled = _make_decoder()
        for number, line in enumerate(stream, 1):
            record, problem = None, None
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                record = decoder.decode(text)
            except UnicodeDecodeError as error:
                problem = f"is not UTF-8 text ({error})"
            except (ValueError, RecursionError) as error:
                problem = f"is not JSON ({error}); each line is one record, or a .json file is one array of them"
            yield f"{file}, line {number}", record, problem or _duplicate_key_problem(doubled)


def _make_decoder() -> tuple[json.JSONDecoder, list[str]]:
    """A decoder, and the names it met twice in one object; of those, JSON itself would silently keep the last value."""
    doubled: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) < len(found):
            counts = collections.Counter(name for name, _ in found)
            doubled.extend(name for name in made if counts[name] > 1)
        return made

    return json.JSONDecoder(object_pairs_hook=pairs), doubled


def _duplicate_key_problem(names: list[str]) -> str | None:
    """The problem of a record with names that occur twice, which are forgotten for the next record."""
    if not names:
        return None
    problem = f"has {names[0]} twice"
    names.clear()
    return problem


def _read_json_array(stream: io.BufferedReader) -> Iterator[tuple[Any, str | None]]:
    """The elements of a JSON array, of which little more than one is in memory. Raises: ValueError where it is no array."""
    decoder, doubled = _make_decoder()
    decode = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape").decode
    text, at, ended, more, expected = "", 0, False, True, "["
    while True:
        if more:
            # as much again as there is: a long record is looked through a few times, not once for each chunk
            chunk = stream.read(max(_CHUNK_BYTES, len(text) - at))
            text, at, ended, more = text[at:] + decode(chunk, final=not chunk), 0, not chunk, False
        at = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]  # no spaces match too
        if at == len(text):
            if ended:
                break
            more = True
        elif expected == "value" or (expected == "value or ]" and text[at] != "]"):
            try:
                value, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if ended or not (
                    error.pos > len(text) - _TAIL_CHARS
                    or error.msg.startswith("Unterminated string")
                ):
                    raise
                more = True
            else:
                more = end == len(text) and not ended  # half a number is a number
                if not more:
                    yield value, _duplicate_key_problem(doubled) or _utf8_problem(text[at:end])
                    at, expected = end, ", or ]"
            if more:
                doubled.clear()
        elif text[at] not in expected or expected == "nothing":
            raise ValueError(f"expecting {expected}, and there is {text[at]}")
        else:
            expected = {"[": "value or ]", ",": "value", "]": "nothing"}[text[at]]
            at += 1
    if expected != "nothing":
        raise ValueError("the array has no end")


_WHITESPACE = re.compile(r"[ \t\r\n]*")


def _utf8_problem(text: str) -> str | None:
    """The problem of text decoded with surrogates for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8 text"
    return None


def _read_csv(file: str, columns: RecordColumns) -> Iterator[columnar.LocatedRecord]:
    csv.field_size_limit(_MAX_CELL_CHARS)  # of this process; Python's own is 131,072
    with _open_decompressed(file) as stream:
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        table = csv.reader(
            lines, delimiter="\t" if split_suffix(file)[0] == ".tsv" else ",", strict=True
        )
        names = next(table, [])
        if not names or len(set(names)) < len(names):
            said = "names a column twice" if names else "is empty"
            raise UserError(f"{file}: its first line {said}. It has to name the columns.")
        line = table.line_num + 1
        for cells in table:
            place, line = f"{file}, line {line}", table.line_num + 1
            if len(cells) == len(names):
                yield place, dict(zip(names, cells, strict=True)), _utf8_problem("".join(cells))
            elif cells:
                yield (
                    place,
                    None,
                    f"has {len(cells)} cells, and the first line names {len(names)} columns",
                )


_READERS = {
    "text": _read_text,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": columnar.read_parquet,
    "arrow": columnar.read_arrow,
}
