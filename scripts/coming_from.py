"""Writes the tables of configs/guide/coming_from.md.

    python -m scripts.coming_from

Names are those of coming_from.yaml, their counterparts those of jaxsp/config/counterparts.yaml, and
defaults those of jaxsp/conversion/systems.yaml. Each part of the file is between two marker
comments.
"""

import pathlib
import textwrap
from collections.abc import Iterator

from jaxsp.config import config_errors, foreign_names, yaml_io
from jaxsp.config.foreign_names import Counterpart
from jaxsp.conversion import draft
from scripts import generated_text

FILE = pathlib.Path(__file__).parent.parent / "configs/guide/coming_from.md"

WIDTH = 100


def read_names() -> dict[str, list[str]]:
    """Reads the option names to list, by system."""
    text = pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {system: names.split() for system, names in yaml_io.load(text).items()}


def find_counterpart(name: str) -> Counterpart:
    """Finds the counterpart of a listed name. Raises: ValueError if there is none."""
    counterpart = config_errors.find_counterpart(name)
    if counterpart is None:
        raise ValueError(f"coming_from.yaml: {name} is in no line of counterparts.yaml")
    return counterpart


def render_parts() -> dict[str, str]:
    """The generated parts of the file, by name."""
    return {
        "options": "\n".join(_render_options()) + "\n",
        "not needed": "\n".join(_render_reasons("not needed")) + "\n",
        "not offered": "\n".join(_render_reasons("not offered")) + "\n",
        "defaults": "\n".join(_render_defaults()) + "\n",
    }


def _list_fields() -> list[str]:
    """All fields of the config, in its order."""
    lines = config_errors.describe_fields().splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]


def _group_by_field() -> dict[str, dict[str, list[str]]]:
    """Listed names by field, then by system."""
    names = read_names()
    fields: dict[str, dict[str, list[str]]] = {}
    for system, listed in names.items():
        for name in listed:
            field = find_counterpart(name).field_name
            if field is not None:
                by_system = fields.setdefault(field.replace(".0.", "[]."), {})
                by_system.setdefault(system, []).append(name)
    order = {field: index for index, field in enumerate(_list_fields())}
    return dict(sorted(fields.items(), key=lambda item: order.get(item[0], len(order))))


def _render_options() -> Iterator[str]:
    systems = list(read_names())
    notes = _group_notes()
    yield f"| jaxsp | {' | '.join(systems)} | difference |"
    yield "|" + " --- |" * (len(systems) + 2)
    for field, by_system in _group_by_field().items():
        cells = [_join(by_system.get(system, [])) for system in systems]
        yield f"| `{field}` | {' | '.join(cells)} | {'; '.join(notes.get(field, []))} |"


def _group_notes() -> dict[str, list[str]]:
    """Notes of listed counterparts whose value is another one, by field."""
    notes: dict[str, list[str]] = {}
    for counterpart in _group_by_counterpart():
        if counterpart.field_name is not None and not counterpart.takes_value:
            _, equals, value = str(counterpart.field).partition("=")
            note = f"`{value}` {counterpart.note}" if equals else counterpart.note
            notes.setdefault(counterpart.field_name, []).append(note)
    return notes


def _render_reasons(kind: str) -> Iterator[str]:
    """One line for each listed counterpart without a field."""
    for counterpart, names in _group_by_counterpart().items():
        if counterpart.field is None and counterpart.note.startswith(kind):
            yield from _wrap(f"{_join(names)}: {counterpart.note.partition(': ')[2]}")


def _group_by_counterpart() -> dict[Counterpart, list[str]]:
    """Listed names by counterpart, in the order of counterparts.yaml."""
    counterparts: dict[Counterpart, list[str]] = {}
    listed = dict.fromkeys(name for names in read_names().values() for name in names)
    for name in listed:
        counterparts.setdefault(find_counterpart(name), []).append(name)
    order = {entry: index for index, entry in enumerate(foreign_names.list_counterparts())}
    return dict(sorted(counterparts.items(), key=lambda item: order.get(item[0], -1)))


def _render_defaults() -> Iterator[str]:
    for entry in draft.read_systems().values():
        values = entry["defaults"] | entry["lora"]
        settings = ", ".join(f"`{name}: {yaml_io.format_value(values[name])}`" for name in values)
        yield from _wrap(f"{entry['title']}: {settings}")


def _join(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrap(text: str) -> list[str]:
    """Lines of an entry of a list, with asterisks outside of code escaped."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
    return textwrap.wrap(
        "`".join(parts),
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def main() -> None:
    for name, text in render_parts().items():
        generated_text.write_part(FILE, name, text)


if __name__ == "__main__":
    main()
