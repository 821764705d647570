"""Writes the generated pages below configs/: config fields, and fields of JSON lines.

    python -m scripts.config_reference

Config fields come from `jaxsp train --help`, the others from METRICS and from the docstrings of
dataclasses.
"""

import ast
import dataclasses
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator

from jaxsp.evaluation.evaluator import EvalFields
from jaxsp.evaluation.retrieval import TaskFields
from jaxsp.generation.generator import SampleFields
from jaxsp.run import config_file
from jaxsp.run.metrics import NonfiniteStep, StartLine, StepFields
from jaxsp.training.metric_table import METRICS

FOLDER = pathlib.Path(__file__).parent.parent / "configs"

LINES = {
    "metrics.jsonl": StepFields,
    "eval.jsonl": EvalFields,
    "tasks.jsonl": TaskFields,
    "samples.jsonl": SampleFields,
    "nonfinite_steps.jsonl": NonfiniteStep,
    "starts.jsonl": StartLine,
}
"""Dataclass of each file of JSON lines in a run directory. The first two also have METRICS."""

WIDTH = 100

_FIELDS_HEAD = """# Config fields

Fields of a config file, by section, as `jaxsp train --help` prints them.
`python -m scripts.config_reference` writes this page.

"""

_METRICS_HEAD = """# Metrics

Files of JSON lines in a run directory. Every number has one meaning on every mesh.
[Trackers](../guide/monitoring.md#trackers) show the same numbers.
`python -m scripts.config_reference` writes this page.

"""


def render_pages() -> dict[str, str]:
    """The generated pages, by their path below the folder."""
    lines = [f"## {name}\n\n{render_dataclass(cls)}" for name, cls in LINES.items()]
    return {
        "reference/fields.md": _FIELDS_HEAD + render_config(config_file.SCHEMA.describe_fields()),
        "reference/metrics.md": _METRICS_HEAD + "\n".join(lines),
    }


def render_config(help_text: str) -> str:
    """Markdown for the text that `--help` prints about the config: a heading for each section."""
    lines = help_text.splitlines()
    blocks = []
    for index, line in enumerate(lines):
        if section := re.fullmatch(r"(\w+): (.+)", line):
            blocks.append(f"## {section[1]}\n\n{_wrap(section[2])}\n\n")
        elif field := re.fullmatch(r"  (\S+)  \((.+); (required|default .*)\)", line):
            name, kind, default = field.groups()
            blocks.append(
                _render_field(name, f"{kind}; {_quote_default(default)}", lines[index + 1].strip())
            )
    return "".join(blocks).replace("\n## ", "\n\n## ")


def render_dataclass(cls: type) -> str:
    """Markdown for a dataclass of lines: its docstring, then those of its fields and METRICS."""
    classes = filter(dataclasses.is_dataclass, cls.__mro__)
    docstrings = dict(pair for part in classes for pair in _attribute_docstrings(part))
    missing = {field.name for field in dataclasses.fields(cls)} - docstrings.keys()
    assert not missing, f"{cls.__name__}: fields without a docstring: {missing}"
    meanings = docstrings
    if cls in (StepFields, EvalFields):
        metrics = {name: metric.meaning for name, metric in METRICS.items()}
        meanings = {"step": meanings["step"]} | metrics | meanings
    fields = [_render_field(name, "", meaning) for name, meaning in meanings.items()]
    return f"{_wrap(' '.join(inspect.getdoc(cls).split()))}\n\n" + "".join(fields)


def _attribute_docstrings(cls: type) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for attribute, text in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if (
            isinstance(attribute, ast.AnnAssign)
            and isinstance(attribute.target, ast.Name)
            and is_text
        ):
            yield attribute.target.id, " ".join(str(text.value.value).split())


def _quote_default(default: str) -> str:
    word, _, value = default.partition(" ")
    return f"{word} `{value}`" if value else word


def _render_field(name: str, kind: str, meaning: str) -> str:
    note = f" ({kind})" if kind else ""
    return _wrap(f"- `{name}`{note}: {_escape(meaning)}", indent="  ") + "\n"


def _escape(text: str) -> str:
    """Escapes asterisks outside of code, which Markdown would take for emphasis."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    for name, text in render_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
