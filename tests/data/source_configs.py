"""Sources of data for tests."""

from typing import Any

import datasets

from jaxsp.data import sources
from jaxsp.data.data_config import FORMAT, DataConfig
from jaxsp.data.source import Source


def make_source(*, format: str, **fields: Any) -> Source:
    return FORMAT.by_name()[format](**fields)


def read(source: Source, *, data: DataConfig) -> datasets.Dataset:
    """Returns the entries of a source as a table. Raises: UserError for bad
    records, unless they are skipped."""
    entries = []
    bad: list[str] = []
    for entry in sources.read(source, data=data).entries():
        entries.append(entry)
        if entry["problem"] is not None:
            bad.append(f"{entry['place']}: {entry['problem']}")
            sources.check_bad_records(bad, data=data)
    names = {x: "" if isinstance(entry[x], str) else None for entry in entries for x in entry}
    return datasets.Dataset.from_list([names | entry for entry in entries])
