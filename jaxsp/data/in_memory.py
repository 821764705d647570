"""Records in memory as a data source: they are written once to a file, which is then read."""

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.data.data_config import FORMATS


def write_sources(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config's data with files in place of records in memory.

    A source may be `{"source": RECORDS}`, with records in memory instead of a path: a
    `datasets.Dataset`, or an iterable of records of one format, texts, chats (lists of messages) or
    lists of token ids. Its format is found from the fields of the first record unless it is set.
    The other fields of a source have their usual meanings.

    The files are in the folder of caches, and named after their content.

    Raises: UserError for values that are not records.
    """
    fields = dict(data)
    for group in ("train", "eval"):
        sources = fields.get(group)
        if not isinstance(sources, list | tuple):
            continue
        fields[group] = [
            _write_source(
                source, f"data.{group}.{number}", f"{group}-{number}" if number else group
            )
            if isinstance(source, Mapping) and not isinstance(source.get("source", ""), str)
            else source
            for number, source in enumerate(sources)
        ]
    return fields


def _write_source(source: Mapping[str, Any], field: str, name: str) -> dict[str, Any]:
    """The fields of a source of records in memory. Args: name: name of a source without one."""
    import datasets

    given = source["source"]
    if isinstance(given, os.PathLike):
        return dict(source) | {"source": os.fspath(given)}
    is_table = isinstance(given, Mapping | bytes) or hasattr(given, "iloc")
    if is_table or not isinstance(given, datasets.Dataset | Iterable):
        raise UserError(
            f"{field}.source: must be a path, a list of records or a datasets.Dataset, not a "
            f"{type(given).__name__}. Use [record, ...], one split of a DatasetDict, or "
            "Dataset.from_pandas."
        )
    folder = files.cache_dir() / "records"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error.strerror}.") from None
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = pathlib.Path(temporary, "records")
        if isinstance(given, datasets.Dataset):
            columns = set(given.column_names)
            suffix = ".parquet"
            given.to_parquet(path)
        else:
            suffix = ".jsonl"
            columns = _write_lines(given, path, field)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        target = folder / f"{digest[:32]}{suffix}"
        if not target.exists():  # its time is part of the identity of the records
            path.replace(target)
    # those that need more fields first, and token ids before text
    required = {each.model_fields["format"].default: each.required for each in FORMATS[::-1]}
    known = [name for name, needed in required.items() if columns >= {*needed}]
    defaults = {"name": name}
    if known:
        defaults["format"] = max(known, key=lambda name: len(required[name]))
    return defaults | dict(source) | {"source": str(target)}


def _write_lines(records: Iterable[Any], path: pathlib.Path, field: str) -> set[str]:
    """Writes records as JSON lines, and returns the fields of the first one."""
    columns: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for number, value in enumerate(records):
            record = value
            if isinstance(value, str):
                record = {"text": value}
            elif not isinstance(value, Mapping):
                is_chat = (
                    isinstance(value, list | tuple) and value and isinstance(value[0], Mapping)
                )
                record = {"messages" if is_chat else "input_ids": value}
            columns = columns or {*record}
            try:
                line = json.dumps(record, default=lambda array: array.tolist())
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError(
                    f"{field}.source[{number}]: must be a record of JSON values: {error}. Use "
                    "texts, numbers, lists and dictionaries."
                ) from None
            file.write(f"{line}\n")
    if not columns:
        raise UserError(f"{field}.source: has no records. Give at least one.")
    return columns
