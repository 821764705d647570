"""Text of a converted config: YAML with comments about what it comes from and what is left."""

import textwrap
from collections.abc import Iterator

from jaxsp.config import yaml_io
from jaxsp.conversion.draft import Draft
from jaxsp.core import errors

_WIDTH = 100


def render(draft: Draft, *, title: str) -> str:
    """Returns the text of a config. Comments are single lines, whatever the input contains."""
    command = "python -m jaxsp.train CONFIG --preview"
    lines = [
        *_comment(f"Converted from {title}."),
        *_comment(f"Check it with: python -m jaxsp.plan CONFIG, then {command}"),
    ]
    not_converted = [f"{name}: {reason}" for name, reason in draft.not_converted.items()]
    lists = {"To fill in or check:": draft.tasks, "Not converted:": not_converted}
    for heading, entries in lists.items():
        if entries:
            lines += ["#", f"# {heading}"]
        for entry in entries:
            lines += _comment(entry, indent="- ")
    not_needed = dict.fromkeys(name.partition(".")[0] for name in draft.not_needed)
    if not_needed:
        lines += ["#", *_comment(f"Not needed here: {', '.join(not_needed)}.")]
    for section, fields in draft.nest().items():
        lines.append(f"{section}:")
        for field, value in fields.items():
            lines += _render_field(field, value, draft.origins[f"{section}.{field}"])
    return "\n".join(lines) + "\n"


def _comment(text: str, *, indent: str = "") -> list[str]:
    """Lines of a comment. Control characters are escaped."""
    return textwrap.wrap(
        errors.escape(" ".join(text.split())),
        width=_WIDTH,
        initial_indent=f"# {indent}",
        subsequent_indent="# " + " " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _render_field(field: str, value: object, origin: str) -> Iterator[str]:
    """Yields the lines of a field, with its origin as a comment after the first."""
    text = yaml_io.format_value(value)
    comment = ""
    if origin and origin != field:
        comment = f"  # {errors.escape(' '.join(origin.split()))}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"  {field}:{comment}"
        text = textwrap.indent(yaml_io.dump(value), "    ")
    elif isinstance(value, list | dict) and not text.endswith("..."):
        text = f"  {field}: {text}{comment}"
    else:
        text = textwrap.indent(yaml_io.dump({field: value}), "  ")
        first, _, rest = text.partition("\n")
        if not rest or isinstance(value, list | dict):
            text = f"{first}{comment}\n{rest}"
    yield from text.rstrip("\n").split("\n")
