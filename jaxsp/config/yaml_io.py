"""YAML as configs are written in it."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import yaml

from jaxsp.core import errors, units

_MAX_VALUES = 100_000
"""Maximum number of values in a config, each counted as often as aliases repeat it.

15 lines of `b: [*a, *a, ...]` can stand for 10**14 values."""

MAX_DEPTH = 50
"""Maximum number of lists and mappings inside each other; far below Python's recursion limit."""

_MAX_DIGITS = 308
"""Maximum length of an integer, that of the largest float; Python refuses to print 4,301 digits."""

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Loader without PyYAML's surprises. YAML 1.1, as in PyYAML, reads 3e-4 as text, 010 as 8 and
    12:30 as 750. Here, 3e-4 is a number and the others are text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT,
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("+-0123456789"),
)

_FLOAT_PATTERN = re.compile(
    r"""[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$
    |[-+]?\.(inf|Inf|INF)$
    |\.(nan|NaN|NAN)$""",
    re.VERBOSE,
)

_Loader.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("+-.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which _Loader or PyYAML reads as a number."""


_Dumper.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("+-.0123456789"))
_Dumper.add_representer(
    timedelta, lambda dumper, value: dumper.represent_str(units.format_duration(value))
)


def load(text: str) -> Any:
    """Returns the value of a text. Raises: yaml.YAMLError if it is not YAML, or too large."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {}, depth=0)
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    # PyYAML's constructors let many errors through: of dates (2026-13-01), of `!!bool x`, ...
    except Exception as error:
        is_deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if is_deep else errors.first_line(error)
        raise yaml.YAMLError(reason) from None


def _count_values(node: yaml.Node, counts: dict[int, int | None], *, depth: int) -> int:
    """Counts the values in a node, itself included, and checks them.

    A key that occurs twice in a mapping is an error; PyYAML takes the last.

    Args: counts: results by node id; None for a node that is being counted.
    Raises: yaml.YAMLError: too many values, too many inside each other, a node inside itself, a key
        twice or a number too large.
    """

    def fail(problem: str, at: yaml.Node = node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)

    if depth > MAX_DEPTH:
        fail("it is nested too deeply")
    if id(node) in counts:
        known_count = counts[id(node)]
        if known_count is None:
            fail("an alias is inside the value that it stands for")
        return known_count
    counts[id(node)] = None
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        inner = [each for pair in node.value for each in pair]
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                fail(f"{key.value} occurs twice", key)
            seen.add(str(key.value))
    if node.tag == _INT and len(node.value) > _MAX_DIGITS:
        fail("the number is too large")
    count = 1 + sum(_count_values(each, counts, depth=depth + 1) for each in inner)
    if count > _MAX_VALUES:
        fail(f"its aliases stand for more than {_MAX_VALUES:,} values")
    counts[id(node)] = count
    return count


def dump(value: Any) -> str:
    """Returns text from which `load` makes the value again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def format_value(value: object) -> str:
    """Formats a value as in the file, on one line, shortened if it is long."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = yaml.dump(
            value,
            Dumper=_Dumper,
            default_flow_style=True,
            sort_keys=False,
            width=10**9,
            allow_unicode=True,
        )
    except yaml.YAMLError:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of 4,301 digits, and deep lists, from Python
        text = f"a large {type(value).__name__}"
    return shorten(" ".join(text.removesuffix("...\n").split()))


def shorten(text: str, max_chars: int = 80) -> str:
    """Returns a text, or its beginning if it is long."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def flatten(
    fields: Any, field: str = "", *, keeps_empty: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yields each value of nested fields with its name as in `key.path=value`. A list of mappings
    has nested fields; another list is a value. Empty ones are skipped unless `keeps_empty`."""
    is_mapping = isinstance(fields, dict)
    is_list = isinstance(fields, list) and all(isinstance(entry, dict) for entry in fields)
    if not (is_mapping or is_list) or (keeps_empty and not fields):
        yield field, fields
        return
    for name, value in fields.items() if is_mapping else enumerate(fields):
        inner = f"{field}.{name}" if field else str(name)
        yield from flatten(value, inner, keeps_empty=keeps_empty)
