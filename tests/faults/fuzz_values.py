"""Odd values and hostile texts, and changes of files, for tests/faults/fuzz.py."""

import random
from typing import Any

_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 10**20, 10**400, 2**63),
    *(float("nan"), float("inf"), "", " ", "a", "1", "null", "x" * 100_000, "9" * 5000),
    *("\x1b]0;title\x07", "a\nb: c", "\u202e", "\x00", "../..", "/dev/zero", "{{ 1 }}", "(a+)+$"),
    *([], [None], [[]], {}, {"a": {}}, {"": 1}, [1, "a", None], [True] * 1000, _DEEP),
]
"""Values in place of others; json writes NaN and Infinity as Python reads them."""

ODD_TEXTS = [
    *("0x" + "f" * 5000, "9" * 5000, "1e400", ".nan", "-.inf", "1_0", "010", "12:30", "2026-13-01"),
    *("!!bool x", "!!int x", "!!float x", "!!timestamp x", "!!binary x", "!!null x", "!!omap [a]"),
    *("!!set {a}", "!!python/name:os.system", "!x 1", "&a [*a]", "*a", "[" * 100, "[" * 100_000),
    *(
        "{a: {b: c}}",
        "{[1]: 2}",
        "? [a]",
        "a: b: c",
        "@",
        "`",
        "%",
        "\t",
        "\0",
        "\x1b[2J",
        "\u2028",
    ),
    *(
        "'",
        '"\\ud800"',
        "- a\n- b",
        "a" * 100_000,
        ",".join("a" * 10_000),
        "\ufeff",
        "~x/y",
        "s3://",
    ),
]
"""Text of YAML in place of values."""

HOSTILE_TEMPLATES = [
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{% if a %}" * 2000 + "{% endif %}" * 2000,
    "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "{% for i in range(1000000000) %}{{ i }}{% endfor %}",
    "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
    "{{ " + "not " * 20_000 + "1 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/hostname' %}",
]
"""Chat templates that are too deep, or try to leave their sandbox."""

PATTERNS = ["(a+)+$", "(a|aa)+$", "(.*)*x", "((((", "[", "\\p{Xx}", "(?=a)*", ""]


def mutate_bytes(rng: random.Random, content: bytes, tokens: list[bytes]) -> bytes:
    """Changes bytes: flips, removes, repeats or inserts some of them, once to four times."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(content) + 1)
        stop = min(start + rng.choice([1, 1, 3, 20, 10**6]), len(content))
        middle = content[start:stop]
        change = rng.choice(["flip", "remove", "repeat", "insert"])
        if change == "flip":
            middle = bytes(byte ^ (1 << rng.randrange(8)) for byte in middle[:20]) + middle[20:]
        elif change == "remove":
            middle = b""
        elif change == "repeat":
            middle *= rng.choice([2, 50])
        else:
            middle = rng.choice(tokens) + middle
        content = content[:start] + middle + content[stop:]
    return content


def mutate_json(rng: random.Random, value: Any, odd_values: list[Any] = ODD_VALUES) -> Any:
    """Returns a copy in which one value, anywhere, is another one, removed or added."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        copied = value.copy()
        if rng.random() < 0.1:
            del copied[key]
        elif isinstance(value, dict) and rng.random() < 0.1:
            copied[rng.choice(["", "x", "\x1b[31m", "a.b", "auto_map"])] = rng.choice(odd_values)
        else:
            copied[key] = mutate_json(rng, value[key], odd_values)
        return copied
    if type(value) is int and rng.random() < 0.5:
        return rng.choice([value * 2, value // 2, value + 1, 1, 3, 64])
    return rng.choice(odd_values)
