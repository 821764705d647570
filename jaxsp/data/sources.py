"""Documents as they lie on disk: files and globs, read once into an Arrow file that is mapped into memory from then on."""

import contextlib
import glob
import json
import os
import pathlib
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pyarrow as pa

from jaxsp.core import config, errors, processes

if TYPE_CHECKING:
    import datasets

_VERSION = 1
"""Part of the cache's name: count up when the same file would be read differently."""

_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}

_NOT_READ = (".csv", ".tsv", ".arrow", ".gz", ".zst", ".zip", ".xz", ".bz2")
"""Kinds of data that would make nonsense as plain text."""

_BATCH = 2**24
"""Characters or tokens of the documents that are written together; their lengths go from a few to 100 million."""

_FIRST_S = 1.0
"""How long others wait for process 0 to begin with a file; it may lie on another machine and never begin."""

_TYPES = {"place": pa.string(), "text": pa.large_string()}
_IDS = pa.large_list(pa.int32())


def read(source: config.Source, *, field: str) -> "datasets.Dataset":
    """The records of a source: `text`, or `input_ids` and perhaps `labels`, and `place`, where each came from.

    Args:   field: what the user calls the source in messages, such as data.train.0.source.
    Raises: UserError naming the file, and the line or record, that cannot be used.
    """
    import datasets

    try:
        files = _find(source.source)
        kind = _kind(files, source.format)
        names = _names(files, kind, source.format)
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in map(_resolved, files)]
        fingerprint = datasets.fingerprint.Hasher.hash((_VERSION, kind, names, state))
        cached = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / fingerprint / "records.arrow"
        cached.parent.mkdir(parents=True, exist_ok=True)
        with made_once(cached):
            if not cached.exists():
                _write(_documents(files, kind, names), names, cached)
    except (errors.UserError, PermissionError) as problem:
        raise errors.UserError(f"{field} = {source.source}: {problem}") from None
    dataset = datasets.Dataset.from_file(str(cached))
    # tokens are cached under this; from_file's own would go by the time at which the cache was written
    dataset._fingerprint = fingerprint
    return dataset


@contextlib.contextmanager
def made_once(cached: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time look for a file and make it; the others wait, and find it made.

    Process 0 goes first where it can: its progress is the one that is seen.
    """
    lock = cached.with_name(f"{cached.name}.lock")
    if not os.access(cached.parent, os.W_OK):  # a cache that is only read: nothing can be made there
        yield
        return
    if processes.here().index > 0 and not lock.exists():
        until = time.monotonic() + _FIRST_S
        while not lock.exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # the lock's file is made first, and then locked
    with filelock.FileLock(lock):
        yield


def lists(dataset: "datasets.Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each chunk of a column of lists, where the lists begin and end in its values, and the values: nothing is copied."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    for chunk in dataset.data.column(column).chunks:
        if len(chunk):
            offsets = chunk.offsets.to_numpy()
            yield offsets - offsets[0], chunk.flatten().to_numpy()


def _find(source: str) -> list[str]:
    """The files that a name or a glob stands for, sorted."""
    path = pathlib.Path(source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])).expanduser()
    if path.is_dir():
        raise errors.UserError(f"is a folder. Name its files, for example {source.rstrip('/')}/**/*.jsonl.")
    if path.is_file():
        return [str(path)]
    if not glob.has_magic(str(path)):
        raise errors.UserError(f"no such file below {pathlib.Path.cwd()}. Give a file, or a glob such as texts/**/*.txt.")
    files = sorted(file for file in glob.glob(str(path), recursive=True) if pathlib.Path(file).is_file())
    if not files:
        raise errors.UserError(f"no file matches below {pathlib.Path.cwd()}. `*` stays in one folder, `**` goes into folders.")
    return files


def _resolved(file: str) -> pathlib.Path:
    """One name for a file, wherever it is named from."""
    return pathlib.Path(file).resolve()


def _kind(files: list[str], record_format: str) -> str:
    suffixes = {pathlib.Path(file).suffix.lower(): file for file in files}
    if not_read := sorted(set(suffixes) & set(_NOT_READ)):
        some = suffixes[not_read[0]]
        raise errors.UserError(f"{some}: {not_read[0]} files are not read. Make .jsonl, .parquet or plain text files of them.")
    kinds = {_KINDS.get(suffix, "text"): file for suffix, file in suffixes.items()}
    if len(kinds) > 1:
        some = " and ".join(sorted(kinds.values()))
        raise errors.UserError(f"matches files of several kinds, such as {some}. Make each kind a source of its own.")
    (kind,) = kinds
    if kind == "text" and record_format == "tokens":
        raise errors.UserError("plain text holds no input_ids. Use format: text, or a .jsonl or .parquet file.")
    return kind


def _names(files: list[str], kind: str, record_format: str) -> list[str]:
    """The fields that are read: `labels` where the first record has them."""
    if record_format == "text":
        return ["text"]
    _, first = next((found for file in files for found in _records(file, kind)), ("", {}))
    return ["input_ids", "labels"] if isinstance(first, dict) and first.get("labels") is not None else ["input_ids"]


def _documents(files: list[str], kind: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Every record, checked."""
    empty = True
    for file in files:
        for place, record in _records(file, kind):
            document = _check(record, place, names)
            empty = empty and not len(document[names[0]])
            yield document
    if empty:
        raise errors.UserError(f"there is no record with {names[0]} in it. Give files with at least one.")


def _write(documents: Iterator[dict[str, Any]], names: list[str], path: pathlib.Path) -> None:
    """Writes the Arrow file, and only when all documents are in it gives it its name."""
    schema = pa.schema({name: _TYPES.get(name, _IDS) for name in ("place", *names)})
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = pathlib.Path(folder) / path.name
        with pa.ipc.new_stream(str(partial), schema) as stream:
            waiting: list[dict[str, Any]] = []
            size = 0
            for document in documents:
                waiting.append(document)
                size += len(document[names[0]])
                if size > _BATCH:
                    stream.write_batch(_batch(waiting, schema))
                    waiting, size = [], 0
            if waiting:
                stream.write_batch(_batch(waiting, schema))
        partial.replace(path)


def _batch(documents: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for name in schema.names:
        values = [document[name] for document in documents]
        if schema.field(name).type == _IDS:
            offsets = np.cumsum([0, *map(len, values)])
            columns.append(pa.LargeListArray.from_arrays(offsets, np.concatenate(values)))
        else:
            columns.append(pa.array(values, schema.field(name).type))
    return pa.record_batch(columns, schema=schema)


def _records(file: str, kind: str) -> Iterator[tuple[str, Any]]:
    """Each record of a file with the place where it stands."""
    if kind == "text":
        try:
            yield file, {"text": pathlib.Path(file).read_bytes().decode()}
        except UnicodeDecodeError as error:
            raise errors.UserError(f"{file}: is not UTF-8 text ({error}). Convert it, or leave it out.") from None
    elif kind == "json":
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{file}, line {number}"
                try:
                    if line.strip():
                        yield place, json.loads(line)
                except ValueError as error:
                    raise errors.UserError(f"{place}: is not JSON ({error}). Each line is one record.") from None
    else:
        yield from _parquet(file)


def _parquet(file: str) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    number = 0
    try:
        table = parquet.ParquetFile(file)
        names = [name for name in table.schema_arrow.names if name in ("text", "input_ids", "labels")]
        for batch in table.iter_batches(columns=names, batch_size=64):
            for row in range(batch.num_rows):
                number += 1
                yield f"{file}, record {number}", {name: _plain(batch.column(name)[row]) for name in names}
    except (pa.ArrowException, OSError) as error:
        raise errors.UserError(f"{file}: is not parquet, or is broken after record {number} ({error}).") from None


def _plain(scalar: pa.Scalar) -> Any:
    """A list stays an array, because Python's own numbers are 30 times slower."""
    is_list = scalar.is_valid and isinstance(scalar, pa.ListScalar | pa.LargeListScalar)
    return scalar.values.to_numpy(zero_copy_only=False) if is_list else scalar.as_py()


def _check(record: Any, place: str, names: list[str]) -> dict[str, Any]:
    """The fields of a record that are read, with their types. Raises: UserError naming the place."""
    if not isinstance(record, dict):
        raise errors.UserError(f'{place}: is a {type(record).__name__}, not a record such as {{"{names[0]}": ...}}.')
    for name in names:
        if record.get(name) is None:
            others = ", ".join(sorted(record)) or "nothing"
            raise errors.UserError(f"{place}: has no {name}; it has {others}. Every record of the source needs one.")
    if names == ["text"]:
        return {"place": place, "text": _text(record["text"], place)}
    ids = {name: _ids(record[name], f"{place}: {name}") for name in names}
    if "labels" not in names and record.get("labels") is not None:
        raise errors.UserError(f"{place}: has labels and the source's first record has none. Give all or none, as two sources.")
    if "labels" in names and len(ids["labels"]) != len(ids["input_ids"]):
        counts = f"{len(ids['labels'])} labels for {len(ids['input_ids'])} input_ids"
        raise errors.UserError(f"{place}: {counts}. Give one for each, not shifted, -100 where there is no loss.")
    return {"place": place, **ids}


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise errors.UserError(f"{place}: text is a {type(value).__name__}, not a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(f"{place}: text is not Unicode ({error}).") from None
    return value


def _ids(value: Any, place: str) -> np.ndarray:
    with contextlib.suppress(ValueError):  # lists of different lengths are no array
        array = np.asarray(value)
        ids = array.astype(np.int32) if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size) else None
        if ids is not None and np.array_equal(ids, array):
            return ids
    raise errors.UserError(f"{place} is not a list of whole numbers below 2,147,483,648.")
