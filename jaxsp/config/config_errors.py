"""Help and error messages about config fields: meaning, rule, and a value that works."""

import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic

from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.eval_schema import EvalConfig
from jaxsp.config.fields import ConfigSection
from jaxsp.config.foreign_names import Counterpart
from jaxsp.config.schema import Config
from jaxsp.core import errors

Section = type[ConfigSection]

SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}

_TYPE_NAMES: dict[Any, str] = {
    dict: "mapping",
    tuple: "list",
    str: "text",
    timedelta: "duration",
    type(None): "null",
}
"""Names of types in --help; other types have their Python name."""


_MAPPING_RULE = "must be a mapping of fields"

_RULES = {
    "value_error": "{error}",
    "dict_type": _MAPPING_RULE,
    "model_type": _MAPPING_RULE,
    "tuple_type": "must be a list",
    "too_short": "must have at least 1 entry",
    "string_type": "must be text; quote text that looks like another type",
    "string_too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""Rules by pydantic's type of error; other types have pydantic's message."""


def describe_fields(sections: Iterable[str] = tuple(SECTIONS)) -> str:
    """Describes every field of sections with type, default and meaning, for --help."""
    lines = []
    for name in sections:
        section = SECTIONS[name]
        lines += [f"{name}: {section.__doc__}", *_describe_section(section, f"  {name}.", set())]
    return "\n".join(lines)


def _describe_section(section: Section, prefix: str, described: set[Section]) -> list[str]:
    """Args: described: classes of list entries that need no second description."""
    lines = []
    for name, field in section.model_fields.items():
        default = "required"
        if not field.is_required():
            default = f"default {yaml_io.format_value(field.get_default())}"
        lines.append(f"{prefix}{name}  ({_type_name(field.annotation)}; {default})")
        lines.append(f"      {' '.join((field.description or '').split())}")
        for entry in set(_inner_sections(field.annotation)) - described:
            described.add(entry)
            suffix = "[]" if get_origin(field.annotation) is tuple else ""
            lines += _describe_section(entry, f"{prefix}{name}{suffix}.", described)
    return lines


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(get_args(annotation))
    if (origin or annotation) in _TYPE_NAMES:
        return _TYPE_NAMES[origin or annotation]
    if _inner_sections(annotation) == [annotation]:
        return "mapping"
    return " | ".join(map(_type_name, get_args(annotation))) or annotation.__name__


def explain_errors(findings: Iterable[Any]) -> Iterator[str]:
    """Yields one line per finding of a pydantic.ValidationError.

    A line has the field, its value, the rule and a suggestion.
    """
    listed_sections: set[str] = set()
    for finding in findings:
        path = [str(part) for part in finding["loc"]]
        name = ".".join(path)
        value = finding["input"]
        if finding["type"] == "missing":
            yield f"{name}: missing.{_describe_meaning(path)}"
            continue
        known = foreign_names.find(name)
        if finding["type"] != "extra_forbidden":
            rule = finding["msg"].replace("Input should be", "must be")
            if finding["type"] in _RULES:
                rule = _RULES[finding["type"]].format_map(finding.get("ctx", {})).removesuffix(".")
            if rule == _MAPPING_RULE and known is not None:
                rule += f"; {value} is a value of {known.field_name}"
            yield f"{_format_setting(name, value)}: {rule}.{_describe_meaning(path, value)}"
            continue
        near = find_near_section(path, value)
        if near is not None:
            yield f"{_format_setting(name, value)}: unknown. Did you mean {near}?"
            continue
        section_name = ".".join(path[:-1])
        section = _find_section(path)
        is_section = isinstance(value, dict) and (known is None or known.field is not None)
        options = foreign_names.flatten(name, value) if is_section else [(name, value)]
        for name, inner_value in options:
            answer = _explain_unknown(name, inner_value)
            if answer is None:
                answer = "unknown."
                if section is not None and section_name not in listed_sections:
                    listed_sections.add(section_name)
                    title = f"Fields of {section_name}" if section_name else "Sections"
                    answer += f" {title}: {', '.join(section.model_fields)}."
            yield f"{_format_setting(name, inner_value)}: {answer}"


def find_near_section(path: list[str], value: Any) -> str | None:
    """Returns the section whose name was mistyped, for a mapping at the top of a config."""
    if len(path) > 1 or not isinstance(value, dict):
        return None
    return errors.find_nearest(path[0], SECTIONS)


def _explain_unknown(name: str, value: Any) -> str | None:
    """Returns the problem of a field that does not exist; None if there is no suggestion."""
    counterpart = find_counterpart(name)
    if counterpart is not None:
        if counterpart.field is None:
            return f"{counterpart.note}."
        note = f" ({counterpart.note})" if counterpart.note else ""
        # the value of a table would turn on what is off here
        is_off = foreign_names.is_off(value)
        field = counterpart.field_name if is_off else counterpart.field
        return f"unknown. Use {field}{note}."
    section_name, _, last = name.rpartition(".")
    names = _find_fields(foreign_names.normalize(last))
    section = _find_section(name.split("."))
    if not names and section is not None:
        near = errors.find_nearest(last, section.model_fields)
        if near is not None:
            names = [f"{section_name}.{near}" if section_name else near]
    return f"unknown. Did you mean {errors.format_choices(names)}?" if names else None


def find_counterpart(name: str) -> Counterpart | None:
    """Returns the counterpart in jaxsp of another system's option.

    Also of the name of a field without its section, or in a section that jaxsp does not have.
    """
    counterpart = foreign_names.find(name)
    section_name, dot, _ = name.partition(".")
    if counterpart is not None or (dot and section_name in SECTIONS):
        return counterpart
    names = _find_fields(foreign_names.normalize(name.rpartition(".")[2]))
    if len(names) != 1:
        return None
    return Counterpart(names=(name,), field=names[0], takes_value=True)


def suggest_override(name: str) -> str | None:
    """Returns a `field=value` that works for the field that a name stands for, if that is clear."""
    example = format_example(name)
    if example is not None:
        return example
    counterpart = find_counterpart(name)
    field = counterpart.field if counterpart is not None else None
    return field if field is None or "=" in field else format_example(field)


def coerce_value(field: str, value: Any) -> Any:
    """Returns a value as the field accepts it (3 for 3.0), or None if it does not."""
    *_, name = path = field.split(".")
    section = _find_section(path)
    if section is None:
        return None
    is_whole = isinstance(value, float) and value.is_integer()
    for candidate in (value, int(value)) if is_whole else (value,):
        try:
            section.model_validate({name: candidate})
        except pydantic.ValidationError as error:
            if any(finding["loc"][0] == name for finding in error.errors()):
                continue
        return candidate
    return None


def _format_setting(name: str, value: Any) -> str:
    return f"{name} = {yaml_io.format_value(value)}"


def _inner_sections(annotation: Any) -> list[Section]:
    """Sections in a field's type: the section itself, or the entries of a list."""
    types = (annotation, *get_args(annotation))
    return [kind for kind in types if isinstance(kind, type) and issubclass(kind, ConfigSection)]


def _find_section(path: list[str]) -> Section | None:
    """The class that declares the last field of a path and its neighbors."""
    section: Section = Config
    for part in path[:-1]:
        if not part.isdigit():
            field = section.model_fields.get(part)
            inner = _inner_sections(field.annotation) if field is not None else []
            if not inner:
                return None
            section = inner[0]
    return section


def _find_fields(name: str) -> list[str]:
    """Dotted names of all fields of that name; for entries of a list, with the index 0.

    Names of model.rope and eval.tasks are too general: `seed` is run.seed. The table of foreign
    names has those that fit.
    """
    found = []
    for section_name, section in SECTIONS.items():
        if name in section.model_fields:  # optimizer.weight_decay, and not that of a group
            found.append(f"{section_name}.{name}")
            continue
        if section is EvalConfig:
            continue
        for field_name, field in section.model_fields.items():
            entries = _inner_sections(field.annotation)
            is_list = get_origin(field.annotation) is tuple
            if is_list and any(name in entry.model_fields for entry in entries):
                found.append(f"{section_name}.{field_name}.0.{name}")
                break  # data.eval has the fields of data.train
    return found


def _describe_meaning(path: list[str], value: Any = None) -> str:
    """The first sentence about a field, and a value that works; the fields of a section."""
    section = _find_section(path)
    field = section.model_fields.get(path[-1]) if section is not None else None
    if field is not None and field.description:
        first_sentence = re.split(r"(?<=\.)\s", " ".join(field.description.split()))[0]
        return f" {first_sentence} For example {format_example('.'.join(path), value)}."
    inner = _find_section([*path, ""])
    if inner is None:
        return ""
    return f" {inner.__doc__} Its fields: {', '.join(inner.model_fields)}."


def format_example(name: str, value: Any = None) -> str | None:
    """Returns `field=value` with a value that works, if possible one near an invalid value."""
    section = _find_section(name.split("."))
    field = section.model_fields.get(name.rpartition(".")[2]) if section is not None else None
    if field is None or field.annotation in SECTIONS.values():
        return None
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    candidates = [
        coerce_value(name, value) if value is not None else None,
        errors.find_nearest(str(value), choices),
        field.examples[0] if field.examples else field.default,
    ]
    example = next((candidate for candidate in candidates if candidate is not None), None)
    text = example if isinstance(example, str) else yaml_io.format_value(example)
    return f"{name}={text}"
