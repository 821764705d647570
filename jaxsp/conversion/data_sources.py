"""Converts data sets to data.train and data.eval."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.conversion.draft import Draft, as_list, is_on, is_set

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


_CONVERSATIONS = (".argilla_chat", ".ultra", "chat_template.argilla")
"""Ends of types of preferences whose answers are whole conversations; all except the first have a
prompt beside them."""

_PAIR_HINTS = {
    "preference": (
        "write its records as {prompt: [...], chosen: [...], rejected: [...]} with messages in a "
        ".jsonl file, and name that file"
    ),
    "unpaired": (
        "write its records as {prompt: [...], completion: [...], label: true or false} with "
        "messages in a .jsonl file, and name that file"
    ),
}


def convert(draft: Draft) -> None:
    """Converts all data sets, and the fraction that is held out."""
    converters = {"trl": _convert_trl, "ms-swift": _convert_swift}
    sources, eval_sources = converters.get(draft.system, _convert_axolotl)(draft)
    if not sources and draft.pair_format:
        sources = [{"source": "FILL-IN.jsonl", "format": draft.pair_format}]
        draft.add_task("data.train: the input has none")
    if sources:
        draft.set("data.train", sources)
    if eval_sources:
        draft.set("data.eval", eval_sources)
    names = ("val_set_size", "split_dataset_ratio", "test_split_size", "val_size")
    size = draft.take(*names)
    if isinstance(size, float) and 0 < size < 1:
        draft.set("data.eval_fraction", size, *names)
    elif is_on(size):
        draft.add_task(f"data.eval_fraction: {size} documents; set them as a fraction of all")


_Sources = tuple[list[Any], list[Any]]
"""Entries of data.train and of data.eval."""


def _convert_axolotl(draft: Draft) -> _Sources:
    result: _Sources = ([], [])
    places = (("datasets", "train"), ("pretraining_dataset", "train"), ("test_datasets", "eval"))
    for option, name in places:
        for entry in as_list(draft.take(option)):
            sources = result[name == "eval"]
            if isinstance(entry, str):
                entry = {"path": entry}
            if isinstance(entry, dict):
                sources += _convert_entry(entry, draft, f"data.{name}.{len(sources)}")
            else:
                draft.add_task(f"data.{name}: {yaml_io.format_value(entry)} is not a data set")
    return result


def _convert_entry(entry: dict[str, Any], draft: Draft, field: str) -> list[dict[str, Any]]:
    """Converts an entry of Axolotl's `datasets` to one source for each file."""
    entry = {str(name): value for name, value in entry.items() if is_set(value)}
    source = _find_format(entry.pop("type", None), entry, draft, field)
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
    if draft.pair_format:
        return _find_pair_format(kind, entry, draft, field)
    if kind in _TEXT_TYPES:
        return _text_format(entry.pop("field", None) or entry.pop("text_column", None))
    if kind in _CHAT_TYPES:
        return {"format": "messages"} | _find_message_fields(kind, entry)
    if kind is None:
        return {"format": "tokens"}
    text = yaml_io.format_value(kind)
    draft.add_task(f"{field}: type {text} has a prompt of its own; {_PROMPT_HINT}")
    for name in [name for name in entry if name.startswith("field_")]:
        del entry[name]
    return {"format": "prompt_completion"}


def _find_pair_format(kind: Any, entry: dict[str, Any], draft: Draft, field: str) -> dict[str, Any]:
    """Returns format, fields and roles of records with preferences, and removes their options."""
    assert draft.pair_format is not None
    name = kind if isinstance(kind, str) else ""
    has_conversations = draft.pair_format == "preference" and name.endswith(_CONVERSATIONS)
    if kind is not None and not has_conversations:
        text = yaml_io.format_value(kind)
        draft.add_task(
            f"{field}: type {text} has a prompt of its own; {_PAIR_HINTS[draft.pair_format]}"
        )
        for option in [option for option in entry if option.startswith(("field_", "message_"))]:
            del entry[option]
        return {"format": draft.pair_format}
    answers = {
        ours: str(entry.pop(f"field_{ours}"))
        for ours in ("chosen", "rejected", "completion", "label")
        if f"field_{ours}" in entry
    }
    source = _find_message_fields(kind, entry)
    renamed = {ours: theirs for ours, theirs in answers.items() if ours != theirs}
    fields = source.pop("fields", {}) | renamed
    # only messages have it
    fields.pop("messages", None)
    # the prompt beside whole conversations is their first message
    ignored = ["prompt"] if name.endswith(_CONVERSATIONS[1:]) else []
    extra = {"fields": fields, "ignore_fields": ignored}
    return {"format": draft.pair_format, **source} | {key: x for key, x in extra.items() if x}


def _text_format(column: Any) -> dict[str, Any]:
    """Format of text in a column. Args: column: None: the one that is called text."""
    fields = {"fields": {"text": str(column)}} if column not in (None, "text") else {}
    return {"format": "text", **fields}


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
    files = as_list(entry.pop("data_files", None))
    if not files or path in _BUILDERS:
        yield from map(str, files or [path])
        return
    folder = f"{path}/"
    if path[0] not in "./~" and "://" not in path and not pathlib.Path(path).exists():
        folder = f"data/{path.rpartition('/')[2]}/"
        names = " ".join(map(str, files))
        draft.add_task(
            f"{field}: download it: hf download --repo-type dataset {path} {names} "
            f"--local-dir {folder.rstrip('/')}"
        )
    yield from (f"{folder}{file}" for file in files)


def _convert_trl(draft: Draft) -> _Sources:
    text_column = draft.take("dataset_text_field")
    base: dict[str, Any] = {"format": "messages"}
    if draft.pair_format:
        base = {"format": draft.pair_format}
    elif text_column is not None:
        base = _text_format(text_column)
    elif draft.options.get("completion_only_loss") is True:
        base = {"format": "prompt_completion"}
    elif draft.options.get("assistant_only_loss") is not True:
        _add_format_task(draft, ". With prompt_completion, remove train_on")
    name = draft.take("dataset_name")
    test_split = draft.skip("dataset_test_split")
    single = {
        "path": name,
        "name": draft.take("dataset_config"),
        "split": draft.take("dataset_train_split"),
        "data_files": draft.take("dataset_data_files"),
    }
    entries = draft.take("datasets") or ([single] if name else [])
    sources = []
    for entry in filter(lambda entry: isinstance(entry, dict), entries):
        weight = entry.pop("fraction", None)
        weights = {"weight": float(weight)} if weight else {}
        kind = None if draft.pair_format else "chat_template"
        converted = _convert_entry({**entry, "type": kind}, draft, "data.train.0")
        sources += [{**source, **base, **weights} for source in converted]
    evaluates = is_on(draft.options.get("eval_strategy"))
    if evaluates and name and not draft.options.get("test_split_size"):
        return sources, [{**sources[0], "split": str(test_split or "test")}]
    return sources, []


def _convert_swift(draft: Draft) -> _Sources:
    is_hub = is_on(draft.take("use_hf"))
    sources, eval_sources = (
        [
            _parse_swift_name(str(name), draft, f"{field}.{index}", is_hub=is_hub)
            for index, name in enumerate(as_list(draft.take(option)))
        ]
        for option, field in (("dataset", "data.train"), ("val_dataset", "data.eval"))
    )
    if draft.pair_format:
        for source in (*sources, *eval_sources):
            source["format"] = draft.pair_format
        draft.add_task(
            f"data.train: records of {draft.title} have messages, and rejected_response or label; "
            f"{_PAIR_HINTS[draft.pair_format]}"
        )
    elif sources:
        _add_format_task(draft)
    return sources, eval_sources


def _add_format_task(draft: Draft, note: str = "") -> None:
    """Adds the task to check the format of the training data."""
    draft.add_task(
        f"data.train.0.format: messages is a guess, because {draft.title} reads the format from "
        "the records. Use text, or prompt_completion, if they have these fields" + note
    )


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
