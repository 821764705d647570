"""Reads Markdown files: headings, links, code blocks and shell commands."""

import pathlib
import re
from collections.abc import Iterator

REPO = pathlib.Path(__file__).parent.parent


def pages(repo: pathlib.Path = REPO) -> list[pathlib.Path]:
    """README.md at the top and in the folders directly below, and the pages of configs/."""
    return [repo / "README.md", *sorted(repo.glob("*/README.md")), *guides(repo)]


def guides(repo: pathlib.Path = REPO) -> list[pathlib.Path]:
    """Pages of configs/guide/ and configs/reference/."""
    return sorted(repo.glob("configs/*/*.md"))


def code_blocks(text: str, language: str = "") -> list[str]:
    """Contents of the fenced code blocks in a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in blocks if name == language]


def commands(text: str) -> list[str]:
    """Lines of the code blocks without a language, with continuation lines joined."""
    joined = [re.sub(r"\s*\\\n\s*", " ", block) for block in code_blocks(text)]
    return [line for block in joined for line in block.splitlines()]


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes of the headings."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(file: pathlib.Path) -> Iterator[str]:
    """Relative links of a file whose target, or its anchor, does not exist."""
    text = file.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = file.parent / path if path else file
        if not linked.exists():
            yield f"{file.name}: {target}: there is no {linked}"
        elif anchor and anchor not in anchors(linked.read_text(encoding="utf-8")):
            yield f"{file.name}: {target}: {linked} has no heading with the anchor {anchor}"


def missing_files(file: pathlib.Path, repo: pathlib.Path = REPO) -> Iterator[str]:
    """Source files in code spans that exist neither in the repository nor beside the README."""
    text = file.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+/[\w./]*\.(?:py|sh|yaml|md))`", text):
        if not (repo / name).exists() and not (file.parent / name).exists():
            yield f"{file.name}: there is no {name}"
