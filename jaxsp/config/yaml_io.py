"""YAML as configs are written in it, and small files that are there as a whole or not at all."""

import pathlib
import re
from datetime import timedelta
from typing import Any

import yaml

from jaxsp.core import durations

PARTIAL_SUFFIX = ".partial"
"""Behind the name of a file that is being written."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers (PyYAML's 1.1 reads 3e-4 as text), and no key twice (PyYAML takes the last without a word)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that _Loader would read as a number, and writes durations with their unit."""


_Dumper.add_representer(
    timedelta, lambda dumper, value: dumper.represent_str(durations.to_text(value))
)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("+-0123456789"),
    )


def load(text: str) -> Any:
    """What a text says. Raises: yaml.YAMLError, and ValueError for a date that does not exist (2026-13-01)."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


_MAX_VALUES = 100_000
"""Of a config, each counted as often as an alias repeats it: 15 lines of `b: [*a, *a, ...]` can stand for 10**14."""


def _count_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values below a node, itself too. Raises: yaml.YAMLError for too many, and for a node inside itself."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.constructor.ConstructorError(
                None, None, "an alias stands inside what it stands for", node.start_mark
            )
        return size
    known[id(node)], size = None, 1
    if isinstance(node, yaml.MappingNode):
        size += sum(
            _count_values(key, known) + _count_values(value, known) for key, value in node.value
        )
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_count_values(one, known) for one in node.value)
    if size > _MAX_VALUES:
        said = f"its aliases make more than {_MAX_VALUES:,} values of it"
        raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
    known[id(node)] = size
    return size


def dump(value: Any) -> str:
    """A text that `load` makes the value of again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def format_value(value: object) -> str:
    """A value as one would write it in the file, on one line, its beginning if it is long."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = yaml.dump(
            value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True
        )
    except yaml.YAMLError:
        text = repr(value)
    return shorten(" ".join(text.removesuffix("...\n").split()))


def shorten(text: str) -> str:
    """The beginning of a text that is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a small file: whoever reads it, whenever, finds the text before or this one."""
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
