"""Reads a source: its files, saved folder or hub data set are found, and its records checked.

Files are found by name, glob or URL. Those in object stores are downloaded once. A data set's own
code is never run.
"""

import dataclasses
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import filelock
import huggingface_hub.errors as hub

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError, at
from jaxsp.data import file_types
from jaxsp.data.data_config import DataConfig
from jaxsp.data.file_types import LocatedRecord
from jaxsp.data.source import RecordEntry, Source
from jaxsp.system import distributed

if TYPE_CHECKING:
    import datasets

_MAX_NAMED_RECORDS = 5

_UNKNOWN_LENGTH = 2**40
"""Number of records of a split that is not read yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Records of a source. They are read each time that they are asked for."""

    source: Source
    data: DataConfig
    identity: Any
    """Value that changes when the records do."""
    num_bytes: int
    """Size of the files."""
    locate: Callable[[], Iterator[LocatedRecord]]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path without links, or URL, of each file, by its name in messages; empty for a data set."""

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Values that decide the entries."""
        settings = self.source.model_dump(mode="json", exclude={"source", "name", "weight"})
        return (self.identity, json.dumps(settings, sort_keys=True))

    def entries(self) -> Iterator[RecordEntry]:
        """Yields an entry for each record, in order: its `place`; its `problem`, why it cannot be
        used, or None; and its content: `text`, or `input_ids` and `labels`, or `record`, which is
        messages or prompt and completions as JSON under jaxsp's names, and Source.values."""
        return self.source.connect(self._convert())

    def _convert(self) -> Iterator[RecordEntry]:
        source = self.source
        has_labels = None
        unseen = {
            name: field
            for field, names in source.fields.items()
            if field in source.optional or not isinstance(names, str)
            for name in source.list_columns(field)
        }
        unseen_roles = {*getattr(source, "roles", {})}
        for place, record, problem in self.locate():
            entry: RecordEntry = {"place": errors.escape(place), "problem": problem}
            if isinstance(record, dict) and unseen:
                unseen = {name: field for name, field in unseen.items() if name not in record}
            if unseen_roles:  # messages may be strings of JSON
                text = json.dumps(record, ensure_ascii=False, default=str).replace("\\", "")
                unseen_roles = {role for role in unseen_roles if f'"{role}"' not in text}
            if problem is None:
                try:
                    content = source.convert(record)
                    if has_labels is None:
                        has_labels = "labels" in content
                    if has_labels != ("labels" in content):
                        raise UserError(
                            f"has {'no' if has_labels else 'a mask or'} labels, unlike the "
                            "source's first record: all must have them or none. Make two sources."
                        )
                    entry |= content
                except UserError as error:
                    entry["problem"] = str(error)
            yield entry
        for role in sorted(unseen_roles):
            raise UserError(f"roles: no message has the role {role}. Remove or correct it.")
        for name, field in unseen.items():
            raise UserError(f"fields: no record has {name}, to read as {field}. Correct it.")


def check_bad_records(bad: Sequence[str], *, data: DataConfig) -> None:
    """Checks that data.on_bad_record allows bad records. Args: bad: place and problem of each.
    Raises: UserError naming the first, and what to change."""
    if bad and data.on_bad_record == "error":
        raise UserError(f"{bad[0]} Correct it, or leave bad records out: data.on_bad_record=skip.")
    if len(bad) > data.max_bad_records:
        summary = (
            f"more than {data.max_bad_records:,} records cannot be used; these are the first. "
            "Correct format or fields, correct the records, or raise data.max_bad_records."
        )
        raise UserError([*bad[:_MAX_NAMED_RECORDS], summary])


def read(source: Source, *, data: DataConfig) -> Records:
    """Finds the files, saved folder or hub data set with a source's name; local ones come first.
    Raises: UserError if it does not exist."""
    try:
        return _find_records(source, data)
    except PermissionError as error:
        raise UserError(str(error)) from None


def _find_records(source: Source, data: DataConfig) -> Records:
    name = source.source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    path = None if files.is_url(name) else files.expand_user(name)
    dataset = None
    if path is not None and _may_be_on_hub(path, source):
        dataset = _open_hub_dataset(source)
    else:
        for name in ("subset", "revision"):
            if value := getattr(source, name):
                raise UserError(
                    f".{name} = {value}: only data sets on the hub have one, not files. Remove "
                    f"{name}."
                )
        # `save_to_disk` wrote this folder
        saved = ("state.json", "dataset_dict.json")
        if path is not None and any((path / name).is_file() for name in saved):
            dataset = _open_saved_dataset(path, source)
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
            locate=lambda: file_types.locate_records(place, _read_dataset(dataset, source)),
        )
    if source.split is not None:  # a wrong one is reported before the files are read
        _resolve_ranges(source.split, {"train": _UNKNOWN_LENGTH})
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

    def locate_all() -> Iterator[LocatedRecord]:
        for file in found:
            yield from file_types.read_file(fetch(file), source.select_columns, name=file)

    def locate() -> Iterator[LocatedRecord]:
        if source.split is None:
            yield from locate_all()
            return
        lengths = {"train": sum(1 for _ in locate_all())}
        for _, start, stop in _resolve_ranges(source.split, lengths):
            yield from itertools.islice(locate_all(), start, stop)

    return Records(
        source=source,
        data=data,
        identity=(_check_file_types([*found], source), identity),
        num_bytes=num_bytes,
        locate=locate,
        files=found,
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
    names = [file for file in glob.glob(str(path), recursive=True) if pathlib.Path(file).is_file()]
    if not names:
        raise UserError(
            f"no file matches below {pathlib.Path.cwd()}. `*` stays in one folder, `**` includes "
            "subfolders."
        )
    # `**/**` and symbolic links find a file under several names; keep the shortest
    names.sort(key=lambda file: (len(pathlib.PurePath(file).parts), file), reverse=True)
    return sorted({os.path.realpath(file): file for file in names}.values())


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
            if not files.is_intact(path):
                if path.exists():
                    distributed.log(f"{path} IS DAMAGED; it is downloaded again from {url}")
                name = url.removeprefix(f"{bucket}/")
                store.download({name: path}, {name: size})
                files.write_checksum(path)
        return str(path)

    return versions, download


def _open_saved_dataset(path: pathlib.Path, source: Source) -> "datasets.Dataset":
    """Opens the data set in a folder, or its split `source.split`."""
    import datasets

    try:
        _check_names_own_files(path)
        loaded = datasets.load_from_disk(str(path))
    except UserError:  # a ValueError, which the next branch would describe once more
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = errors.first_line(error)
        raise UserError(f"cannot be loaded: {reason}. Copy or create it again.") from None
    if isinstance(loaded, datasets.Dataset):
        loaded = datasets.DatasetDict({str(loaded.split or "train"): loaded})
    return _choose_split(loaded, source)


def _check_names_own_files(folder: pathlib.Path) -> None:
    """Raises: UserError if a data set names files outside its folder; `datasets` opens them."""

    def read_json(path: pathlib.Path) -> dict[str, Any]:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    splits = read_json(folder / "dataset_dict.json").get("splits", [])
    names = [*splits]
    for split_folder in [folder, *(folder / str(split) for split in splits)]:
        state = read_json(split_folder / "state.json")
        names += [file["filename"] for file in state.get("_data_files", [])]
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise UserError(
                f"cannot be loaded: it names {name}, which is not in its folder. Copy or create it "
                "again."
            )


def _open_hub_dataset(source: Source) -> "datasets.Dataset":
    """Opens a data set on the hub, downloaded once, or its split `source.split`."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would fill logs
    try:
        builder = datasets.load_dataset_builder(
            source.source, name=source.subset, revision=source.revision
        )
        # without a network, `datasets` uses any cached revision
        is_cached = type(builder).__name__ == "Cache"
        if source.revision and is_cached and builder.hash != source.revision:
            raise UserError(
                f".revision = {source.revision}: the hub cannot be reached, and the cache has "
                f"{builder.hash}. Use that, or try again with a network."
            )
        builder.download_and_prepare()
        splits = builder.as_dataset()
    except UserError:  # a ValueError, which the next branch would describe once more
        raise
    except (
        datasets.exceptions.DatasetsError,
        hub.HTTPError,
        hub.HFValidationError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        # this error gives no reason
        is_vague = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = " ".join(str((is_vague and error.__cause__) or error).split())[:300].rstrip(".")
        problem = f"cannot be loaded from the hub: {reason}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError | ConnectionError):
            problem = f"there is no such file or folder, and not on the hub either: {reason}"
        raise UserError(
            f"{problem}. Give a file, a glob such as texts/**/*.txt, or a name such as "
            "HuggingFaceH4/ultrachat_200k, with its subset and revision. If it is private or "
            "gated, log in: hf auth login. To download it elsewhere: hf download "
            f"{source.source} --repo-type dataset --local-dir FOLDER."
        ) from None
    assert isinstance(splits, datasets.DatasetDict)
    return _choose_split(splits, source)


def _read_dataset(dataset: "datasets.Dataset", source: Source) -> Iterator[LocatedRecord]:
    """Yields records with the columns that the source needs."""
    names = dataset.column_names
    selected = dataset.select_columns(source.select_columns(names) or names[:1])
    tables = selected.with_format("arrow").iter(1000)
    batches = (batch for table in tables for batch in table.to_batches())
    yield from file_types.read_batches(batches, names, source.select_columns)


def _choose_split(splits: "datasets.DatasetDict", source: Source) -> "datasets.Dataset":
    """Split or part `source.split`, such as train[:95%], without copying; without `source.split`,
    the only split, or `train`. Raises: UserError."""
    import datasets

    names = list(splits)
    if not names:
        raise UserError("has no splits, so no records. Save it again, or use another data set.")
    if source.split is not None and source.split not in splits:
        lengths = {name: len(split) for name, split in splits.items()}
        parts = [
            splits[name]
            if (start, stop) == (0, lengths[name])
            else splits[name].select(range(start, stop))
            for name, start, stop in _resolve_ranges(source.split, lengths)
        ]
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    split = source.split or (names[0] if len(names) == 1 else "train")
    if split not in splits:
        raise UserError(f"has several splits. Set split to {errors.format_choices(names)}.")
    return splits[split]


def _resolve_ranges(spec: str, lengths: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns split, start and stop of each part in `spec`, by the rules of `datasets`.
    Args: lengths: number of records of each split.
    Raises: UserError if `spec` is not valid, or names an unknown split or an empty part."""
    import datasets

    try:
        instruction = datasets.ReadInstruction.from_spec(spec).to_absolute(dict(lengths))
    except ValueError as error:
        raise UserError(
            f".split = {spec}: {errors.first_line(error)}. Use {errors.format_choices(lengths)}, "
            "or a part, such as train[:95%] or train[100:200]."
        ) from None
    parts = [(part.splitname, part.from_, part.to) for part in instruction]
    for name, start, stop in parts:
        if start >= stop:
            available = f", {name} has {lengths[name]:,}" if lengths[name] < _UNKNOWN_LENGTH else ""
            raise UserError(
                f".split = {spec}: selects no record{available}. Use for example {name}[:95%]."
            )
    return parts


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
