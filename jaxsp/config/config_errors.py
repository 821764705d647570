"""Help and error messages about config fields: meaning, rule, and a value that works."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.fields import BROKEN_RULES, FOR_TRAINING, HERE, Choice, ConfigSection
from jaxsp.config.foreign_names import Counterpart
from jaxsp.core import errors

Section = type[ConfigSection]

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
    "union_tag_not_found": _MAPPING_RULE,
    "tuple_type": "must be a list",
    "too_short": "must have at least 1 entry",
    "string_type": "must be text; quote text that looks like another type",
    "string_too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""Rules by pydantic's type of error; other types have pydantic's message."""


class _Field(NamedTuple):
    """Classes of the sections in a field's value, and how they are selected."""

    sections: tuple[Section, ...]
    choice: Choice | None
    is_list: bool


def read_field(field: FieldInfo) -> _Field:
    """Reads the sections in a field's type: the section itself, the entries of a list, or those
    that a choice selects from."""
    annotation = field.annotation
    if is_list := get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    metadata = [*field.metadata, *(parts[1:] if get_origin(annotation) is Annotated else ())]
    for choice in metadata:
        if isinstance(choice, Choice):
            return _Field(choice.types, choice, is_list)
    kinds = tuple(
        kind
        for kind in (annotation, *parts)
        if isinstance(kind, type) and issubclass(kind, ConfigSection)
    )
    return _Field(kinds, None, is_list)


class Schema:
    """Names and descriptions of the fields of a config."""

    def __init__(self, config: Section):
        self.config = config
        self.sections = {name: read_field(field) for name, field in config.model_fields.items()}
        self.validators: dict[str, Callable[[Any], ConfigSection]] = {
            name: pydantic.TypeAdapter(field.rebuild_annotation()).validate_python
            for name, field in config.model_fields.items()
        }
        """Functions that make a section from its fields, or raise pydantic.ValidationError."""

    def describe_fields(self, names: Iterable[str] | None = None) -> str:
        """Describes every field of sections with type, default and meaning, for --help."""
        lines = []
        for name in names or self.sections:
            field = self.config.model_fields[name]
            title = field.annotation.__doc__.partition("\n")[0]  # type: ignore[union-attr]
            lines += [f"{name}: {title}", *_describe_field(field, f"  {name}.", set())]
        return "\n".join(lines)

    def find_sections(self, path: Sequence[str]) -> tuple[Section, ...]:
        """The classes of the section at a path."""
        path = [part for part in path if not part.isdigit()]
        if not path:
            return (self.config,)
        fields = [field for _, field in self.find_fields(path)]
        return tuple(kind for field in fields for kind in read_field(field).sections)

    def find_fields(self, path: Sequence[str]) -> list[tuple[Section, FieldInfo]]:
        """The classes that may declare the last field of a path, and what they declare."""
        if not path:
            return []
        kinds = self.find_sections(path[:-1])
        return [
            (kind, kind.model_fields[path[-1]]) for kind in kinds if path[-1] in kind.model_fields
        ]

    def find_choice(self, path: Sequence[str]) -> Choice | None:
        """The choice that selects the class of the section at a path."""
        path = [part for part in path if not part.isdigit()]
        choices = [read_field(field).choice for _, field in self.find_fields(path)]
        return next(filter(None, choices), None)

    def find_names(self, name: str) -> list[str]:
        """Dotted names of all fields of that name; for entries of a list, with the index 0.

        Names of model.rope, eval.tasks and logging.trackers are too general: `seed` is run.seed.
        The table of foreign names has those that fit.
        """
        found = []
        for section_name, section in self.sections.items():
            if any(name in kind.model_fields for kind in section.sections):
                found.append(f"{section_name}.{name}")  # optimizer.weight_decay, not of a group
                continue
            if section_name in ("eval", "logging"):
                continue
            for field_name, field in section.sections[0].model_fields.items():
                inner = read_field(field)
                is_inner = inner.is_list or inner.choice is not None
                if is_inner and any(name in each.model_fields for each in inner.sections):
                    index = ".0" if inner.is_list else ""
                    found.append(f"{section_name}.{field_name}{index}.{name}")
                    break  # data.eval has the fields of data.train
        return found

    def explain_errors(self, findings: Iterable[Any]) -> Iterator[str]:
        """Yields one line per finding of a pydantic.ValidationError, or several for a section.
        A line has the field, its value, the rule and a suggestion."""
        listed_sections: set[str] = set()
        for finding in findings:
            path, own, choice = self._resolve(finding["loc"])
            name = ".".join(path)
            value = finding["input"]
            kind = finding["type"]
            if kind == BROKEN_RULES:
                yield from (line.replace(HERE, name) for line in finding["ctx"]["problems"])
            elif kind == "missing":
                yield f"{name}: missing.{self._describe_meaning(path, own=own)}"
            elif kind.startswith("union_tag"):
                yield self._explain_choice(path, value)
            elif kind == "extra_forbidden":
                yield from self._explain_extra(path, value, own, choice, listed_sections)
            else:
                rule = finding["msg"].replace("Input should be", "must be")
                if kind in _RULES:
                    rule = _RULES[kind].format_map(finding.get("ctx", {})).removesuffix(".")
                known = foreign_names.find(name)
                if rule == _MAPPING_RULE and known is not None:
                    rule += f"; {value} is a value of {known.field_name}"
                rule = rule.replace(HERE, ".".join(path[:-1]))
                meaning = self._describe_meaning(path, value, own=own)
                yield f"{_format_setting(name, value)}: {rule}.{meaning}"

    def _resolve(self, location: Sequence[Any]) -> tuple[list[str], Section, Choice | None]:
        """The path of an error without the names of classes that pydantic has in it, the class of
        its last section, and the choice that selected it."""
        own = self.config
        choice: Choice | None = None
        path: list[str] = []
        field = _Field((), None, False)
        for part in map(str, location):
            if field.choice is not None and part in field.choice.by_name():
                own = field.choice.by_name()[part]
                choice = field.choice
                field = _Field((), None, False)
                continue
            path.append(part)
            if field.is_list and part.isdigit():
                field = field._replace(is_list=False)
                continue
            if len(field.sections) == 1:
                own = field.sections[0]
                choice = None
            known = part in own.model_fields
            field = read_field(own.model_fields[part]) if known else _Field((), None, False)
        return path, own, choice

    def _explain_choice(self, path: list[str], value: Any) -> str:
        """Explains a name that selects no class."""
        choice = self.find_choice(path)
        assert choice is not None
        name = ".".join(path)
        field_path = path[:-1] if path[-1].isdigit() else path
        if isinstance(value, dict):
            field_path = [*path, choice.selector]
            name = ".".join(field_path)
            if choice.selector not in value:
                return f"{name}: missing.{self._describe_meaning(field_path)}"
            value = value[choice.selector]
        elif not choice.is_name:
            known = foreign_names.find(name)
            owner = f"; {value} is a value of {known.field_name}" if known is not None else ""
            meaning = self._describe_meaning(field_path, value)
            return f"{_format_setting(name, value)}: {_MAPPING_RULE}{owner}.{meaning}"
        names = [f"'{each}'" for each in choice.by_name()]
        meaning = self._describe_meaning(field_path, value)
        return f"{_format_setting(name, value)}: must be {errors.format_choices(names)}.{meaning}"

    def _explain_extra(
        self,
        path: list[str],
        value: Any,
        own: Section,
        choice: Choice | None,
        listed_sections: set[str],
    ) -> Iterator[str]:
        """Explains a field that a section does not have."""
        name = ".".join(path)
        owners = choice.owners(path[-1]) if choice is not None else []
        if choice is not None and owners:
            section = name.rpartition(".")[0]
            selected = own.model_fields[choice.selector].default
            if choice.is_name and not path[-2].isdigit():
                selected = f"the {path[-2]} {selected}"
            choices = [f"{section}.{choice.selector}={owner}" for owner in owners]
            yield (
                f"{_format_setting(name, value)}: must be null, because {selected} "
                f"does not have it. Use {name}=null, or {errors.format_choices(choices)}."
            )
            return
        near = self.find_near_section(path, value)
        if near is not None:
            yield f"{_format_setting(name, value)}: unknown. Did you mean {near}?"
            return
        known = foreign_names.find(name)
        is_section = isinstance(value, dict) and (known is None or known.field is not None)
        options = yaml_io.flatten(value, name, keeps_empty=True) if is_section else [(name, value)]
        for option, inner_value in options:
            *option_path, last = option.split(".")
            counterpart = self.find_counterpart(option)
            names = self.find_names(foreign_names.normalize(last))
            if not names:
                kinds = self.find_sections(option_path)
                fields = dict.fromkeys(each for kind in kinds for each in kind.model_fields)
                near = errors.find_nearest(last, fields)
                names = [".".join([*option_path, near])] if near is not None else []
            if counterpart is not None and counterpart.field is None:
                answer = f"{counterpart.note}."
            elif counterpart is not None:
                note = f" ({counterpart.note})" if counterpart.note else ""
                # the value of a table would turn on what is off here
                is_off = foreign_names.is_off(inner_value)
                field = counterpart.field_name if is_off else counterpart.field
                answer = f"unknown. Use {field}{note}."
            elif names:
                answer = f"unknown. Did you mean {errors.format_choices(names)}?"
            else:
                answer = "unknown."
                section = ".".join(path[:-1])
                if section not in listed_sections:
                    listed_sections.add(section)
                    title = f"Fields of {section}" if section else "Sections"
                    answer += f" {title}: {', '.join(own.model_fields)}."
            yield f"{_format_setting(option, inner_value)}: {answer}"

    def find_near_section(self, path: list[str], value: Any) -> str | None:
        """Returns the section whose name was mistyped, for a mapping at the top of a config."""
        if len(path) > 1 or not isinstance(value, dict):
            return None
        return errors.find_nearest(path[0], self.sections)

    def find_counterpart(self, name: str) -> Counterpart | None:
        """Returns the counterpart in jaxsp of another system's option, or of the name of a field
        without its section or with one that jaxsp does not have."""
        counterpart = foreign_names.find(name)
        section_name, dot, _ = name.partition(".")
        if counterpart is not None or (dot and section_name in self.sections):
            return counterpart
        names = self.find_names(foreign_names.normalize(name.rpartition(".")[2]))
        if len(names) != 1:
            return None
        return Counterpart(names=(name,), field=names[0], takes_value=True)

    def suggest_override(self, name: str) -> str | None:
        """Returns a `field=value` that works for the field that a name stands for, if that is
        clear."""
        example = self.format_example(name)
        if example is not None:
            return example
        counterpart = self.find_counterpart(name)
        field = counterpart.field if counterpart is not None else None
        return field if field is None or "=" in field else self.format_example(field)

    def coerce_value(self, name: str, value: Any, own: Section | None = None) -> Any:
        """Returns a value as the field accepts it (3 for 3.0), or None if it does not.
        Args: own: class of the section; None: any that has the field."""
        path = name.split(".")
        is_whole = isinstance(value, float) and value.is_integer()
        for section, _ in self.find_fields(path):
            if own not in (None, section):
                continue
            for candidate in (value, int(value)) if is_whole else (value,):
                try:
                    section.model_validate({path[-1]: candidate})
                except pydantic.ValidationError as error:
                    if any(finding["loc"][:1] == (path[-1],) for finding in error.errors()):
                        continue
                return candidate
        return None

    def _describe_meaning(
        self, path: list[str], value: Any = None, *, own: Section | None = None
    ) -> str:
        """The first sentence about a field, and a value that works; the fields of a section.
        Args: own: class of the section, if it is known."""
        found = [section for section, _ in self.find_fields(path)]
        own = own if own in found else None
        for section in found[:1] if own is None else [own]:
            assert section is not None
            if description := _find_description(section, path[-1]):
                example = self.format_example(".".join(path), value, own)
                return f" {_first_sentence(description)} For example {example}."
        sections = self.find_sections(path)
        if not sections:
            return ""
        owner = self.config.model_fields[path[0]].annotation if len(path) == 1 else sections[0]
        title = (owner.__doc__ or "").partition("\n")[0]
        names = dict.fromkeys(name for section in sections for name in section.model_fields)
        return f" {title} Its fields: {', '.join(names)}."

    def format_example(
        self, name: str, value: Any = None, own: Section | None = None
    ) -> str | None:
        """Returns `field=value` with a value that works, if possible one near an invalid value.
        Args: own: see `coerce_value`."""
        path = name.split(".")
        found = self.find_fields(path)
        if not found or len(path) == 1:
            return None
        field = found[0][1]
        kinds = [each.annotation for _, each in found]
        literals = [kind for kind in kinds if get_origin(kind) is Literal]
        choices = [str(each) for kind in literals for each in get_args(kind)]
        example = field.examples[0] if field.examples else field.default
        inner = read_field(field).choice
        if inner is not None and inner.is_name:
            choices = [*inner.by_name()]
            example = inner.find(example)
        candidates = [
            self.coerce_value(name, value, own) if value is not None else None,
            self.coerce_value(name, foreign_names.translate_value(name, value), own),
            errors.find_nearest(str(value), choices),
            example,
        ]
        example = next((each for each in candidates if each is not None), None)
        text = example if isinstance(example, str) else yaml_io.format_value(example)
        return f"{name}={text}"


def _describe_field(field: FieldInfo, prefix: str, described: set[Section]) -> list[str]:
    """Describes the fields of the sections in a field, those of a choice together.
    Args: described: classes of list entries that need no second description."""
    sections, choice, _ = read_field(field)
    lines = []
    for name in dict.fromkeys(name for kind in sections for name in kind.model_fields):
        if choice is not None and name == choice.selector:
            names = choice.by_name()
            default = "required" if choice.default is None else f"default {choice.default}"
            meaning = _find_description(sections[0], name)
            for each, kind in names.items():
                meaning += f" {each}: {_first_sentence(' '.join((kind.__doc__ or '').split()))}"
            lines.append(f"{prefix}{name}  ({' | '.join(names)}; {default})")
            lines.append(f"      {' '.join(meaning.split())}")
            continue
        owners: dict[str, list[Section]] = {}
        for kind in sections:
            if name in kind.model_fields:
                owners.setdefault(_describe_value(kind.model_fields[name]), []).append(kind)
        for text, kinds in owners.items():
            head, meaning = text.split("\n")
            if choice is not None and len(kinds) < len(sections):
                owner_names = [str(kind.model_fields[choice.selector].default) for kind in kinds]
                meaning = f"Only for {', '.join(owner_names)}. {meaning}"
            lines += [f"{prefix}{name}  {head}", f"      {meaning}"]
            inner = kinds[0].model_fields[name]
            nested = read_field(inner)
            if not described.issuperset(nested.sections):
                described.update(nested.sections)
                suffix = "[]" if nested.is_list else ""
                lines += _describe_field(inner, f"{prefix}{name}{suffix}.", described)
    return lines


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text)[0]


def _find_description(section: Section, name: str) -> str:
    """Meaning of a field, that of a base class if it has no docstring of its own."""
    for base in section.__mro__:
        if issubclass(base, ConfigSection) and name in base.model_fields:
            if description := base.model_fields[name].description:
                return " ".join(description.split())
    return ""


def _describe_value(field: FieldInfo) -> str:
    """Type and default of a field, and its meaning in a second line."""
    _, choice, is_list = read_field(field)
    text = _type_name(field.annotation)
    default = "required"
    if not field.is_required() and field.json_schema_extra != FOR_TRAINING:
        value = field.get_default()
        if choice is not None and choice.is_name and is_list:
            value = [choice.find(entry) for entry in value]
        elif choice is not None and choice.is_name:
            text = f"{' | '.join(choice.by_name())} | mapping"
            value = choice.find(value)
        default = f"default {yaml_io.format_value(value)}"
    return f"({text}; {default})\n{' '.join((field.description or '').split())}"


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if (origin or annotation) in _TYPE_NAMES:
        return _TYPE_NAMES[origin or annotation]
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return "mapping"
    return " | ".join(map(_type_name, get_args(annotation))) or annotation.__name__


def _format_setting(name: str, value: Any) -> str:
    return f"{name} = {yaml_io.format_value(value)}"
