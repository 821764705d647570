"""Sources of data for tests."""

from typing import Any

from jaxsp.data.data_config import FORMAT
from jaxsp.data.formats.source import Source


def make_source(*, format: str, **fields: Any) -> Source:
    return FORMAT.by_name()[format](**fields)
