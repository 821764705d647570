"""Reads a source: its files, saved folder or hub data set are found, and its records checked.

Files are found by name, glob or URL. Those in object stores are downloaded once.
"""

import collections
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import filelock

from jaxsp.core import errors, files
from jaxsp.core import files as core_files
from jaxsp.core.errors import UserError, at
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats import records
from jaxsp.data.formats.records import RecordEntry
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import file_types, hub
from jaxsp.data.ingest.file_types import LocatedRecord, Select
from jaxsp.system import distributed

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
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path without links, or URL, of each file, by its name in messages; empty for a data set."""
    split: str | None = None
    """Part of the records to select; None: all."""

    @functools.cached_property
    def has_labels(self) -> bool:
        """True if the records are token ids with labels: those of the first one count."""
        firsts = (
            record
            for _, record, problem in itertools.islice(self.locate(), _MAX_CHECKED_BAD)
            if problem is None and isinstance(record, dict)
        )
        return not self.source.needs_tokenizer and self.source.has_labels(next(firsts, {}))

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Values that decide the entries."""
        settings = self.source.model_dump(mode="json", exclude={"source", "name", "weight"})
        return (self.identity, self.has_labels, json.dumps(settings, sort_keys=True))

    def entries(self) -> Iterator[RecordEntry]:
        """Yields an entry for each record, in order: its `place`; its `problem`, why it cannot be
        used, or None; and its content: `text`, or `input_ids` and, if the first record has them,
        `labels`, or `record`, which is messages or prompt and completions as JSON under jaxsp's
        names, and Source.values.
        Raises: UserError for bad records, unless the config skips them, and for none to use."""
        parts: list[tuple[int, int | None]] = [(0, None)]
        if self.split is not None:
            lengths = {"train": sum(1 for _ in self.locate())}
            parts = [(start, stop) for _, start, stop in hub.resolve_ranges(self.split, lengths)]
        for start, stop in parts:
            entries = self.source.connect(_check_records(self))
            num_records = 0
            bad: list[RecordEntry] = []
            for entry in itertools.islice(entries, start, stop):
                num_records += 1
                if entry["problem"] is not None:
                    bad.append(entry)
                if not bad or self.data.on_bad_record == "skip":
                    yield entry
            check_bad_records(len(bad), num_records, bad, data=self.data)
            collections.deque(entries, maxlen=0)  # checks of all records come after the last one


def read(source: Source, *, data: DataConfig, select: Select | None = None) -> Records:
    """Finds the files, saved folder or hub data set with a source's name; local ones come first.
    Args: select: columns to read of tables; None: those that the source needs.
    Raises: UserError if it does not exist."""
    try:
        return _find_records(source, data, select or source.select_columns)
    except PermissionError as error:
        raise UserError(str(error)) from None


def list_unread_fields(source: Source, data: DataConfig) -> list[str]:
    """Returns the fields of a source's first records that nothing reads."""
    # of a table without a required column, the names of all columns are read, and nothing else
    located = read(source, data=data, select=lambda names: []).locate()
    firsts = [record for _, record, _ in itertools.islice(located, _MAX_CHECKED_BAD)]
    names = itertools.chain(*(record for record in firsts if isinstance(record, dict)))
    known = source.known_columns()
    return [name for name in dict.fromkeys(names) if name not in known]


def _find_records(source: Source, data: DataConfig, select: Select) -> Records:
    name = source.source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    path = None if files.is_url(name) else files.expand_user(name)
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
        identities = file_identities(cache_files)
        return Records(
            source=source,
            data=data,
            identity=(source.source, dataset._fingerprint, identities),
            num_bytes=dataset.data.nbytes,
            locate=lambda: file_types.locate_records(place, hub.read_records(dataset, select)),
        )
    if source.split is not None:  # a wrong one is reported before the files are read
        hub.resolve_ranges(source.split, {"train": hub.UNKNOWN_LENGTH})
    fetch: Callable[[str], str] = str
    identity: Any
    if path is None:
        identity, fetch = _find_objects(source.source)
        found = {url: url for url in identity}
        num_bytes = sum(size for size, _ in identity.values())
    else:
        names = _find_files(path, source)
        identity = file_identities(names)
        found = {name: real_path for name, (real_path, *_) in zip(names, identity, strict=True)}
        num_bytes = sum(size for _, size, _, _ in identity)

    def locate() -> Iterator[LocatedRecord]:
        for file in found:
            yield from file_types.read_file(fetch(file), select, name=file)

    return Records(
        source=source,
        data=data,
        identity=(_check_file_types([*found], source), identity),
        num_bytes=num_bytes,
        locate=locate,
        files=found,
        split=source.split,
    )


def _may_be_on_hub(path: pathlib.Path, source: Source) -> bool:
    is_name = re.fullmatch(r"\w[\w.-]*/[\w.-]*\w", source.source)
    if glob.has_magic(str(path)) or path.exists() or not is_name:
        return False
    is_text = file_types.split_suffix(source.source)[0] in file_types.TEXT_SUFFIXES
    return file_types.detect_file_type(str(path))[0] == file_types.TEXT and not is_text


def _find_files(path: pathlib.Path, source: Source) -> list[str]:
    """Returns the files that a path or a glob stands for, each once, sorted."""
    if path.is_dir():
        suffixes = (file.suffix for file in path.rglob("*.*") if file.is_file())
        example = f"{source.source.rstrip('/')}/**/*{next(suffixes, '.jsonl')}"
        raise UserError(f"is a folder. Name its files, for example {example}.")
    if path.is_file():
        return [str(path)]
    if not glob.has_magic(str(path)):
        raise UserError(
            f"no such file below {pathlib.Path.cwd()}. Give a file, a glob such as "
            "texts/**/*.txt, or the name of a data set on the hub, such as "
            "HuggingFaceH4/ultrachat_200k."
        )
    files = [file for file in glob.glob(str(path), recursive=True) if pathlib.Path(file).is_file()]
    if not files:
        raise UserError(
            f"no file matches below {pathlib.Path.cwd()}. `*` stays in one folder, `**` includes "
            "subfolders."
        )
    # `**/**` and symbolic links find a file under several names; keep the shortest
    files.sort(key=lambda file: (len(pathlib.PurePath(file).parts), file), reverse=True)
    return sorted({os.path.realpath(file): file for file in files}.values())


def file_identities(files: Sequence[str | pathlib.Path]) -> list[tuple[str, int, int, int]]:
    """Returns values that change when a file does, whatever the working directory. `cp -p`, `rsync
    -t` and tar set a file's mtime, but nothing sets its ctime. Inodes are left out: on some network
    file systems they differ between mounts."""
    resolved = [pathlib.Path(file).resolve() for file in files]
    stats = [(path, path.stat()) for path in resolved]
    return [(str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]


def _check_file_types(files: Sequence[str], source: Source) -> str:
    """Returns the name of the type of all files.
    Raises: UserError if they have several types, or cannot contain the source's format."""
    examples = {file_types.detect_file_type(file)[0]: file for file in files}
    if len(examples) > 1:
        raise UserError(
            f"matches files of several types, such as {' and '.join(sorted(examples.values()))}. "
            "Make each type a source of its own."
        )
    (file_type,) = examples
    if file_type == file_types.TEXT and source.required != ("text",):
        raise UserError(
            f"plain text has no {errors.format_choices(source.required)}. Use format: text, "
            "or a .jsonl or .parquet file."
        )
    return file_type


def _find_objects(url: str) -> tuple[dict[str, tuple[int, str]], Callable[[str], str]]:
    """Finds the files in an object store that a URL or a glob stands for.

    Returns: size and version of each, by its URL, sorted; and a function that downloads one unless
        this version is on the disk, and returns its path.
    Raises: UserError if there is none, or if the store cannot be used.
    """
    import datasets

    from jaxsp.system.object_store import ObjectStore

    files.check_url(url)
    bucket = "/".join(url.split("/")[:3])
    pattern = url.removeprefix(f"{bucket}/")
    store = ObjectStore(bucket)
    is_glob = glob.has_magic(pattern)
    versions = {}
    for name, info in sorted(store.list(pattern, is_glob=is_glob).items()):
        if is_glob or name == pattern:
            # an ETag changes when an object is written with other content
            version = info.get("ETag") or info.get("etag") or info.get("updated") or ""
            versions[f"{bucket}/{name}"] = (info["size"], str(version).strip('"'))
    if not versions:
        raise UserError(
            "no object matches. Name objects, for example "
            f"{bucket if is_glob else url.rstrip('/')}/*.jsonl; `*` stays in one "
            "folder, `**` includes subfolders."
        )

    def download(url: str) -> str:
        size, version = versions[url]
        digest = hashlib.sha256(f"{url} {size} {version}".encode()).hexdigest()[:32]
        root = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / "objects"
        path = root / digest / url.rpartition("/")[2]  # the suffix determines the type
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f"{path.name}.lock")):
            if not core_files.is_intact(path):
                if path.exists():
                    distributed.log(f"{path} IS DAMAGED; it is downloaded again from {url}")
                name = url.removeprefix(f"{bucket}/")
                store.download({name: path}, {name: size})
                core_files.write_checksum(path)
        return str(path)

    return versions, download


def _check_records(origin: Records) -> Iterator[RecordEntry]:
    """Yields an entry for every record. Raises: UserError for too many bad records, for no usable
    record, and for `fields` and `roles` that no record has."""
    source = origin.source
    limit = max(origin.data.max_bad_records, _MAX_CHECKED_BAD)
    has_labels = origin.has_labels
    unseen_fields = {
        name: field
        for field, names in source.fields.items()
        if field in source.optional or not isinstance(names, str)
        for name in source.list_columns(field)
    }
    unseen_roles = set(source.role_names)
    is_usable = False
    num_records = 0
    bad: list[RecordEntry] = []
    for place, record, problem in origin.locate():
        num_records += 1
        entry: RecordEntry = {"place": errors.escape(place), "problem": None}
        try:
            if problem is not None:
                raise UserError(problem)
            if unseen_fields and isinstance(record, dict):
                unseen_fields = {
                    name: field for name, field in unseen_fields.items() if name not in record
                }
            if unseen_roles:
                unseen_roles -= source.find_roles(record)
            content = source.convert(record, has_labels=has_labels)
            is_usable = is_usable or len(content[source.column]) > 0
            entry |= content
        except UserError as error:
            entry["problem"] = str(error)
            bad.append(entry)
        if len(bad) > limit:
            summary = (
                f"more than {limit:,} records cannot be used; these are the first. Correct format "
                "or fields, correct the records, or set data.on_bad_record=skip and raise "
                "data.max_bad_records."
            )
            raise UserError([*records.list_examples(bad), summary])
        yield entry
    if not is_usable:
        if not bad:
            needed = errors.format_choices(source.required)
            raise UserError(f"no record contains {needed}. Give at least one.")
        others = ", and the others are empty" if len(bad) < num_records else ""
        summary = (
            f"{len(bad):,} of {num_records:,} records cannot be used{others}. Correct format or "
            "fields, or correct the records."
        )
        raise UserError([*records.list_examples(bad), summary])
    for role in sorted(unseen_roles):
        raise UserError(f"roles: no message has the role {role}. Remove or correct it.")
    for name, field in unseen_fields.items():
        raise UserError(f"fields: no record has {name}, to read as {field}. Remove or correct it.")


def check_bad_records(
    count: int, num_records: int, examples: list[RecordEntry], *, data: DataConfig
) -> None:
    """Checks that data.on_bad_record allows the bad records of a source.
    Args: examples: at least the first ones.
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


def check_no_duplicates(sources: Mapping[str, Records]) -> None:
    """Checks that no file is read twice in the same way, which would count its documents twice.
    Args: sources: by field, such as data.train.0.
    Raises: UserError naming the second source."""
    first_fields: dict[tuple[str, str], str] = {}
    for field, origin in sources.items():
        # with other fields, or another split, a file has other documents
        settings = origin.source.model_dump_json(exclude={"source", "name", "weight"})
        with at(f"{field}.source", origin.source.source):
            for file, identity in origin.files.items():
                first = first_fields.setdefault((identity, settings), field)
                if first != field:
                    raise UserError(
                        f"includes the file {file}, which {first} also includes, so its documents "
                        "would count twice. Leave it out of one of them; to repeat a source, raise "
                        "its weight."
                    )
