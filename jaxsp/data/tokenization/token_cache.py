"""Cached tokens of a source: Arrow files, complete once their statistics are written."""

import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxsp.core import files
from jaxsp.data.ingest import record_cache, token_stats
from jaxsp.data.ingest.record_cache import DamagedCacheError
from jaxsp.data.ingest.token_stats import TokenStats

if TYPE_CHECKING:
    import datasets


def open_or_make(
    records: "datasets.Dataset",
    fingerprint: str,
    make: "Callable[[], datasets.Dataset] | None",
) -> "tuple[datasets.Dataset, TokenStats]":
    """Returns the tokens of records, and their statistics.

    Args:
        fingerprint: name of the tokens.
        make: tokenizes the records into the files `cache-FINGERPRINT*.arrow`; None: the records
            are tokens.
    Raises: DamagedCacheError if the cached records or tokens are damaged.
    """
    import datasets

    folder = _list_files(records)[0].parent
    stats_file = folder / f"counted-{fingerprint}.npz"
    with record_cache.build_once(stats_file):
        stats = token_stats.read(stats_file)
        if stats is not None:
            if make is None:
                tokenized = _rename_ids(records)
            else:
                tokenized = datasets.concatenate_datasets(
                    [
                        record_cache.open_file(path, stats_file=stats_file)
                        for path in stats.cached_files
                    ]
                )
            stats.check_lengths(tokenized)
            return tokenized, stats
        can_write = os.access(folder, os.W_OK)
        if can_write:
            for leftover in folder.glob(f"cache-{fingerprint}*.arrow"):
                leftover.unlink()
        _check_intact(records)
        tokenized = _rename_ids(records) if make is None else make()
        stats = token_stats.compute(tokenized)
        if can_write:
            stats = token_stats.write(stats, stats_file, _list_files(tokenized))
        return tokenized, stats


def _check_intact(records: "datasets.Dataset") -> None:
    """Compares the cached records with their checksums. Raises: DamagedCacheError."""
    for path in _list_files(records):
        if not files.is_intact(path):
            reason = "its contents have changed" if path.exists() else "it is missing"
            raise DamagedCacheError((path,), reason)


def _rename_ids(records: "datasets.Dataset") -> "datasets.Dataset":
    return records.rename_column("input_ids", "tokens")


def _list_files(dataset: "datasets.Dataset") -> list[pathlib.Path]:
    return [pathlib.Path(file["filename"]) for file in dataset.cache_files]
