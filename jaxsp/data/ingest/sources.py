"""Reads a source's records once, into an Arrow file that is mapped into memory from then on."""

import collections
import functools
import glob
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxsp.core import errors, urls
from jaxsp.core.errors import UserError, at
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats import records
from jaxsp.data.formats.records import RecordEntry
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import columnar, hub, record_cache, source_files
from jaxsp.data.ingest.columnar import LocatedRecord, Select
from jaxsp.data.ingest.record_cache import DamagedCacheError
from jaxsp.system import distributed

if TYPE_CHECKING:
    import datasets

_CACHE_VERSION = 6
"""Part of the cache's name. Increase it when the same file would be read differently."""

_MAX_CHECKED_BAD = 100
"""Number of bad records after which reading stops: the config must be wrong."""


class _RecordSource(NamedTuple):
    identity: Any
    """Value that changes when the records do."""
    records: Callable[[], Iterator[LocatedRecord]]
    split: str | None = None
    """Part of the records to select after reading; None: all."""


@record_cache.hide_progress_without_terminal()
def read(source: Source, *, data: DataConfig) -> "datasets.Dataset":
    """Returns all records of a source in order, read once and mapped into memory from then on.

    Columns: `place` of the record; `problem`, the reason why it cannot be used, or null; and the
    content: `text`, or `input_ids` and, if the first record has them, `labels`, or `record`, which
    is messages or prompt and completions as JSON under jaxsp's names, and Source.values.

    Raises: UserError naming file and line or row of bad records, unless `data` skips them.
    """
    import datasets

    try:
        origin = _resolve_source(source, source.select_columns)
        firsts = (
            record
            for _, record, problem in itertools.islice(origin.records(), _MAX_CHECKED_BAD)
            if problem is None and isinstance(record, dict)
        )
        columns = source.stored_columns(firsts)
        names = (
            source.format,
            [*columns],
            sorted(source.fields.items()),
            sorted(source.role_names.items()),
            sorted(source.ignore_fields),
            # of another format
            *source.model_dump(exclude={*Source.model_fields, "roles"}).items(),
        )
        fingerprint = datasets.fingerprint.Hasher.hash((_CACHE_VERSION, names, origin.identity))
        folder = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / fingerprint
        cached = folder / "records.arrow"
        folder.mkdir(parents=True, exist_ok=True)
        with record_cache.build_once(cached):
            if cached.exists():
                try:
                    record_cache.open_file(cached)
                except DamagedCacheError as damage:
                    distributed.log(damage.notice)
            if not cached.exists():
                entries = source.connect(_check_records(source, origin, columns, data=data))
                record_cache.write_cache(entries, columns, cached, desc=f"Reading {source.source}")
            dataset = record_cache.open_file(cached)
    except PermissionError as error:
        raise UserError(str(error)) from None
    if origin.split is not None:
        # the whole source is cached, so that its parts for training and for evaluation share it
        dataset = hub.select_ranges({"train": dataset}, origin.split)
        fingerprint = datasets.fingerprint.Hasher.hash((fingerprint, origin.split))
    # the name of the tokens' cache; from_file's own depends on when the records were cached
    dataset._fingerprint = fingerprint
    record_cache.check_bad_records(dataset, data=data)
    return dataset


def list_unread_fields(source: Source) -> list[str]:
    """Returns the fields of a source's first records that nothing reads."""
    # of a table without a required column, the names of all columns are read, and nothing else
    origin = _resolve_source(source, lambda names: [])
    names = {
        name: None
        for _, record, _ in itertools.islice(origin.records(), _MAX_CHECKED_BAD)
        if isinstance(record, dict)
        for name in record
    }
    known = source.known_columns()
    return [name for name in names if name not in known]


def _resolve_source(source: Source, select: Select) -> _RecordSource:
    """Finds the files, saved folder or hub data set with a source's name; local ones come first."""
    path = None if urls.is_url(source.source) else source_files.resolve_path(source)
    dataset = None
    if path is not None and _may_be_on_hub(path, source):
        dataset = hub.open_hub_dataset(source)
    else:
        for name in ("subset", "revision"):
            if value := getattr(source, name):
                raise UserError(
                    f".{name} = {value}: only data sets on the hub have one, not files. Remove "
                    f"{name}."
                )
        if path is not None and hub.is_saved_dataset(path):
            dataset = hub.open_saved_dataset(path, source)
    if dataset is not None:
        is_part = "[" in (source.split or "")
        place = f"{source.source} ({source.split})" if is_part else source.source
        # a data set that was created again from other data may keep its fingerprint
        cache_files = [pathlib.Path(file["filename"]) for file in dataset.cache_files]
        identities = source_files.file_identities(cache_files)
        return _RecordSource(
            identity=(source.source, dataset._fingerprint, identities),
            records=lambda: columnar.locate_records(place, hub.read_records(dataset, select)),
        )
    if source.split is not None:  # a wrong one is reported before the files are read
        hub.resolve_ranges(source.split, {"train": hub.UNKNOWN_LENGTH})
    records: Callable[[], Iterator[LocatedRecord]]
    if path is None:
        stored = source_files.StoredFiles(source.source)
        files = [*stored.versions]
        identity: Any = [(url, *version) for url, version in stored.versions.items()]
        records = functools.partial(stored.read, select)
    else:
        files = source_files.find_files(path, source)
        identity = source_files.file_identities(files)
        records = functools.partial(source_files.read_files, files, select)
    file_type = source_files.common_file_type(files, source)
    return _RecordSource(identity=(file_type.name, identity), records=records, split=source.split)


def _may_be_on_hub(path: pathlib.Path, source: Source) -> bool:
    if glob.has_magic(str(path)) or path.exists() or not hub.is_hub_name(source.source):
        return False
    is_text = source_files.split_suffix(source.source)[0] in source_files.TEXT_SUFFIXES
    return source_files.detect_file_type(str(path)) is source_files.TEXT and not is_text


def _check_records(
    source: Source, origin: _RecordSource, columns: RecordEntry, *, data: DataConfig
) -> Iterator[RecordEntry]:
    """Yields an entry for every record. Args: columns: those to store, with empty values.
    Raises: UserError for too many bad records, for no usable record, and for `fields` and `roles`
    that no record has."""
    unseen_fields = {
        name: field
        for field, names in source.fields.items()
        if field in source.optional or not isinstance(names, str)
        for name in source.list_columns(field)
    }
    unseen_roles = set(source.role_names)
    limit = max(data.max_bad_records, _MAX_CHECKED_BAD)
    is_usable = False
    num_records = 0
    num_bad = 0
    examples: list[RecordEntry] = []
    for place, record, problem in origin.records():
        num_records += 1
        entry = {"place": errors.escape(place), "problem": None, **columns}
        try:
            if problem is not None:
                raise UserError(problem)
            if unseen_fields and isinstance(record, dict):
                unseen_fields = {
                    name: field for name, field in unseen_fields.items() if name not in record
                }
            if unseen_roles:
                unseen_roles -= source.find_roles(record)
            content = source.convert(record, has_labels="labels" in columns)
            is_usable = is_usable or len(content[next(iter(columns))]) > 0
            entry |= content
        except UserError as error:
            num_bad += 1
            entry["problem"] = str(error)
            examples = [*examples, entry][: records.MAX_NAMED_RECORDS]
        if num_bad > limit:
            summary = (
                f"more than {limit:,} records cannot be used; these are the first. Correct format "
                "or fields, correct the records, or set data.on_bad_record=skip and raise "
                "data.max_bad_records."
            )
            raise UserError([*records.list_examples(examples), summary])
        yield entry
    if not num_bad and not is_usable:
        needed = errors.format_choices(source.required)
        raise UserError(f"no record contains {needed}. Give at least one.")
    if not is_usable:
        others = ", and the others are empty" if num_bad < num_records else ""
        summary = (
            f"{num_bad:,} of {num_records:,} records cannot be used{others}. Correct format or "
            "fields, or correct the records."
        )
        raise UserError([*records.list_examples(examples), summary])
    for role in sorted(unseen_roles):
        raise UserError(f"roles: no message has the role {role}. Remove or correct it.")
    for name, field in unseen_fields.items():
        raise UserError(f"fields: no record has {name}, to read as {field}. Remove or correct it.")


def check_no_duplicates(sources: Mapping[str, Source]) -> None:
    """Checks that no file is read twice in the same way, which would count its documents twice.
    Args: sources: sources that can be read, by field, such as data.train.0.
    Raises: UserError naming the second source."""
    first_fields: dict[tuple[str, str], str] = {}
    # with other fields, or another split, a file has other documents
    settings = {
        field: source.model_dump_json(exclude={"source", "name", "weight"})
        for field, source in sources.items()
    }
    counts = collections.Counter(settings.values())
    for field, source in sources.items():
        if counts[settings[field]] == 1:
            continue  # avoids listing the files again, which takes seconds on network disks
        with at(f"{field}.source", source.source):
            # a file by a name that no other file has; nothing for data sets
            path = source_files.resolve_path(source)
            identities: dict[str, str] = {}
            if urls.is_url(source.source):
                identities = {url: url for url in source_files.StoredFiles(source.source).versions}
            elif path.is_file() or glob.has_magic(str(path)):
                files = source_files.find_files(path, source)
                identities = {file: os.path.realpath(file) for file in files}
            for file, identity in identities.items():
                first = first_fields.setdefault((identity, settings[field]), field)
                if first != field:
                    raise UserError(
                        f"includes the file {file}, which {first} also includes, so its documents "
                        "would count twice. Leave it out of one of them; to repeat a source, raise "
                        "its weight."
                    )
