"""A data set: documents, and the stream of rows that they are packed into."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError, at
from jaxsp.data import cache
from jaxsp.data.data_config import DataConfig
from jaxsp.data.loader import BatchLoader, RowPlacement
from jaxsp.data.mixing import RowSchedule, RowStream
from jaxsp.data.packing import PackedEpochs
from jaxsp.data.row_reader import Documents, SourceCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedDataset:
    """Documents, and the stream of rows that they are packed into."""

    name: str
    documents: Documents
    stream: RowStream
    digests: tuple[str, ...]
    source_weights: tuple[float, ...] | None
    """Weight of each source; they add up to 1. None if all documents are packed together."""

    @property
    def num_split_pairs(self) -> int:
        """Number of pairs that do not fit into one row."""
        return sum(part.num_split_pairs for part in self.stream.parts)

    @property
    def digested_sources(self) -> list[tuple[SourceCounts, str]]:
        return list(zip(self.documents.sources, self.digests, strict=True))

    def make_schedule(
        self,
        rows_per_step: int,
        *,
        consumed: int = 0,
        num_steps: int | None = None,
        epochs: float | None = None,
    ) -> RowSchedule:
        """Schedules `num_steps` more steps, or the steps to the end of `epochs` epochs.
        Args: consumed: number of rows consumed before; epochs: a fraction ends with a whole step,
            at the latest with its epoch."""
        # after a change of the data: the rows of a pair stay together
        begin_row = -(-consumed // self.stream.block_rows) * self.stream.block_rows
        end_row = None
        if epochs is not None:
            before, end_row = map(self.stream.count_rows, (math.floor(epochs), math.ceil(epochs)))
            # 1.1 is 11/10: the nearest float is larger, and might need one more step
            rows = before + Fraction(str(epochs)) % 1 * (end_row - before) - begin_row
            if before < end_row:
                end_row = min(end_row, begin_row + math.ceil(rows / rows_per_step) * rows_per_step)
            end_row = max(end_row, begin_row)
        return RowSchedule(
            begin_row=begin_row, rows_per_step=rows_per_step, num_steps=num_steps, end_row=end_row
        )

    def is_epoch_end(self, schedule: RowSchedule, num_steps: int) -> bool:
        """True if an epoch ends with step `num_steps` of a schedule."""

        def count_epochs(num_rows: int) -> int:
            # plans no epoch that the rows do not reach
            epoch = self.stream.find_epoch(num_rows - 1) if num_rows else 0
            assert epoch is not None, "sources mixed by weight have no epochs"
            return epoch + (num_rows == self.stream.count_rows(epoch + 1))

        before, after = map(schedule.rows_consumed, (num_steps - 1, num_steps))
        return count_epochs(after) > count_epochs(before)

    def make_loader(self, schedule: RowSchedule, placement: RowPlacement) -> BatchLoader:
        """Returns the loader of a schedule's steps."""
        return BatchLoader(self.documents, self.stream, schedule, placement)

    def fingerprint(self, config: DataConfig, *, seed: int) -> dict[str, Any]:
        """Everything that decides the content and the order of the rows, as JSON values."""
        # without long documents the rows are the same for every value
        has_long_documents = any(map(SourceCounts.has_long_documents, self.documents.sources))
        return {
            "run.seed": seed,
            "data.eval_fraction": config.eval_fraction,
            "data.row_tokens": config.row_tokens,
            "data.max_segments_per_row": config.max_segments_per_row,
            "data.long_documents": config.long_documents if has_long_documents else None,
            "weights": None if self.source_weights is None else list(self.source_weights),
            "sources": [
                {
                    "name": source.name,
                    "documents": source.num_documents,
                    "tokens": source.num_tokens,
                    "digest": digest,
                }
                for source, digest in self.digested_sources
            ],
        }


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describes the differences of two fingerprints; empty if the rows are the same."""
    changes = []
    for name in (name for name in now if "." in name):
        # null: no document was too long, so the field has no effect
        is_idle = name == "data.long_documents" and None in (before[name], now[name])
        if now[name] != before[name] and not is_idle:
            new, old = map(yaml_io.format_value, (now[name], before[name]))
            changes.append(f"{name} = {new}, was {old}")
    if before["weights"] != now["weights"]:
        changes.append(f"weights of data.train = {now['weights']}, were {before['weights']}")
    if len(before["sources"]) != len(now["sources"]):
        changes.append(
            f"data.train has {len(now['sources'])} sources, had {len(before['sources'])}"
        )
        return changes
    for number, (old, new) in enumerate(zip(before["sources"], now["sources"], strict=True)):
        if old["digest"] == new["digest"] and old["tokens"] == new["tokens"]:
            continue  # under another name they are the same documents
        counts = "; ".join(
            f"{new[unit]:,} {unit}, had {old[unit]:,}" for unit in ("documents", "tokens")
        )
        changes.append(f"data.train.{number} ({new['name']}) has other tokens: {counts}")
    return changes


def pack_documents(
    name: str,
    documents: Documents,
    *,
    row_tokens: int,
    max_segments: int,
    seed: int,
    digests: Sequence[str],
    source_weights: Sequence[float] | None = None,
) -> PackedDataset:
    """Packs documents into rows. The documents of a pair are in one row, or in two if none holds
    both. Without weights all documents are packed together. With weights each source is packed
    separately, and the sources' rows are mixed."""
    segments = documents.segments
    part_of_segment = np.zeros(len(segments.length), np.int64)
    weights: tuple[float, ...] = (1.0,)
    if source_weights is not None:
        part_of_segment = documents.find_sources(segments.document)
        scaled = np.divide(source_weights, max(source_weights))  # their sum could be infinite
        weights = tuple((scaled / scaled.sum()).tolist())
    tokens = np.bincount(part_of_segment, segments.length, minlength=len(weights))
    if not tokens.all():
        number = int(np.argmin(tokens))
        source = documents.sources[number]
        suggestion = "see data.row_tokens, data.long_documents and data.on_bad_record"
        if source.num_held_out:
            suggestion = (
                f"hold out fewer documents (data.eval_fraction "
                f"holds out {source.num_held_out:,} of this source)"
            )
        raise UserError(
            f"data.train.{number} ({source.name}): a source with a weight must have at least one "
            f"document that is used. Leave the source out, or {suggestion}."
        )
    parts = [
        PackedEpochs(
            segments.select(part_of_segment == part),
            row_tokens=row_tokens,
            max_segments=max_segments,
            seed=seed,
            per_record=documents.per_record,
        )
        for part in range(len(weights))
    ]
    # number of rows for each token of the whole mixture
    rows_per_token = [
        weight * part.count_rows(1) / num_tokens
        for weight, part, num_tokens in zip(weights, parts, tokens, strict=True)
    ]
    return PackedDataset(
        name=name,
        documents=documents,
        stream=RowStream(parts, (np.array(rows_per_token) / sum(rows_per_token)).tolist()),
        digests=tuple(digests),
        source_weights=None if source_weights is None else weights,
    )


def pack_arrays(
    name: str,
    documents: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    *,
    row_tokens: int,
    max_segments: int,
    seed: int,
) -> PackedDataset:
    """Packs token ids, such as the prompts of an evaluation, into rows, which must hold each.

    Args:
        documents: token ids, int32 [T].
        labels: label of each token, not shifted: a token without a loss has -100. Every document
            must have a label after its first token.
    """
    import datasets

    table = pa.table(
        {
            "tokens": cache.make_lists([array.astype(np.int32) for array in documents]),
            "labels": cache.make_lists([array.astype(np.int32) for array in labels]),
            "place": pa.array([f"{name}[{number}]" for number in range(len(documents))]),
        }
    )
    with at(name):
        rows = Documents([datasets.Dataset(table)], source_names=[name])
    assert len(rows.lengths) == len(documents), "a document has no label"
    assert rows.lengths.max() <= row_tokens, "a document is longer than a row"
    return pack_documents(
        name, rows, row_tokens=row_tokens, max_segments=max_segments, seed=seed, digests=[""]
    )
