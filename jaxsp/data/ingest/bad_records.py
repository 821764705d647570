"""Counts the records that cannot be used, and names the first of them."""

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from jaxsp.config.data_schema import DataConfig
from jaxsp.core.errors import UserError

if TYPE_CHECKING:
    import datasets

MAX_NAMED_RECORDS = 5
"""Maximum number of bad records that a message names."""


def find_bad_records(
    dataset: "datasets.Dataset", *, max_examples: int
) -> tuple[int, list[tuple[str, str]]]:
    """Returns the number of bad records, and place and problem of the first of them."""
    assert dataset._indices is None, "the table's order is not the dataset's"
    count = 0
    examples: list[tuple[str, str]] = []
    for batch in dataset.data.select(["place", "problem"]).to_batches():
        if batch.column(1).null_count < len(batch):
            bad = batch.filter(pc.is_valid(batch.column(1)))
            count += len(bad)
            rows = bad.slice(0, max_examples - len(examples)).to_pylist()
            examples += [(row["place"], row["problem"]) for row in rows]
    return count, examples


def check_bad_records(dataset: "datasets.Dataset", *, data: DataConfig, error_prefix: str) -> int:
    """Returns the number of bad records in a dataset, if data.on_bad_record allows them.

    Args:   error_prefix: the source's field and value.
    Raises: UserError naming the first bad records, their number, and what to change.
    """
    count, examples = find_bad_records(dataset, max_examples=MAX_NAMED_RECORDS)
    if not count or (data.on_bad_record == "skip" and count <= data.max_bad_records):
        return count
    summary = f"{count:,} of {len(dataset):,} records cannot be used"
    if count > MAX_NAMED_RECORDS:
        summary += f"; these are the first {MAX_NAMED_RECORDS}"
    if data.on_bad_record == "skip":
        summary += f". Correct them, or raise data.max_bad_records from {data.max_bad_records} to "
        summary += f"{count} or more."
    else:
        summary += ". Correct them, or leave them out: data.on_bad_record=skip"
        if count > data.max_bad_records:
            summary += f" data.max_bad_records={count}"
        summary += "."
    problems = [*list_examples(examples), summary]
    raise UserError(f"{error_prefix}: {problem}" for problem in problems)


def list_examples(examples: list[tuple[str, str]]) -> list[str]:
    """Returns a line for each bad record; a problem that repeats is `the same`."""
    lines = []
    last = None
    for place, problem in examples:
        lines.append(f"{place}: {'the same' if problem == last else problem}.")
        last = problem
    return lines
