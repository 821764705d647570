"""Atomic writes of small files."""

import json
import pathlib
from typing import Any

PARTIAL_SUFFIX = ".partial"


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that readers see either the old text or the new one, as a whole."""
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes numbers as JSON. Raises: ValueError for those that are not finite."""
    write_atomic(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
