"""Rules for language and layout of the source and of its READMEs, configs and shell scripts.

`python -m tests.test_language PATH...` prints the violations in files and folders.
"""

import ast
import functools
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

import pytest

REPO = pathlib.Path(__file__).parent.parent

CHECKED = ("jaxsp", "scripts", "tests")
"""Folders that follow the rules."""

TEXT_FILES = (
    "README.md",
    "*/README.md",
    "configs/guide/*.md",
    "configs/*.yaml",
    "scripts/**/*.sh",
    "scripts/launch/*",
    ".ci/run",
)
"""Patterns of the files other than Python that follow the rules for words and line length."""

MAX_COLUMNS = 100

DOCSTRING_STARTS = "what where whether that of how which why and but as if who whose".split()
"""First words of a docstring that is not a verb or a noun phrase."""

BANNED = {
    r"so many": "name the number",
    r"in any case": "leave it out",
    r"without a word": "silently",
    r"by itself": "name who or when",
    r"of ours": "jaxsp's, or internal",
    r"(is|are|was) told": "receives, is given",
    r"that is no\b": "is not",
    r"behind": "after",
    r"alone": "only",
    r"nobody|whoever|somebody|anybody": "name who",
    r"ways? out": "suggestion",
    r"(says|said) (so|that|what|how|which)": "prints, records, requires",
    r"levers?": "memory option",
    r"pieces?": "segment",
    r"rectangles?": "off-diagonal block",
    r"no number": "NaN, or not a number",
    r"rows_at_once|max_documents_per_row|inner_degree|grace_s|on_nan|max_bad_steps": "renamed",
    r"bad_steps\.jsonl|best_by|padding_share|save_s|residual_and_attention": "renamed",
    r"attention\.kind|attention\.outer(?!_)|data\.workers|--show-example|jaxsp\.measure": "renamed",
}
"""Idioms and old names, with the replacement."""

ANY_BANNED = re.compile(rf"(?<![\w.`])(?:{'|'.join(BANNED)})(?!\w)", re.IGNORECASE)

LOOP_VARIABLES = ("one", "found", "made")
"""Names that say nothing about the thing."""


def python_files(paths: Iterator[pathlib.Path]) -> Iterator[pathlib.Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


parse = functools.lru_cache(maxsize=1)(ast.parse)


def bad_docstrings(text: str) -> Iterator[tuple[int, str]]:
    for line, docstring in docstrings(parse(text)):
        first = re.match(r"\W*([A-Za-z]+)", docstring)
        if first and first[1].lower() in DOCSTRING_STARTS:
            yield line, f"docstring begins with {first[1]}: begin with a verb or a noun phrase"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings of a Python file, with their lines."""
    lines = iter(text.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type in (tokenize.COMMENT, tokenize.STRING, FSTRING_MIDDLE):
            yield token.start[0], token.string


FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)
"""Python 3.12 splits f-strings into tokens."""


def banned_idioms(text: str) -> Iterator[tuple[int, str]]:
    if not ANY_BANNED.search(text):
        return
    for start, part in prose(text):
        for number, line in enumerate(part.splitlines(), start):
            for problem in idioms(line):
                yield number, problem


def idioms(line: str) -> Iterator[str]:
    if not ANY_BANNED.search(line):
        return
    for pattern, replacement in BANNED.items():
        if match := re.search(rf"(?<![\w.`])(?:{pattern})(?!\w)", line, re.IGNORECASE):
            yield f"{match[0]!r}: {replacement}"


def bad_text(text: str) -> Iterator[tuple[int, str]]:
    """Idioms and long lines of a file other than Python.

    Tables and links may be longer. Parts that a script writes are left out: their source is
    checked.
    """
    is_generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("<!-- "):
            is_generated = line.startswith("<!-- begin ")
        if is_generated:
            continue
        for problem in idioms(line):
            yield number, problem
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "https://" not in line:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"


def compressed_code(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.For | ast.comprehension):
            for target in ast.walk(node.target):
                if isinstance(target, ast.Name) and target.id in LOOP_VARIABLES:
                    yield target.lineno, f"loop variable {target.id}: name the thing"
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                if not is_exchange(target, node.value):
                    yield node.lineno, "several assignments in one statement: one per line"
        elif isinstance(node, ast.IfExp):
            if any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse)):
                yield node.lineno, "nested conditional expressions: use if"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if any(map(is_text_or_list, (node.left, node.right))):
                if any(map(is_condition, (node.left, node.right))):
                    yield node.lineno, "text or list times a condition: use if"


def is_exchange(target: ast.Tuple, value: ast.Tuple) -> bool:
    """True for `a, b = b, a + b`: values that use the names that are assigned."""
    names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return bool(names & used)


def is_text_or_list(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.ListComp)


def is_condition(node: ast.AST) -> bool:
    is_bool_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("bool", "isinstance")
    is_named = isinstance(node, ast.Name | ast.Attribute) and re.search(
        r"(^|\.|_)(is|has)_", ast.unparse(node)
    )
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    is_comparison = isinstance(node, ast.Compare | ast.BoolOp)
    return bool(is_bool_call or is_named or is_negation or is_comparison)


CHECKS = (bad_docstrings, banned_idioms, long_lines, compressed_code)


def violations(*paths: pathlib.Path) -> Iterator[str]:
    for file in python_files(iter(paths)):
        name = str(file.relative_to(REPO)) if file.is_relative_to(REPO) else str(file)
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".py":
            yield from (f"{name}:{line}: {problem}" for line, problem in bad_text(text))
            continue
        if file == pathlib.Path(__file__):
            continue
        for line, problem in sorted(problem for check in CHECKS for problem in check(text)):
            yield f"{name}:{line}: {problem}"


def test_source_follows_the_rules():
    assert list(violations(*(REPO / path for path in CHECKED))) == []


def test_readmes_configs_and_scripts_follow_the_rules():
    files = [file for pattern in TEXT_FILES for file in sorted(REPO.glob(pattern))]
    assert len(files) > len(TEXT_FILES)
    assert list(violations(*files)) == []


@pytest.mark.parametrize(
    ("check", "text", "line"),
    [
        (bad_docstrings, 'def f():\n    """What it does."""', 2),
        (bad_docstrings, 'class C:\n    a: int\n    """and of how much."""', 3),
        (banned_idioms, "x = 1\n# left in any case", 2),
        (banned_idioms, 'raise ValueError(f"{1}: there is no way out")', 1),
        (banned_idioms, '"""\n\nNobody reads it.\n"""', 3),
        (long_lines, "x = 1\n" + "#" * 101, 2),
        (compressed_code, "a, b = 1, 2", 1),
        (compressed_code, "[one for one in range(3)]", 1),
        (compressed_code, "for found in range(3):\n    pass", 1),
        (compressed_code, "a = 1 if b else 2 if c else 3", 1),
        (compressed_code, "a = 's' * (n > 1)", 1),
        (compressed_code, "a = [x] * is_first", 1),
        (bad_text, "# Title\n\nA run that somebody has to look at.", 3),
        (bad_text, "key: value  # " + "x" * 100, 1),
        (bad_text, "<!-- begin x -->\nalone\n<!-- end x -->\nalone", 4),
    ],
)
def test_each_rule_finds_a_violation(check, text, line):
    assert [number for number, _ in check(text)] == [line]


def test_plain_code_tables_and_links_have_no_violation():
    plain = ["a, b = b, a", "a, b = f()", "a = '-' * width", "a = 1 if b else 2"]
    text = "\n".join(['"""Documents of a row."""', *plain, "x = 'a standalone model'"])
    assert [problem for check in CHECKS for problem in check(text)] == []
    assert list(bad_text(f"| {'cell ' * 30}|\nSee [this](https://x.y/{'z' * 100}).")) == []


if __name__ == "__main__":
    lines = list(violations(*map(pathlib.Path.absolute, map(pathlib.Path, sys.argv[1:]))))
    print("\n".join([*lines, f"{len(lines)} violations"]))
