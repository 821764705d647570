"""Reads a source's records once, into an Arrow file that is mapped into memory from then on."""

import dataclasses
import functools
import glob
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.config.data_schema import DataConfig, SourceConfig
from jaxsp.core import errors, urls
from jaxsp.core.errors import UserError
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import (
    formats,
    hub,
    record_cache,
    record_forms,
    source_files,
    stored_files,
    token_checks,
)
from jaxsp.data.ingest.columnar import LocatedRecord, RecordColumns
from jaxsp.data.ingest.record_cache import RecordEntry

if TYPE_CHECKING:
    import datasets

_CACHE_VERSION = 5
"""Part of the cache's name. Increase it when the same file would be read differently."""

_MAX_CHECKED_BAD = 100
"""Number of bad records after which reading stops: the config must be wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecordSource:
    identity: Any
    """Value that changes when the records do."""
    records: Callable[[], Iterator[LocatedRecord]]
    split: str | None = None
    """Part of the records to select after reading; None: all."""


@record_cache.hide_progress_without_terminal()
def read(source: SourceConfig, *, data: DataConfig, field: str) -> "datasets.Dataset":
    """Returns all records of a source in order, read once and mapped into memory from then on.

    Columns: `place` of the record; `problem`, the reason why it cannot be used, or null; and the
    content: `text`, or `input_ids` and, if the first record has them, `labels`, or `record`, which
    is messages or prompt and completions as JSON under jaxsp's names, and Format.values.

    Args:   field: the source's field in messages, such as data.train.0.source.
    Raises: UserError naming file and line or row of bad records, unless `data` skips them.
    """
    import datasets

    error_prefix = f"{field} = {source.source}"
    try:
        origin = _resolve_source(source, formats.resolve_columns(source, field=field), field=field)
        columns = _choose_columns(source, origin)
        names = (
            source.format,
            columns,
            sorted(source.fields.items()),
            sorted(source.roles.items()),
            sorted(source.ignore_fields),
        )
        fingerprint = datasets.fingerprint.Hasher.hash((_CACHE_VERSION, names, origin.identity))
        folder = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / fingerprint
        cached = folder / "records.arrow"
        folder.mkdir(parents=True, exist_ok=True)
        with record_cache.build_once(cached):
            dataset = record_cache.open_or_none(cached)
            if dataset is None:
                entries = _check_records(source, origin, columns, data=data)
                entries = formats.FORMATS[source.format].connect(entries)
                record_cache.write_cache(entries, columns, cached, desc=f"Reading {source.source}")
                dataset = record_cache.open_file(cached)
    except (UserError, PermissionError) as error:
        problems = error.problems if isinstance(error, UserError) else [str(error)]
        group = f"{field.rpartition('.')[0]}."
        raise UserError(
            # a problem of another field of the source names that field
            problem if problem.startswith(group) else f"{error_prefix}: {problem}"
            for problem in problems
        ) from None
    if origin.split is not None:
        # the whole source is cached, so that its parts for training and for evaluation share it
        dataset = hub.select_ranges({"train": dataset}, origin.split, field=field)
        fingerprint = datasets.fingerprint.Hasher.hash((fingerprint, origin.split))
    # the name of the tokens' cache; from_file's own depends on when the records were cached
    dataset._fingerprint = fingerprint
    record_cache.check_bad_records(dataset, data=data, error_prefix=error_prefix)
    return dataset


def list_unread_fields(source: SourceConfig, *, field: str) -> list[str]:
    """Returns the fields of a source's first records that nothing reads."""
    read_columns = formats.resolve_columns(source, field=field)
    # of a table without a required column, the names of all columns are read, and nothing else
    origin = _resolve_source(source, RecordColumns(required=("\0",)), field=field)
    names = {
        name: None
        for _, record, _ in itertools.islice(origin.records(), _MAX_CHECKED_BAD)
        if isinstance(record, dict)
        for name in record
    }
    known = {*read_columns.required, *read_columns.optional}
    return [name for name in names if name not in known]


def _resolve_source(source: SourceConfig, columns: RecordColumns, *, field: str) -> _RecordSource:
    """Finds the files, saved folder or hub data set with a source's name; local ones come first."""
    if urls.is_url(source.source):
        return _resolve_stored_files(source, columns, field=field)
    path = source_files.resolve_path(source, field=field)
    if _may_be_on_hub(path, source):
        dataset = hub.open_hub_dataset(source, field=field)
    else:
        _check_hub_fields(source, field=field)
        if not hub.is_saved_dataset(path):
            return _resolve_files(path, source, columns, field=field)
        dataset = hub.open_saved_dataset(path, source, field=field)
    place = f"{source.source} ({source.split})" if "[" in (source.split or "") else source.source
    # a data set that was created again from other data may keep its fingerprint
    cache_files = [pathlib.Path(file["filename"]) for file in dataset.cache_files]
    identities = source_files.file_identities(cache_files)
    return _RecordSource(
        identity=(source.source, dataset._fingerprint, identities),
        records=functools.partial(hub.read_records, dataset, columns, place=place),
    )


def _check_hub_fields(source: SourceConfig, *, field: str) -> None:
    """Raises: UserError if a source of files has a field of data sets on the hub."""
    for name in ("subset", "revision"):
        if value := getattr(source, name):
            raise UserError(
                f"{field.rpartition('.')[0]}.{name} = {value}: only data sets on the hub have "
                f"one, not files. Remove {name}."
            )


def _resolve_stored_files(
    source: SourceConfig, columns: RecordColumns, *, field: str
) -> _RecordSource:
    """Finds the files of a source in an object store."""
    _check_hub_fields(source, field=field)
    _check_split(source, field=field)
    files = stored_files.find(source)
    file_type = source_files.common_file_type(list(files.objects), source)
    return _RecordSource(
        identity=(file_type.name, files.identity),
        records=functools.partial(files.read, columns),
        split=source.split,
    )


def _check_split(source: SourceConfig, *, field: str) -> None:
    """Reports a wrong split of files before reading them."""
    if source.split is not None:
        hub.resolve_ranges(source.split, {"train": hub.UNKNOWN_LENGTH}, field=field)


def _may_be_on_hub(path: pathlib.Path, source: SourceConfig) -> bool:
    if glob.has_magic(str(path)) or path.exists() or not hub.is_hub_name(source.source):
        return False
    is_text = source_files.split_suffix(source.source)[0] in source_files.TEXT_SUFFIXES
    return source_files.detect_file_type(str(path)) is source_files.TEXT and not is_text


def _resolve_files(
    path: pathlib.Path, source: SourceConfig, columns: RecordColumns, *, field: str
) -> _RecordSource:
    _check_split(source, field=field)
    files = source_files.find_files(path, source)
    file_type = source_files.common_file_type(files, source)

    def read_files() -> Iterator[LocatedRecord]:
        return itertools.chain.from_iterable(
            source_files.read_file(file, columns) for file in files
        )

    identity = (file_type.name, source_files.file_identities(files))
    return _RecordSource(identity=identity, records=read_files, split=source.split)


def _choose_columns(source: SourceConfig, origin: _RecordSource) -> list[str]:
    """Returns the columns to store: `labels` if the first record or `fields` has them."""
    record_format = formats.FORMATS[source.format]
    columns = [record_format.column, *record_format.values]
    if record_format.is_tokenized:
        usable = (
            record
            for _, record, problem in itertools.islice(origin.records(), _MAX_CHECKED_BAD)
            if problem is None and isinstance(record, dict)
        )
        if "labels" in source.fields or token_checks.has_labels(next(usable, {}), source):
            columns.append("labels")
    return columns


def _check_records(
    source: SourceConfig, origin: _RecordSource, columns: list[str], *, data: DataConfig
) -> Iterator[RecordEntry]:
    """Yields an entry for every record.

    Raises: UserError for too many bad records, for no usable record, and for `fields` and `roles`
        that no record has.
    """
    record_format = formats.FORMATS[source.format]
    unseen_fields = {
        name: field
        for field, names in source.fields.items()
        if field in record_format.optional or not isinstance(names, str)
        for name in record_forms.list_columns(source, field)
    }
    unseen_roles = set(source.roles)
    is_list = {"input_ids", "labels"}
    empty = {name: np.zeros(0, np.int32) if name in is_list else "" for name in columns}
    empty |= record_format.values
    is_usable = False
    num_bad = 0
    examples: list[tuple[str, str]] = []
    num_records = 0
    for place, record, problem in origin.records():
        num_records += 1
        place = errors.escape(place)
        content = empty
        if problem is None:
            if unseen_fields and isinstance(record, dict):
                unseen_fields = {
                    name: field for name, field in unseen_fields.items() if name not in record
                }
            if unseen_roles:
                unseen_roles -= formats.find_roles(record, source)
            try:
                content = formats.check_record(record, source, has_labels="labels" in columns)
                is_usable = is_usable or len(content[columns[0]]) > 0
            except RecordError as error:
                problem = str(error)
        if problem is not None:
            problem = errors.escape(problem)
            num_bad += 1
            if num_bad <= record_cache.MAX_NAMED_RECORDS:
                examples.append((place, problem))
            _check_bad_limit(num_bad, examples, data)
        yield {"place": place, "problem": problem, **content}
    if not is_usable:
        raise _nothing_usable_error(source, num_records, num_bad, examples)
    for role in sorted(unseen_roles):
        raise UserError(f"roles: no message has the role {role}. Remove or correct it.")
    for name, field in unseen_fields.items():
        raise UserError(f"fields: no record has {name}, to read as {field}. Remove or correct it.")


def _check_bad_limit(num_bad: int, examples: list[tuple[str, str]], data: DataConfig) -> None:
    limit = max(data.max_bad_records, _MAX_CHECKED_BAD)
    if num_bad > limit:
        summary = (
            f"more than {limit:,} records cannot be used; these are the first. Correct format or "
            "fields, correct the records, or set data.on_bad_record=skip and raise "
            "data.max_bad_records."
        )
        raise UserError([*record_cache.list_examples(examples), summary])


def _nothing_usable_error(
    source: SourceConfig, num_records: int, num_bad: int, examples: list[tuple[str, str]]
) -> UserError:
    if not num_bad:
        needed = errors.format_choices(formats.FORMATS[source.format].required)
        return UserError(f"no record contains {needed}. Give at least one.")
    summary = f"{num_bad:,} of {num_records:,} records cannot be used"
    if num_bad < num_records:
        summary += ", and the others are empty"
    summary += ". Correct format or fields, or correct the records."
    return UserError([*record_cache.list_examples(examples), summary])
