"""Sources of data for tests."""

from typing import Any

from jaxsp.data.formats.registry import FORMAT
from jaxsp.data.formats.source import Source


def make_source(*, format: str, **fields: Any) -> Source:
    return FORMAT.by_name()[format](**fields)
