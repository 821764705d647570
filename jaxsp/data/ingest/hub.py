"""Data sets of `datasets`: folders that it saved, and the hub's, by name. No code of theirs is ever run."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import huggingface_hub
import huggingface_hub.errors as hub

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import columnar
from jaxsp.data.ingest.columnar import RecordColumns

if TYPE_CHECKING:
    import datasets

_NO_SUCH_FILE = "there is no such file or folder"
_EXAMPLE = (
    "Give a file, a glob such as texts/**/*.txt, or a name such as HuggingFaceH4/ultrachat_200k."
)

_SUBSETS_PATTERN = re.compile(
    r"(?:available configs: |Available: |configs in the cache: |configurations in the cache: )\[?(.*?)(?:\]|$)",
    re.MULTILINE,
)
"""How `datasets` names the subsets that there are, where it was asked for another, or for none."""

_MAX_ERROR_CHARS = 300
"""Characters of what `datasets` says; of tables that do not fit each other it says everything."""

_RECORDS_PER_READ = 1000
"""Rows that are looked up at a time."""


def is_saved_dataset(path: pathlib.Path) -> bool:
    """Whether `save_to_disk` made this folder."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def is_hub_name(source: str) -> bool:
    """Whether the hub could have a data set of that name."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]*\w", source) is not None


def open_saved_dataset(
    path: pathlib.Path, source: SourceConfig, *, field: str
) -> "datasets.Dataset":
    """The data set in a folder, or the split of it that is asked for."""
    import datasets

    for name in ("subset", "revision"):
        if value := getattr(source, name):
            raise UserError(
                f"{_sibling_field(field, name)} = {value}: only data sets of the hub have one. Leave it out."
            )
    try:
        _check_inside(path)
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot be loaded: {_first_line(error)}. Copy or make it again.") from None
    if isinstance(found, datasets.Dataset):
        found = datasets.DatasetDict({str(found.split or "train"): found})
    return _choose_split(found, source, field=field)


def _check_inside(path: pathlib.Path) -> None:
    """Raises: UserError where a saved data set names a file or a split that is not in its folder; `datasets` would follow."""
    splits = _read_json(path / "dataset_dict.json").get("splits", [])
    names = [*splits]
    for folder in [path, *(path / str(split) for split in splits)]:
        names += [
            file["filename"] for file in _read_json(folder / "state.json").get("_data_files", [])
        ]
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise UserError(
                f"cannot be loaded: it names {name}, which is not in its folder. Copy or make it again."
            )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def open_hub_dataset(source: SourceConfig, *, field: str) -> "datasets.Dataset":
    """The hub's data set of that name, downloaded once, or the split of it that is asked for."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(
            source.source, name=source.subset, revision=source.revision
        )
        if (
            source.revision
            and type(builder).__name__ == "Cache"
            and builder.hash != source.revision
        ):
            # without a network, `datasets` takes whatever revision it has
            raise UserError(
                f"{_sibling_field(field, 'revision')} = {source.revision}: the hub cannot be reached, and the cache holds "
                f"{builder.hash}. Give that, or try again with a network."
            )
        builder.download_and_prepare()
        found = builder.as_dataset()
    except (
        datasets.exceptions.DatasetsError,
        hub.HTTPError,
        hub.HFValidationError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(_describe_failure(error, source, field=field)) from None
    assert isinstance(found, datasets.DatasetDict)
    return _choose_split(found, source, field=field)


def read_records(
    dataset: "datasets.Dataset", columns: RecordColumns, *, place: str
) -> Iterator[columnar.LocatedRecord]:
    """The rows of a data set in its order."""
    names = dataset.column_names
    wanted = dataset.select_columns(columns.select_from(names) or names[:1]).with_format("arrow")
    batches = (batch for table in wanted.iter(_RECORDS_PER_READ) for batch in table.to_batches())
    yield from columnar.read_batches(batches, names, columns, place=place)


def _choose_split(
    found: "datasets.DatasetDict", source: SourceConfig, *, field: str
) -> "datasets.Dataset":
    """The split, or the parts of splits, that are asked for; else the only split, else train."""
    names = list(found)
    if not names:
        raise UserError(
            "has no splits, so there is no record in it. Save it again, or give another data set."
        )
    if source.split is not None and source.split not in found:
        return select_ranges(found, source.split, field=field)
    asked = source.split or (names[0] if len(names) == 1 else "train")
    if asked not in found:
        raise UserError(
            f"has several splits. Set {_sibling_field(field, 'split')} to {errors.format_choices(names)}."
        )
    return found[asked]


UNKNOWN_LENGTH = 2**40
"""Number of records of a split that is not read yet."""


def select_ranges(
    splits: "Mapping[str, datasets.Dataset]", spec: str, *, field: str
) -> "datasets.Dataset":
    """The part of splits that `spec` names, such as train[:95%], without copying it. Raises: UserError."""
    import datasets

    lengths = {name: len(split) for name, split in splits.items()}
    parts = [
        splits[name]
        if (start, stop) == (0, lengths[name])
        else splits[name].select(range(start, stop))
        for name, start, stop in resolve_ranges(spec, lengths, field=field)
    ]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def resolve_ranges(
    spec: str, lengths: Mapping[str, int], *, field: str
) -> list[tuple[str, int, int]]:
    """Split, start and stop of each part that `spec` names, by the rules of `datasets`.

    Args:   lengths: number of records of each split.
    Raises: UserError where it names no part, an unknown split or an empty part.
    """
    import datasets

    asked = f"{_sibling_field(field, 'split')} = {spec}"
    try:
        instruction = datasets.ReadInstruction.from_spec(spec)
    except ValueError:
        raise UserError(
            f"{asked}: is neither a split nor a part of one. Use for example train[:95%] or train[100:200]."
        ) from None
    try:
        parts = [
            (part.splitname, part.from_, part.to) for part in instruction.to_absolute(dict(lengths))
        ]
    except ValueError as error:
        if not str(error).startswith("Unknown split"):
            raise UserError(
                f"{asked}: {_first_line(error)}. Use for example train[:95%]."
            ) from None
        raise UserError(
            f"{asked}: there is no such split. Set {_sibling_field(field, 'split')} to {errors.format_choices(lengths)}."
        ) from None
    for name, start, stop in parts:
        if start >= stop:
            available = f", {name} has {lengths[name]:,}" if lengths[name] < UNKNOWN_LENGTH else ""
            raise UserError(f"{asked}: holds no record{available}. Use for example {name}[:95%].")
    return parts


def _describe_failure(error: Exception, source: SourceConfig, *, field: str) -> str:
    """Why the hub's data set cannot be had, and the way out."""
    import datasets

    name = source.source
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__  # the error itself says only that there was one
    said = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
    known = _SUBSETS_PATTERN.search(str(error))
    if known:
        subsets = errors.format_choices(word.strip(" '\"") for word in known[1].split(","))
        beside = _sibling_field(field, "subset")
        given = (
            f"{beside} = {source.subset}: there is no such subset"
            if source.subset
            else "has several subsets"
        )
        return f"{given}. Set {beside} to {subsets}."
    if "gated dataset" in said:
        return f"is gated. Accept its terms on https://huggingface.co/datasets/{name}, and log in: hf auth login."
    if source.revision and said.startswith("Revision"):
        return f"{_sibling_field(field, 'revision')} = {source.revision}: the data set has no such branch, tag or commit."
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return f"{_NO_SUCH_FILE}, and no such data set on the hub. {_EXAMPLE} If it is private, log in: hf auth login."
    if isinstance(error, ConnectionError):
        why = (
            "HF_HUB_OFFLINE is set"
            if huggingface_hub.constants.HF_HUB_OFFLINE
            else "the hub cannot be reached"
        )
        download = f"hf download {name} --repo-type dataset --local-dir FOLDER"
        return f"{_NO_SUCH_FILE}, the cache holds no data set of that name, and {why}. With a network: {download}."
    if "scripts are no longer supported" in said:
        return "is made by a script, and no code of a data set is run. Give one that is parquet or JSON files."
    way_out = (
        f"Try again, or give files: hf download {name} --repo-type dataset --local-dir FOLDER."
    )
    return f"cannot be loaded: {said.rstrip('.')}. {way_out}"


def _sibling_field(field: str, name: str) -> str:
    """What the user calls another field of the same source."""
    return f"{field.rpartition('.')[0]}.{name}"


def _first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
