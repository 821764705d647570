"""Converts data sets to data.train and data.eval."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.conversion.draft import Draft
from jaxsp.conversion.options import Options, is_on, is_set

_CHAT_TYPES = ("chat_template", "sharegpt")

_TEXT_TYPES = ("completion", "pretrain", "pretraining")

_BUILDERS = ("json", "csv", "text", "parquet", "arrow")
"""Values of `path` that read data_files, in `datasets`."""

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

_IGNORED = ("trust_remote_code", "ds_type", "conversation", "columns", "preprocess_shards")
"""Fields of a data set that change nothing here."""

_PROMPT_HINT = (
    "write its records as {prompt: ..., completion: ...} or {messages: [...]} in a .jsonl file, "
    "and name that file"
)

_GUESS = (
    "messages is a guess, because {} reads the format from the records. Use text, or "
    "prompt_completion, if they have these fields"
)


def convert(options: Options, draft: Draft) -> None:
    """Converts all data sets, and the fraction that is held out."""
    if options.system == "trl":
        sources, eval_sources = _convert_trl(options, draft)
    elif options.system == "ms-swift":
        sources, eval_sources = _convert_swift(options, draft)
    else:
        sources, eval_sources = _convert_axolotl(options, draft)
    if sources:
        draft.set("data.train", sources, "")
    if eval_sources:
        draft.set("data.eval", eval_sources, "")
    _convert_fraction(options, draft)


def _convert_fraction(options: Options, draft: Draft) -> None:
    """Converts the fraction, or number, of documents to hold out."""
    names = ("val_set_size", "split_dataset_ratio", "test_split_size", "val_size")
    size = options.take(*names)
    if isinstance(size, float) and 0 < size < 1:
        draft.set("data.eval_fraction", size, options.origin(*names))
    elif is_on(size):
        draft.add_task(f"data.eval_fraction: {size} documents; set them as a fraction of all")


def _convert_axolotl(options: Options, draft: Draft) -> tuple[list[Any], list[Any]]:
    result: tuple[list[Any], list[Any]] = ([], [])
    places = (("datasets", "train"), ("pretraining_dataset", "train"), ("test_datasets", "eval"))
    for option, name in places:
        entries = options.take(option)
        for entry in entries if isinstance(entries, list) else filter(is_set, [entries]):
            entry = {"path": entry} if isinstance(entry, str) else entry
            sources = result[name == "eval"]
            if isinstance(entry, dict):
                sources += _convert_entry(entry, draft, f"data.{name}.{len(sources)}")
            else:
                draft.add_task(f"data.{name}: {yaml_io.format_value(entry)} is not a data set")
    return result


def _convert_entry(entry: dict[str, Any], draft: Draft, field: str) -> list[dict[str, Any]]:
    """Converts an entry of Axolotl's `datasets` to one source for each file."""
    entry = {str(name): value for name, value in entry.items() if is_set(value)}
    kind = entry.pop("type", None)
    source = _find_format(kind, entry, draft, field)
    for theirs, ours in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if theirs in entry:
            source[ours] = str(entry.pop(theirs))
    files = list(_find_files(entry, draft, field))
    for name, value in entry.items():
        is_default = name == "roles_to_train" and value == ["assistant"]
        is_default |= name == "train_on_eos" and value == "turn"
        is_default |= name == "chat_template" and str(value).startswith("tokenizer_default")
        if not is_default and name not in _IGNORED:
            text = f"{field}: {name} = {yaml_io.format_value(value)}"
            draft.not_converted[text] = "an option of a data set without a counterpart"
    return [{"source": file, **source} for file in files]


def _find_format(kind: Any, entry: dict[str, Any], draft: Draft, field: str) -> dict[str, Any]:
    """Returns format, fields and roles, and removes their options from the entry."""
    if kind in _TEXT_TYPES:
        column = entry.pop("field", None) or entry.pop("text_column", None)
        fields = {"text": str(column)} if column not in (None, "text") else {}
        return {"format": "text"} | ({"fields": fields} if fields else {})
    if kind in _CHAT_TYPES:
        return {"format": "messages"} | _find_message_fields(kind, entry)
    if kind is None:
        return {"format": "tokens"}
    text = yaml_io.format_value(kind)
    draft.add_task(f"{field}: type {text} has a prompt of its own; {_PROMPT_HINT}")
    for name in [name for name in entry if name.startswith("field_")]:
        del entry[name]
    return {"format": "prompt_completion"}


def _find_message_fields(kind: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns names of fields and roles where they differ."""
    properties = entry.pop("message_property_mappings", {})
    properties = dict(properties) if isinstance(properties, dict) else {}
    if kind == "sharegpt":
        properties = {"role": "from", "content": "value"} | properties
        entry.setdefault("field_messages", "conversations")
    names = {
        "messages": entry.pop("field_messages", "messages"),
        "tools": entry.pop("field_tools", "tools"),
        "role": entry.pop("message_field_role", properties.pop("role", "role")),
        "content": entry.pop("message_field_content", properties.pop("content", "content")),
    }
    if properties:
        entry["message_property_mappings"] = properties
    fields = {ours: str(theirs) for ours, theirs in names.items() if ours != theirs}
    roles = {} if "role" not in fields else dict(_SHAREGPT_ROLES)
    given = entry.pop("roles", None)
    if isinstance(given, dict):
        pairs = ((ours, theirs) for ours, all_theirs in given.items() for theirs in all_theirs)
        roles = {str(theirs): str(ours) for ours, theirs in pairs if theirs != ours}
    result = {"fields": fields, "roles": roles}
    return {name: value for name, value in result.items() if value}


def _find_files(entry: dict[str, Any], draft: Draft, field: str) -> Iterator[str]:
    """Yields the source, or one for each of its files, and removes their options."""
    path = str(entry.pop("path", "FILL-IN"))
    files = entry.pop("data_files", None)
    if not files:
        yield path
        return
    files = files if isinstance(files, list) else [files]
    folder = ""
    is_local = path in _BUILDERS or path[0] in "./~" or "://" in path or pathlib.Path(path).exists()
    if path not in _BUILDERS:
        folder = f"{path}/"
    if not is_local:
        folder = f"data/{path.rpartition('/')[2]}/"
        names = " ".join(map(str, files))
        draft.add_task(
            f"{field}: download it: hf download --repo-type dataset {path} {names} "
            f"--local-dir {folder.rstrip('/')}"
        )
    for file in files:
        yield f"{folder}{file}"


def _convert_trl(options: Options, draft: Draft) -> tuple[list[Any], list[Any]]:
    text_column = options.take("dataset_text_field")
    base: dict[str, Any] = {"format": "messages"}
    if text_column is not None:
        fields = {"fields": {"text": str(text_column)}} if text_column != "text" else {}
        base = {"format": "text", **fields}
    elif options.values.get("completion_only_loss") is True:
        base = {"format": "prompt_completion"}
    elif options.values.get("assistant_only_loss") is not True:
        guess = _GUESS.format(options.title)
        draft.add_task(f"data.train.0.format: {guess}. With prompt_completion, remove train_on")
    name = options.take("dataset_name")
    subset = options.take("dataset_config")
    split = options.take("dataset_train_split")
    test_split = options.take("dataset_test_split")
    entry: dict[str, Any] = {"path": name, "name": subset, "split": split}
    entry["data_files"] = options.take("dataset_data_files")
    entries = options.take("datasets") or ([entry] if name else [])
    sources = []
    for entry in filter(lambda entry: isinstance(entry, dict), entries):
        weight = entry.pop("fraction", None)
        converted = _convert_entry({**entry, "type": "chat_template"}, draft, "data.train.0")
        weights = {"weight": float(weight)} if weight else {}
        sources += [{**source, **base, **weights} for source in converted]
    draft.not_needed += options.list_taken("dataset_test_split")
    evaluates = is_on(options.values.get("eval_strategy"))
    eval_sources = []
    if evaluates and name and not options.values.get("test_split_size"):
        eval_sources = [{**sources[0], "split": str(test_split or "test")}]
    return sources, eval_sources


def _convert_swift(options: Options, draft: Draft) -> tuple[list[Any], list[Any]]:
    is_hub = is_on(options.take("use_hf"))
    result: list[list[Any]] = []
    for option in ("dataset", "val_dataset"):
        names = options.take(option)
        sources: list[Any] = []
        for name in names if isinstance(names, list) else filter(is_set, [names]):
            field = f"data.{'train' if option == 'dataset' else 'eval'}.{len(sources)}"
            sources.append(_parse_swift_name(str(name), draft, field, is_hub=is_hub))
        result.append(sources)
    if result[0]:
        draft.add_task(f"data.train.0.format: {_GUESS.format(options.title)}")
    return result[0], result[1]


def _parse_swift_name(name: str, draft: Draft, field: str, *, is_hub: bool) -> dict[str, Any]:
    """Parses name:subset#count, where subset and count are optional."""
    match = re.fullmatch(r"(.*?)(?::([\w./-]+))?(?:#(\d+))?", name)
    assert match is not None
    path, subset, count = match.groups()
    source: dict[str, Any] = {"source": path, "format": "messages"}
    if subset:
        source["subset"] = subset
    if count:
        source["split"] = f"train[:{count}]"
    is_file = path[:1] in ("/", ".", "~") or pathlib.Path(path).suffix[:5] in (".json", ".csv")
    if not is_file and not is_hub:
        draft.add_task(f"{field}: {path} is a name on ModelScope; use Hugging Face's, or files")
    return source
