"""Documents as they lie on disk or on the hub, read once into an Arrow file that is mapped into memory from then on."""

import collections
import contextlib
import dataclasses
import errno
import functools
import glob
import itertools
import os
import pathlib
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.config.data_schema import DataConfig, SourceConfig
from jaxsp.core import errors, paths
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import columnar, formats, hub
from jaxsp.data.ingest import records as files
from jaxsp.data.ingest.columnar import RecordColumns
from jaxsp.data.ingest.formats import FormatError
from jaxsp.runtime import distributed

if TYPE_CHECKING:
    import datasets

_CACHE_VERSION = 3
"""Part of the cache's name: count up when the same file would be read differently."""

_BATCH_SIZE = 2**24
"""Characters or tokens of the documents that are written together; their lengths go from a few to 100 million."""

_LEADER_WAIT_S = 1.0
"""How long others wait for process 0 to begin with a file; it may lie on another machine and never begin."""

_MAX_CHECKED_BAD = 100
"""Bad records after which reading stops: the format is not what was said, and reading on would say the same again."""

_MAX_NAMED_RECORDS = 5
"""Bad records that a message names."""

_ID_LIST = pa.large_list(pa.int32())
_COLUMN_TYPES = {
    "place": pa.string(),
    "problem": pa.string(),
    "text": pa.large_string(),
    "record": pa.large_string(),
}

_KEPT_COLUMNS = {
    "text": ("text",),
    "messages": ("record",),
    "prompt_completion": ("record",),
    "tokens": ("input_ids",),
}
"""What is kept of the records of each format; of tokens, labels too where the records have them."""

RecordEntry = dict[str, Any]
"""A row of the Arrow file: place, problem and what is kept of the record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecordSource:
    """Where a source's records come from."""

    identity: Any
    """Changes when they do."""
    records: Callable[[], Iterator[columnar.LocatedRecord]]
    split: str | None = None
    """Part of the records to select after reading; None: all."""


def read(source: SourceConfig, *, data: DataConfig, field: str) -> "datasets.Dataset":
    """The records of a source, in its order and none left out, read once and from then on mapped into memory.

    Columns: `place`, where a record stands; `problem`, why it cannot be used, or null; and of a record without problem
    `text`; or `input_ids` and, where the first record has them, `labels`; or `record`, its messages or prompt and completion
    as JSON under our names.

    Args:   field: what the user calls the source in messages, such as data.train.0.source.
    Raises: UserError naming the file, and the line or row, that cannot be used, as far as `data` does not skip it.
    """
    import datasets

    asked = f"{field} = {source.source}"
    try:
        columns = formats.resolve_columns(source, field=field)
        origin = _resolve_source(source, columns, field=field)
        names = _choose_columns(source, origin)
        told = (source.format, names, sorted(source.fields.items()), sorted(source.roles.items()))
        fingerprint = datasets.fingerprint.Hasher.hash((_CACHE_VERSION, told, origin.identity))
        cached = (
            pathlib.Path(datasets.config.HF_DATASETS_CACHE)
            / "jaxsp"
            / fingerprint
            / "records.arrow"
        )
        cached.parent.mkdir(parents=True, exist_ok=True)
        with build_once(cached):
            if not cached.exists():
                _write_cache(
                    _check_records(source, origin, names, data=data),
                    names,
                    cached,
                    desc=f"Reading {source.source}",
                )
    except (UserError, PermissionError) as error:
        problems = error.problems if isinstance(error, UserError) else [str(error)]
        group = f"{field.rpartition('.')[0]}."
        # a problem of another field of the source says so itself
        raise UserError(
            one if one.startswith(group) else f"{asked}: {one}" for one in problems
        ) from None
    dataset = datasets.Dataset.from_file(str(cached))
    if origin.split is not None:
        # the whole source is cached, so that parts for training and for evaluation share it
        dataset = hub.select_ranges({"train": dataset}, origin.split, field=field)
        fingerprint = datasets.fingerprint.Hasher.hash((fingerprint, origin.split))
    # tokens are cached under this; from_file's own would go by the time at which the cache was written
    dataset._fingerprint = fingerprint
    check_bad_records(dataset, data=data, error_prefix=asked)
    return dataset


def check_no_duplicates(given: Mapping[str, SourceConfig]) -> None:
    """Checks that no file is read twice in the same way, which would count its documents twice.

    Args:   given: sources that can be read, by the field that names them, such as data.train.0.
    Raises: UserError naming the second source.
    """
    seen: dict[tuple[str, ...], str] = {}
    # the same file with other fields, or another split, has other documents
    ways = {
        field: source.model_dump_json(exclude={"source", "name", "weight"})
        for field, source in given.items()
    }
    times = collections.Counter(ways.values())
    for field, source in given.items():
        how = ways[field]
        if times[how] == 1:
            continue  # reading has listed the files already; on network disks it takes seconds
        path = _source_path(source, field=f"{field}.source")
        if not (path.is_file() or glob.has_magic(str(path))):
            continue
        for file in _find_files(path, source):
            first = seen.setdefault((os.path.realpath(file), how), field)
            if first != field:
                raise UserError(
                    f"{field}.source = {source.source}: has the file {file}, which is also in {first}, "
                    "so that its documents would count twice. Leave it out of one of them; to repeat "
                    "a source, raise its weight."
                )


def check_bad_records(dataset: "datasets.Dataset", *, data: DataConfig, error_prefix: str) -> int:
    """How many records are left out, by their column `problem`, if data.on_bad_record allows it.

    Args:   asked: how a message about the source begins: the field and its value.
    Raises: UserError naming the first of those that cannot be used, how many there are, and what to do.
    """
    number, first = find_bad_records(dataset, max_examples=_MAX_NAMED_RECORDS)
    if number and (data.on_bad_record == "error" or number > data.max_bad_records):
        verdict = _describe_bad_records(first, f"{number:,} of {len(dataset):,}", number, data)
        raise UserError(f"{error_prefix}: {problem}" for problem in verdict)
    return number


def find_bad_records(
    dataset: "datasets.Dataset", *, max_examples: int
) -> tuple[int, list[tuple[str, str]]]:
    """How many records cannot be used, and place and problem of the first of them."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    number, first = 0, list[tuple[str, str]]()
    for batch in dataset.data.select(["place", "problem"]).to_batches():
        if batch.column(1).null_count < len(batch):
            found = batch.filter(pc.is_valid(batch.column(1)))
            number += len(found)
            first += [
                (row["place"], row["problem"])
                for row in found.slice(0, max_examples - len(first)).to_pylist()
            ]
    return number, first


@contextlib.contextmanager
def build_once(cached: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time look for a file and make it; the others wait, and find it made.

    Process 0 goes first where it can: its progress is the one that is seen.
    Raises: UserError if the disk is full while the file is made.
    """
    lock = cached.with_name(f"{cached.name}.lock")
    if not os.access(
        cached.parent, os.W_OK
    ):  # a cache that is only read: nothing can be made there
        yield
        return
    if distributed.this_process().index > 0 and not lock.exists():
        until = time.monotonic() + _LEADER_WAIT_S
        while not lock.exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # the lock's file is made first, and then locked
    try:
        with filelock.FileLock(lock):
            yield
    except Exception as error:
        if not _is_disk_full(error):
            raise
        free = shutil.disk_usage(cached.parent).free
        raise UserError(
            f"HF_DATASETS_CACHE = {cached.parent.parent.parent}: the disk or your quota "
            f"is full ({free / 2**20:,.0f} MiB of the disk are free). "
            "Make room there, or set HF_DATASETS_CACHE to a folder on a larger disk."
        ) from error


def _is_disk_full(error: BaseException | None) -> bool:
    """True if `error`, or an error that caused it, is a full disk or an exhausted quota. `datasets` wraps them."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_lists(dataset: "datasets.Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each chunk of a column of lists, where the lists begin and end in its values, and the values: nothing is copied."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    for chunk in dataset.data.column(column).chunks:
        if len(chunk):
            offsets = chunk.offsets.to_numpy()
            yield offsets - offsets[0], chunk.flatten().to_numpy()


def _describe_bad_records(
    first: list[tuple[str, str]], said: str, bad: int, data: DataConfig
) -> list[str]:
    """The problems of a source that has more bad records than it may have."""
    if data.on_bad_record == "error":
        them = "them" if bad > 1 else "it"
        way_out = f"Mend {them}, or leave {them} out: data.on_bad_record=skip"
        way_out += f" data.max_bad_records={bad}." if bad > data.max_bad_records else "."
    else:
        way_out = f"Mend them, or set data.max_bad_records, which is {data.max_bad_records}, to {bad} or more."
    which = f"; these are the first {_MAX_NAMED_RECORDS}" if bad > _MAX_NAMED_RECORDS else ""
    return [*_list_bad_records(first), f"{said} records cannot be used{which}. {way_out}"]


def _list_bad_records(first: list[tuple[str, str]]) -> list[str]:
    """A line for each of the first bad records; what is the same as in the line before is not said again."""
    before = [None, *(problem for _, problem in first)]
    return [
        f"{place}: {'the same' if problem == last else problem}."
        for (place, problem), last in zip(first[:_MAX_NAMED_RECORDS], before, strict=False)
    ]


def _resolve_source(source: SourceConfig, columns: RecordColumns, *, field: str) -> _RecordSource:
    """The files, saved folder or hub data set that a source's name stands for: what lies here comes first."""
    path = _source_path(source, field=field)
    named = (
        not glob.has_magic(str(path))
        and not path.exists()
        and files.detect_file_type(str(path)) == "text"
    )
    if path.is_dir() and hub.is_saved_dataset(path):
        dataset = hub.open_saved_dataset(path, source, field=field)
    elif (
        named
        and files.split_suffix(source.source)[0] not in _TEXT_SUFFIXES
        and hub.is_hub_name(source.source)
    ):
        dataset = hub.open_hub_dataset(source, field=field)
    else:
        if source.split is not None:
            hub.resolve_ranges(
                source.split, {"train": hub.UNKNOWN_LENGTH}, field=field
            )  # before everything is read
        for name in ("subset", "revision"):
            if value := getattr(source, name):
                raise UserError(
                    f"{field.rpartition('.')[0]}.{name} = {value}: files have no {name}. Leave it out."
                )
        found = _find_files(path, source)
        kind = _common_file_type(found, source.format)
        read = functools.partial(_read_files, found, columns)
        return _RecordSource(
            identity=(kind, _file_identities(found)), records=read, split=source.split
        )
    # one that was made again from other data may keep its fingerprint
    place = f"{source.source} ({source.split})" if "[" in (source.split or "") else source.source
    made = [pathlib.Path(file["filename"]) for file in dataset.cache_files]
    return _RecordSource(
        identity=(source.source, dataset._fingerprint, _file_identities(made)),
        records=functools.partial(hub.read_records, dataset, columns, place=place),
    )


def _source_path(source: SourceConfig, *, field: str) -> pathlib.Path:
    written = source.source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    return paths.expand_user(written, field=field)


_TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".text",
    ".rst",
    ".tex",
    ".html",
    ".htm",
    ".xml",
    ".log",
    ".py",
    ".yaml",
    ".yml",
)
"""Ends of names of plain text; a name like these that is no file is not looked for on the hub."""


def _read_files(found: list[str], columns: RecordColumns) -> Iterator[columnar.LocatedRecord]:
    return itertools.chain.from_iterable(files.read_file(file, columns) for file in found)


def _find_files(path: pathlib.Path, source: SourceConfig) -> list[str]:
    """The files that a name or a glob stands for, each once, sorted."""
    if path.is_dir():
        endings = (file.suffix for file in path.rglob("*.*") if file.is_file())
        example = f"{source.source.rstrip('/')}/**/*{next(endings, '.jsonl')}"
        raise UserError(f"is a folder. Name its files, for example {example}.")
    if path.is_file():
        return [str(path)]
    if not glob.has_magic(str(path)):
        raise UserError(
            f"no such file below {pathlib.Path.cwd()}. Give a file, a glob such as texts/**/*.txt, "
            "or the name of a data set on the hub, such as HuggingFaceH4/ultrachat_200k."
        )
    found = [file for file in glob.glob(str(path), recursive=True) if pathlib.Path(file).is_file()]
    if not found:
        raise UserError(
            f"no file matches below {pathlib.Path.cwd()}. `*` stays in one folder, `**` goes into folders."
        )
    # `**/**` and symbolic links find a file under several names; it is read once, under the shortest
    found.sort(key=lambda file: (len(pathlib.PurePath(file).parts), file), reverse=True)
    return sorted({os.path.realpath(file): file for file in found}.values())


def _file_identities(found: Sequence[str | pathlib.Path]) -> list[tuple[str, int, int, int]]:
    """Identity of a file, which changes when the file does; independent of the working directory.

    `cp -p`, `rsync -t` and tar set a file's mtime, and nothing sets its ctime. Inodes are left out: on some network file
    systems they differ from mount to mount.
    """
    resolved = [pathlib.Path(file).resolve() for file in found]
    stats = [file.stat() for file in resolved]
    return [
        (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in zip(resolved, stats, strict=True)
    ]


def _common_file_type(found: list[str], record_format: str) -> str:
    """The one kind that all files are of."""
    kinds = {files.detect_file_type(file): file for file in found}
    if len(kinds) > 1:
        some = " and ".join(sorted(kinds.values()))
        raise UserError(
            f"matches files of several kinds, such as {some}. Make each kind a source of its own."
        )
    (kind,) = kinds
    if kind == "text" and record_format != "text":
        needed = errors.format_choices(formats.FORMAT_FIELDS[record_format][0])
        raise UserError(
            f"plain text holds no {needed}. Use format: text, or a .jsonl or .parquet file."
        )
    return kind


def _choose_columns(source: SourceConfig, origin: _RecordSource) -> list[str]:
    """The columns that are kept: `labels` where the first record has them, or the user says what they are called."""
    names = list(_KEPT_COLUMNS[source.format])
    if source.format == "tokens":
        labels = source.fields.get("labels", "labels")
        usable = (
            record
            for _, record, problem in itertools.islice(origin.records(), _MAX_CHECKED_BAD)
            if problem is None
        )
        first = next((record for record in usable if isinstance(record, dict)), {})
        if "labels" in source.fields or formats.has_field(first, labels):
            names.append("labels")
    return names


def _check_records(
    source: SourceConfig, origin: _RecordSource, names: list[str], *, data: DataConfig
) -> Iterator[RecordEntry]:
    """Every record, checked. Raises: UserError where there are too many bad ones, or none that is of use."""
    check = formats.make_checker(source, has_labels="labels" in names)
    nothing = {
        name: np.zeros(0, np.int32) if name in ("input_ids", "labels") else "" for name in names
    }
    unseen = {
        theirs: ours
        for ours, theirs in source.fields.items()
        if ours in formats.FORMAT_FIELDS[source.format][1]
    }
    unseen_roles = set(source.roles)
    most = max(data.max_bad_records, _MAX_CHECKED_BAD)
    number, bad, usable, first = 0, 0, False, list[tuple[str, str]]()
    for name, record, problem in origin.records():
        number += 1
        place = _escape_surrogates(name)
        if problem is None:
            if unseen and isinstance(record, dict):
                unseen = {theirs: ours for theirs, ours in unseen.items() if theirs not in record}
            if unseen_roles:
                unseen_roles -= formats.find_roles(record, source)
            try:
                entry = check(record)
                usable = usable or len(entry[names[0]]) > 0
                yield {"place": place, "problem": None, **entry}
                continue
            except FormatError as reason:
                problem = str(reason)
        problem = _escape_surrogates(problem)
        bad += 1
        first += [(place, problem)] * (len(first) < _MAX_NAMED_RECORDS)
        if bad > most:
            way_out = "Correct format or fields, mend the records, or set data.on_bad_record=skip and data.max_bad_records to more."
            raise UserError(
                [
                    *_list_bad_records(first),
                    f"more than {most:,} records cannot be used; these are the first. {way_out}",
                ]
            )
        yield {"place": place, "problem": problem, **nothing}
    needed = errors.format_choices(formats.FORMAT_FIELDS[source.format][0])
    if not usable and bad:
        others = ", and there is nothing in the others" if bad < number else ""
        said = f"{bad:,} of {number:,} records cannot be used{others}"
        raise UserError(
            [*_list_bad_records(first), f"{said}. Correct format or fields, or mend the records."]
        )
    if not usable:
        raise UserError(f"there is no record with {needed} in it. Give at least one.")
    for role in sorted(unseen_roles):
        raise UserError(f"roles: no message has the role {role}. Leave it out, or correct it.")
    for theirs, ours in unseen.items():
        raise UserError(
            f"fields: no record has {theirs}, which is to be read as {ours}. Leave it out, or correct it."
        )


def _escape_surrogates(text: str) -> str:
    """The text with bytes of a file's name that are not UTF-8, and lone surrogates, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _write_cache(
    entries: Iterator[RecordEntry], names: list[str], path: pathlib.Path, *, desc: str
) -> None:
    """Writes the Arrow file, and only when all entries are in it gives it its name."""
    import datasets

    schema = pa.schema(
        {name: _COLUMN_TYPES.get(name, _ID_LIST) for name in ("place", "problem", *names)}
    )
    hidden = distributed.this_process().index > 0
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = pathlib.Path(folder) / path.name
        with pa.ipc.new_stream(str(partial), schema) as stream:
            waiting: list[RecordEntry] = []
            size = 0
            for entry in datasets.utils.tqdm(
                entries, desc=desc, unit=" records", delay=_PROGRESS_DELAY_S, disable=hidden
            ):
                waiting.append(entry)
                size += len(entry[names[0]]) + _ENTRY_OVERHEAD
                if size > _BATCH_SIZE:
                    stream.write_batch(_to_record_batch(waiting, schema))
                    waiting, size = [], 0
            if waiting:
                stream.write_batch(_to_record_batch(waiting, schema))
        partial.replace(path)


_PROGRESS_DELAY_S = 3.0
"""How long reading takes before there is a progress bar."""

_ENTRY_OVERHEAD = 100
"""Characters that an entry counts for beside its document: a source may have a million empty ones."""


def _to_record_batch(entries: list[RecordEntry], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for name in schema.names:
        values = [entry[name] for entry in entries]
        if schema.field(name).type == _ID_LIST:
            offsets = np.cumsum([0, *map(len, values)])
            columns.append(pa.LargeListArray.from_arrays(offsets, np.concatenate(values)))
        else:
            columns.append(pa.array(values, schema.field(name).type))
    return pa.record_batch(columns, schema=schema)
