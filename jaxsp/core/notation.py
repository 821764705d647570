"""YAML as configs are written in it."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers (PyYAML's 1.1 reads 3e-4 as text), and no key twice (PyYAML takes the last without a word)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that _Loader would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("+-0123456789"))


def load(text: str) -> Any:
    """What a text says. Raises: yaml.YAMLError, and ValueError for a date that does not exist (2026-13-01)."""
    return yaml.load(text, _Loader)


def dump(value: Any) -> str:
    """A text that `load` makes the value of again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def line(value: object) -> str:
    """A value as one would write it in the file, on one line, its beginning if it is long."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    except yaml.YAMLError:
        text = repr(value)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= 80 else f"{text[:77]}..."
