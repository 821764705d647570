"""Digest and extreme ids of tokenized documents, computed once and cached in a file."""

import hashlib
import json
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.data.ingest import record_cache

if TYPE_CHECKING:
    import datasets


def cached_token_stats(dataset: "datasets.Dataset", cached: pathlib.Path) -> dict[str, Any]:
    """Returns the statistics of `compute_token_stats`, from the file if it exists.

    Computing them reads all tokens, about 1 GB per second.
    """
    with record_cache.build_once(cached):
        if not cached.exists():
            stats = compute_token_stats(dataset)
            if not os.access(cached.parent, os.W_OK):
                return stats
            # not NamedTemporaryFile, whose files have mode 0600: other users may share the cache
            with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
                partial = pathlib.Path(folder) / cached.name
                partial.write_text(json.dumps(stats), encoding="utf-8")
                partial.replace(cached)
        return json.loads(cached.read_text(encoding="utf-8"))


def compute_token_stats(dataset: "datasets.Dataset") -> dict[str, Any]:
    """Returns a digest of all tokens and labels, and the extreme ids of each column.

    `ids` maps a column to its lowest and its highest id, each with the first document that has it.
    """
    digests = []
    extremes = {}
    for column in ("tokens", "labels"):
        if column not in dataset.column_names:
            continue
        # lengths and values are hashed as two streams, so that chunk borders change nothing
        lengths = hashlib.sha256()
        values = hashlib.sha256()
        ends: list[tuple[int, int]] = []
        num_documents = 0
        for offsets, ids in record_cache.read_lists(dataset, column):
            lengths.update(np.diff(offsets).astype("<i8").data)
            values.update(np.ascontiguousarray(ids, "<i4").data)
            has_loss = np.flatnonzero(ids != NO_LABEL) if column == "labels" else None
            known = ids if has_loss is None else ids[has_loss]
            for index in (known.argmin(), known.argmax()) if len(known) else ():
                place = index if has_loss is None else has_loss[index]
                document = int(np.searchsorted(offsets, place, side="right")) - 1
                ends.append((int(known[index]), num_documents + document))
            num_documents += len(offsets) - 1
        digests += [column, lengths.hexdigest(), values.hexdigest()]
        if ends:
            extremes[column] = [min(ends), max(ends, key=lambda end: (end[0], -end[1]))]
    return {"digest": hashlib.sha256(" ".join(digests).encode()).hexdigest(), "ids": extremes}
