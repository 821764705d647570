"""Help and error messages about a config's fields: meaning, rule, and a value that works."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import pydantic

from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.foreign_names import Counterpart
from jaxsp.core import errors


def describe_fields(root: type[pydantic.BaseModel]) -> str:
    """Every field of a config of groups, with its type, default and meaning."""
    lines = []
    for name, group in _list_sections(root).items():
        lines.append(f"{name}: {group.__doc__}")
        lines += _describe_section(group, f"  {name}.")
    return "\n".join(lines)


def _describe_section(group: type[pydantic.BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in group.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else f"default {yaml_io.format_value(field.get_default())}"
        )
        meaning = " ".join((field.description or "").split())
        lines.append(
            f"{prefix}{name}  ({_type_name(field.annotation)}; {default})\n      {meaning}"
        )
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
                lines += _describe_section(inner, f"{prefix}{name}[].")
    return lines


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    plain = {dict: "mapping", tuple: "list", str: "text", timedelta: "duration", type(None): "null"}
    if (name := plain.get(get_origin(annotation) or annotation)) is not None:
        return name
    return " | ".join(_type_name(arg) for arg in get_args(annotation)) or annotation.__name__


def explain_errors(root: type[pydantic.BaseModel], found: Iterable[Any]) -> Iterator[str]:
    """Yields a line for each finding of a pydantic.ValidationError.

    A line has the field, its value, the rule and a suggestion.
    """
    listed: set[str] = set()
    for finding in found:
        path = [str(part) for part in finding["loc"]]
        group, value = ".".join(path[:-1]), finding["input"]
        if finding["type"] != "extra_forbidden":
            yield _explain_error(root, path, finding)
            continue
        if near := find_near_section(root, path, value):
            yield f"{_format_setting(path[0], value)}: unknown. Did you mean {near}?"
            continue
        for name, inner in foreign_names.flatten(".".join(path), value):
            line = explain_unknown(root, name, inner)
            if line is None:
                line = f"{_format_setting(name, inner)}: unknown."
                known = _find_section(root, path)
                if known is not None and group not in listed:
                    listed.add(group)
                    line += f" Known here: {', '.join(known.model_fields)}."
            yield line


def find_near_section(root: type[pydantic.BaseModel], path: list[str], value: Any) -> str | None:
    """Returns the group whose name was mistyped, if that is what a field at the top is."""
    if len(path) > 1 or not isinstance(value, dict):
        return None
    return errors.find_nearest(path[0], root.model_fields)


def explain_unknown(root: type[pydantic.BaseModel], name: str, value: Any) -> str | None:
    """Returns the problem of a field that does not exist; None if there is no suggestion."""
    counterpart = find_counterpart(root, name)
    if counterpart is not None:
        return f"{_format_setting(name, value)}: {_explain_counterpart(root, counterpart, value)}."
    group = _find_section(root, name.split("."))
    above, _, last = name.rpartition(".")
    fields = _find_fields(root, foreign_names.normalize(last))
    if not fields and group is not None:
        near = errors.find_nearest(last, group.model_fields)
        fields = [f"{above}.{near}" if above else near] if near else []
    if not fields:
        return None
    return f"{_format_setting(name, value)}: unknown. Did you mean {errors.format_choices(fields)}?"


def find_counterpart(root: type[pydantic.BaseModel], name: str) -> Counterpart | None:
    """Returns what jaxsp has for another system's option.

    Also for the name of a field without its group, or in a group that jaxsp does not have.
    """
    counterpart = foreign_names.find(name)
    if counterpart is not None or ("." in name and name.partition(".")[0] in root.model_fields):
        return counterpart
    fields = _find_fields(root, foreign_names.normalize(name.rpartition(".")[2]))
    if len(fields) != 1:
        return None
    return Counterpart(names=(name,), field=fields[0], takes_value=True)


def format_override(
    root: type[pydantic.BaseModel], counterpart: Counterpart, value: Any
) -> str | None:
    """Returns `field=value` for another system's option, or None if that value cannot be kept."""
    field = counterpart.field
    if field is None or "=" in field:
        return None if value is False else field
    if not counterpart.takes_value or (kept := coerce_value(root, field, value)) is None:
        return None
    text = yaml_io.format_value(kept)
    return None if text.endswith("...") else f"{field}={text}"


def suggest_override(root: type[pydantic.BaseModel], name: str) -> str | None:
    """Returns a `field=value` that works for the field that a name stands for, if that is clear."""
    if (own := format_example(root, name)) is not None:
        return own
    counterpart = find_counterpart(root, name)
    if counterpart is None or counterpart.field is None:
        return None
    return (
        counterpart.field if "=" in counterpart.field else format_example(root, counterpart.field)
    )


def coerce_value(root: type[pydantic.BaseModel], field: str, value: Any) -> Any:
    """Returns a value as the field accepts it (3 for 3.0), or None if it does not."""
    *above, name = field.split(".")
    group = _find_section(root, [*above, name])
    candidates = [value]
    if isinstance(value, float) and value.is_integer():
        candidates.append(int(value))
    for candidate in candidates:
        if group is None:
            break
        try:
            group.model_validate({name: candidate})
        except pydantic.ValidationError as error:
            if any(finding["loc"][0] == name for finding in error.errors()):
                continue
        return candidate
    return None


def _explain_counterpart(
    root: type[pydantic.BaseModel], counterpart: Counterpart, value: Any
) -> str:
    """Suggestion for another system's option."""
    if counterpart.field_name is None:
        return counterpart.note
    note = f" ({counterpart.note})" if counterpart.note else ""
    if foreign_names.is_off(value) and (
        not counterpart.takes_value or coerce_value(root, counterpart.field_name, value) is None
    ):
        # no value: an example would turn on what is off here
        return f"unknown. It is off; jaxsp's field is {counterpart.field_name}{note}"
    if (kept := format_override(root, counterpart, value)) is not None:
        return f"unknown. Use {kept}{note}"
    works = ""
    if (
        counterpart.takes_value
        and (text := format_example(root, counterpart.field_name)) is not None
    ):
        works = f", for example {text}"
    return f"unknown. Use {counterpart.field_name}{works}{note}"


def _explain_error(
    root: type[pydantic.BaseModel], path: list[str], found: Mapping[str, Any]
) -> str:
    """One line for a finding about a field that exists."""
    key, value = ".".join(path), found["input"]
    given = _format_setting(key, value)
    match found["type"]:
        case "missing":
            return f"{key}: missing.{_describe_meaning(root, path)}"
        case "dict_type" | "model_type" if counterpart := foreign_names.find(key):
            use = format_override(root, counterpart, value) or counterpart.field_name
            rule = f"must be a group of fields; in place of this, set {use}"
        case "value_error":
            rule = str(found["ctx"]["error"])
        case "tuple_type":
            rule = "must be a list"
        case "too_short":
            rule = "must have at least 1 entry"
        case "dict_type" | "model_type":
            rule = "must be a group of fields"
        case "string_type":
            rule = "must be text, in quotes where it looks like something else"
        case "string_too_short":
            rule = "must not be empty"
        case _:
            rule = found["msg"].replace("Input should be", "must be")
    return f"{given}: {rule}.{_describe_meaning(root, path, value)}"


def _format_setting(name: str, value: Any) -> str:
    return f"{name} = {yaml_io.format_value(value)}"


def _find_section(
    root: type[pydantic.BaseModel], path: list[str]
) -> type[pydantic.BaseModel] | None:
    """The class that declares the fields next to the last word of `path`."""
    group: Any = root
    for part in path[:-1]:
        if part.isdigit():
            continue
        field = group.model_fields.get(part)
        if field is None:
            return None
        inner = [
            arg for arg in (field.annotation, *get_args(field.annotation)) if isinstance(arg, type)
        ]
        group = next((arg for arg in inner if issubclass(arg, pydantic.BaseModel)), None)
        if group is None:
            return None
    return group


def _find_fields(root: type[pydantic.BaseModel], name: str) -> list[str]:
    """Dotted names of all fields of that name; a field of a list's entries with the number 0."""
    found = []
    listed: list[type[pydantic.BaseModel]] = []
    for outer, group in _list_sections(root).items():
        if name in group.model_fields:
            found.append(f"{outer}.{name}")
        for field in group.model_fields:
            entry = _find_section(root, [outer, field, "0", ""])
            # data.eval has the fields of data.train
            if entry is not None and entry not in listed:
                listed.append(entry)
                found += [f"{outer}.{field}.0.{name}"] * (name in entry.model_fields)
    return found


def _describe_meaning(root: type[pydantic.BaseModel], path: list[str], value: Any = None) -> str:
    """What a field means, in a sentence, and a value that works; of a group, what it is and its fields."""
    group, inner = _find_section(root, path), _find_section(root, [*path, ""])
    field = group.model_fields.get(path[-1]) if group else None
    if field and field.description:
        means = re.split(r"(?<=\.)\s+(?=[A-Z(])", " ".join(field.description.split()))[0]
        return f" {means} For example {format_example(root, '.'.join(path), value)}."
    return f" {inner.__doc__} Its fields: {', '.join(inner.model_fields)}." if inner else ""


def format_example(root: type[pydantic.BaseModel], name: str, value: Any = None) -> str | None:
    """`field=value` with a value that works, the nearest to a wrong one that is known."""
    group = _find_section(root, name.split("."))
    field = group.model_fields.get(name.rpartition(".")[2]) if group else None
    if field is None:
        return None
    works = field.examples[0] if field.examples else field.default
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if value is not None and (whole := coerce_value(root, name, value)) is not None:
        works = whole
    elif near := errors.find_nearest(str(value), choices):
        works = near
    return f"{name}={works if isinstance(works, str) else yaml_io.format_value(works)}"


def _list_sections(root: type[pydantic.BaseModel]) -> dict[str, type[pydantic.BaseModel]]:
    return {
        name: cast(type[pydantic.BaseModel], field.annotation)
        for name, field in root.model_fields.items()
    }
