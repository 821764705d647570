"""Sources of data for tests."""

from typing import Any

import datasets
import numpy as np

from jaxsp.data import sources
from jaxsp.data.data_config import FORMAT, DataConfig
from jaxsp.data.source import Source
from jaxsp.data.store import TokenizedSource


def make_source(*, format: str, **fields: Any) -> Source:
    return FORMAT.by_name()[format](**fields)


def to_columns(tokenized: TokenizedSource) -> dict[str, list[Any]]:
    """Columns of records, with the lists of numbers of each by the names of the arrays."""
    columns = tokenized.records.to_pydict()
    ends = np.cumsum(tokenized.num_tokens)
    for name, ids in tokenized.arrays.items():
        columns[name] = [part.tolist() for part in np.split(ids.ids, ends[:-1])]
    return columns


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
