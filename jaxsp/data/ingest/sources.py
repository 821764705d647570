"""Reads a source: its files, saved folder or hub data set are found, and its records checked."""

import collections
import dataclasses
import functools
import glob
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxsp.core import errors, paths
from jaxsp.core.errors import UserError, at
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats import records
from jaxsp.data.formats.records import RecordEntry
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import file_types, hub, source_files
from jaxsp.data.ingest.file_types import LocatedRecord, Select

_MAX_CHECKED_BAD = 100
"""Number of bad records after which reading stops: the config must be wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Records of a source. They are read each time that they are asked for."""

    source: Source
    identity: Any
    """Value that changes when the records do."""
    num_bytes: int
    """Size of the files."""
    locate: Callable[[], Iterator[LocatedRecord]]
    data: DataConfig
    split: str | None = None
    """Part of the records to select; None: all."""

    @functools.cached_property
    def columns(self) -> RecordEntry:
        """Columns with the content of an entry, with the values of a bad record."""
        firsts = (
            record
            for _, record, problem in itertools.islice(self.locate(), _MAX_CHECKED_BAD)
            if problem is None and isinstance(record, dict)
        )
        return self.source.stored_columns(firsts)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Values that decide the entries."""
        source = self.source
        return (
            self.identity,
            self.split,
            source.format,
            [*self.columns],
            sorted(source.fields.items()),
            sorted(source.role_names.items()),
            sorted(source.ignore_fields),
            # of another format
            *source.model_dump(exclude={*Source.model_fields, "roles"}).items(),
        )

    def entries(self) -> Iterator[RecordEntry]:
        """Yields an entry for each record, in order: its `place`; its `problem`, the reason why it
        cannot be used, or None; and its content: `text`, or `input_ids` and, if the first record
        has them, `labels`, or `record`, which is messages or prompt and completions as JSON under
        jaxsp's names, and Source.values.
        Raises: UserError for bad records, unless the config skips them, and for none that can be
        used."""
        parts: list[tuple[int, int | None]] = [(0, None)]
        if self.split is not None:
            lengths = {"train": sum(1 for _ in self.locate())}
            parts = [(start, stop) for _, start, stop in hub.resolve_ranges(self.split, lengths)]
        for start, stop in parts:
            entries = self.source.connect(_check_records(self))
            yield from _refuse_bad_records(itertools.islice(entries, start, stop), self.data)
            collections.deque(entries, maxlen=0)  # checks of all records come after the last one


def read(source: Source, *, data: DataConfig) -> Records:
    """Finds the records of a source. Raises: UserError if it does not exist."""
    try:
        return _resolve_source(source, source.select_columns, data)
    except PermissionError as error:
        raise UserError(str(error)) from None


def list_unread_fields(source: Source, data: DataConfig) -> list[str]:
    """Returns the fields of a source's first records that nothing reads."""
    # of a table without a required column, the names of all columns are read, and nothing else
    located = _resolve_source(source, lambda names: [], data).locate()
    names = {
        name: None
        for _, record, _ in itertools.islice(located, _MAX_CHECKED_BAD)
        if isinstance(record, dict)
        for name in record
    }
    known = source.known_columns()
    return [name for name in names if name not in known]


def _resolve_source(source: Source, select: Select, data: DataConfig) -> Records:
    """Finds the files, saved folder or hub data set with a source's name; local ones come first."""
    path = None if paths.is_url(source.source) else source_files.resolve_path(source)
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
        return Records(
            source=source,
            data=data,
            identity=(source.source, dataset._fingerprint, identities),
            num_bytes=dataset.data.nbytes,
            locate=lambda: file_types.locate_records(place, hub.read_records(dataset, select)),
        )
    if source.split is not None:  # a wrong one is reported before the files are read
        hub.resolve_ranges(source.split, {"train": hub.UNKNOWN_LENGTH})
    if path is None:
        stored = source_files.StoredFiles(source.source)
        files = [*stored.versions]
        identity: Any = stored.versions
        num_bytes = sum(size for size, _ in stored.versions.values())
        locate = functools.partial(stored.read, select)
    else:
        files = source_files.find_files(path, source)
        identity = source_files.file_identities(files)
        num_bytes = sum(size for _, size, _, _ in identity)
        locate = functools.partial(file_types.read_files, files, select)
    file_type = source_files.common_file_type(files, source)
    return Records(
        source=source,
        data=data,
        identity=(file_type.name, identity),
        num_bytes=num_bytes,
        locate=locate,
        split=source.split,
    )


def _may_be_on_hub(path: pathlib.Path, source: Source) -> bool:
    if glob.has_magic(str(path)) or path.exists() or not hub.is_hub_name(source.source):
        return False
    is_text = file_types.split_suffix(source.source)[0] in file_types.TEXT_SUFFIXES
    return file_types.detect_file_type(str(path)) is file_types.TEXT and not is_text


def _check_records(origin: Records) -> Iterator[RecordEntry]:
    """Yields an entry for every record. Raises: UserError for too many bad records, for no usable
    record, and for `fields` and `roles` that no record has."""
    source = origin.source
    limit = max(origin.data.max_bad_records, _MAX_CHECKED_BAD)
    columns = origin.columns
    unseen_fields = {
        name: field
        for field, names in source.fields.items()
        if field in source.optional or not isinstance(names, str)
        for name in source.list_columns(field)
    }
    unseen_roles = set(source.role_names)
    is_usable = False
    num_records = 0
    num_bad = 0
    examples: list[RecordEntry] = []
    for place, record, problem in origin.locate():
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


def _refuse_bad_records(entries: Iterable[RecordEntry], data: DataConfig) -> Iterator[RecordEntry]:
    """Yields entries up to the first bad one that the config does not skip, and counts the others.
    Raises: UserError for bad records."""
    num_records = 0
    bad: list[RecordEntry] = []
    for entry in entries:
        num_records += 1
        if entry["problem"] is not None:
            bad.append(entry)
        if not bad or data.on_bad_record == "skip":
            yield entry
    check_bad_records(len(bad), num_records, bad[: records.MAX_NAMED_RECORDS], data=data)


def check_bad_records(
    count: int, num_records: int, examples: list[RecordEntry], *, data: DataConfig
) -> None:
    """Checks that data.on_bad_record allows the bad records of a source.
    Args: examples: the first of them.
    Raises: UserError naming the first bad records, their number, and what to change."""
    is_skipped = data.on_bad_record == "skip" and count <= data.max_bad_records
    if not count or (is_skipped and count < num_records):
        return
    summary = f"{count:,} of {num_records:,} records cannot be used"
    if count > records.MAX_NAMED_RECORDS:
        summary += f"; these are the first {records.MAX_NAMED_RECORDS}"
    suggestion = "leave them out: data.on_bad_record=skip"
    if count == num_records:
        suggestion = "correct format or fields of the source"
    elif data.on_bad_record == "skip":
        suggestion = f"raise data.max_bad_records from {data.max_bad_records} to {count} or more"
    elif count > data.max_bad_records:
        suggestion += f" data.max_bad_records={count}"
    raise UserError(
        [*records.list_examples(examples), f"{summary}. Correct them, or {suggestion}."]
    )


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
            if paths.is_url(source.source):
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
