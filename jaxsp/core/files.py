"""Atomic writes of small files."""

import pathlib

PARTIAL_SUFFIX = ".partial"


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that readers see either the old text or the new one, as a whole."""
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
