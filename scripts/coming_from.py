"""Writes the tables of configs/guide/coming_from.md.

    python -m scripts.coming_from

Names are those of coming_from.yaml, and their counterparts those of jaxsp/config/counterparts.yaml.
Each part of the file is between two marker comments.
"""

import pathlib
import textwrap
from collections.abc import Iterator

from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.foreign_names import Counterpart
from jaxsp.run import config_file
from scripts import generated_text

FILE = pathlib.Path(__file__).parent.parent / "configs/guide/coming_from.md"


def find_counterpart(name: str) -> Counterpart:
    """Finds the counterpart of a listed name. Raises: ValueError if there is none."""
    counterpart = config_file.SCHEMA.find_counterpart(name)
    if counterpart is None:
        raise ValueError(f"coming_from.yaml: {name} is in no line of counterparts.yaml")
    return counterpart


def render_parts() -> dict[str, str]:
    """The generated parts of the file, by name."""
    text = pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    names = {system: listed.split() for system, listed in yaml_io.load(text).items()}
    found = {name: find_counterpart(name) for listed in names.values() for name in listed}
    order = {
        counterpart: at
        for at, counterpart in enumerate(dict.fromkeys(foreign_names.read_table()[0].values()))
    }
    found = dict(sorted(found.items(), key=lambda item: order.get(item[1], -1)))
    parts = {"options": _render_options(names, found)}
    parts |= {kind: _render_reasons(kind, found) for kind in ("not needed", "not offered")}
    return {name: "\n".join(lines) + "\n" for name, lines in parts.items()}


def _render_options(names: dict[str, list[str]], found: dict[str, Counterpart]) -> Iterator[str]:
    """A row for each field in the config's order, and the difference in values."""
    yield f"| jaxsp | {' | '.join(names)} | difference |"
    yield "|" + " --- |" * (len(names) + 2)
    fields = {str(counterpart.field_name).replace(".0.", "[].") for counterpart in found.values()}
    lines = (line.split() for line in config_file.SCHEMA.describe_fields().splitlines())
    for field in dict.fromkeys(line[0] for line in lines if line[0] in fields):
        same = {
            name: counterpart
            for name, counterpart in found.items()
            if str(counterpart.field_name).replace(".0.", "[].") == field
        }
        cells = [
            ", ".join(f"`{name}`" for name in listed if name in same) for listed in names.values()
        ]
        notes = [
            f"`{value}` {counterpart.note}" if value else counterpart.note
            for counterpart in dict.fromkeys(same.values())
            if not counterpart.takes_value
            for value in [str(counterpart.field).partition("=")[2]]
        ]
        yield f"| `{field}` | {' | '.join(cells)} | {'; '.join(notes)} |"


def _render_reasons(kind: str, found: dict[str, Counterpart]) -> Iterator[str]:
    """An entry of a list for each counterpart without a field."""
    for counterpart in dict.fromkeys(found.values()):
        reason, _, note = counterpart.note.partition(": ")
        if counterpart.field is None and reason == kind:
            names = ", ".join(f"`{name}`" for name in found if found[name] == counterpart)
            yield textwrap.fill(
                f"- {names}: {note}", 100, subsequent_indent="  ", break_on_hyphens=False
            )


def main() -> None:
    for name, text in render_parts().items():
        generated_text.write_part(FILE, name, text)


if __name__ == "__main__":
    main()
