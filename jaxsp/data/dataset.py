"""A data set: documents, the stream of rows that they are packed into, and text about both."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import format_count
from jaxsp.data import store
from jaxsp.data.data_config import DataConfig
from jaxsp.data.documents import Documents, SourceCounts
from jaxsp.data.loader import BatchLoader, RowPlacement
from jaxsp.data.packing import PackedEpochs, RowSchedule, RowStream


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
        has_long_documents = any(source.num_long for source in self.documents.sources)
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
                for source, digest in zip(self.documents.sources, self.digests, strict=True)
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
    places = [f"{name}[{number}]" for number in range(len(documents))]
    columns = {"tokens": documents, "labels": labels, "place": places}
    with at(name):
        rows = Documents([store.from_columns(columns)], source_names=[name])
    assert len(rows.lengths) == len(documents), "a document has no label"
    assert rows.lengths.max() <= row_tokens, "a document is longer than a row"
    return pack_documents(
        name, rows, row_tokens=row_tokens, max_segments=max_segments, seed=seed, digests=[""]
    )


def describe_data(
    data: PackedDataset, config: DataConfig, schedule: RowSchedule
) -> list[tuple[str, str]]:
    """Returns lines of the banner about a data set, each with its label. Documents, segments,
    tokens and rows; exclusions; suggestions for packing; and the sources."""
    sources = data.documents.sources
    segments = data.documents.segments
    num_tokens = int(segments.length.sum())
    num_rows = sum(part.count_rows(1) for part in data.stream.parts)
    percent = 100 * num_tokens / (num_rows * data.stream.row_tokens)
    rows = (
        f"{format_count(len(data.documents.lengths), 'document')} in "
        f"{format_count(len(segments.length), 'segment')}, "
        f"{format_count(num_tokens, 'token')}, {data.documents.num_loss_tokens:,} with a loss; "
        f"packed into {format_count(num_rows, 'row')}, {percent:.2f} % full"
    )
    lines = [("data", rows)]
    if exclusions := describe_exclusions(data.documents):
        lines.append(("", exclusions))
    skipped = [source.first_skipped for source in sources if source.num_skipped]
    lines += [("skipped", example) for example in skipped]
    lines += [("note", note) for note in describe_bare_answers(sources, config)]
    limit = data.stream.max_segments
    if percent < 95 and len(segments.length) > 0.9 * limit * num_rows:
        limited = f"rows have at most {format_count(limit, 'segment')}"
        lines.append(("note", f"{limited}: a larger data.max_segments_per_row would fill them"))
    if len(sources) > 1:
        lines += [("source", text) for text in _describe_sources(data, schedule)]
    return lines


def describe_epochs(data: PackedDataset, schedule: RowSchedule, epochs: float | None) -> str:
    """Describes the number and the size of a run's epochs; empty if sources are mixed by weight.
    Args: epochs: run.epochs.
    Examples: `2 epochs of 5 steps`, `2 epochs of 12 rows (steps continue across epochs)`."""
    if data.source_weights is not None:
        return ""
    epoch = data.make_schedule(schedule.rows_per_step, epochs=1)
    num_epochs = schedule.rows_consumed(len(schedule)) / epoch.num_rows
    text = f"{num_epochs:.3g} epochs"
    if epochs is not None:
        text = format_count(epochs, "epoch")
    if num_epochs <= 1 or epoch.num_rows % epoch.rows_per_step == 0:
        return f"{text} of {format_count(len(epoch), 'step')}"
    return f"{text} of {format_count(epoch.num_rows, 'row')} (steps continue across epochs)"


def describe_exclusions(documents: Documents) -> str:
    """Lists what is held out, split, truncated or left out; empty if nothing is."""
    cut = {"truncate": "truncated", "drop": "dropped"}.get(documents.long_documents, "split")
    parts = []
    for field, noun, text in (
        ("num_held_out", "document", "held out for evaluation"),
        ("num_long", "document", f"longer than a row: {cut}"),
        ("num_tokens_cut", "token", f"of them {cut}"),
        ("num_without_loss", "document", "without a loss token left out"),
        ("num_tokens_without_loss", "token", "in documents and segments without a loss left out"),
        ("num_skipped", "bad record", "skipped"),
        ("num_empty", "empty document", "left out"),
    ):
        if total := sum(getattr(source, field) for source in documents.sources):
            parts.append(f"{format_count(total, noun)} {text}")
    return "; ".join(parts)


def describe_bare_answers(sources: Sequence[SourceCounts], data: DataConfig) -> list[str]:
    """Returns a line for each source with answers whose thinking the chat template dropped."""
    use = "the model learns to answer without thinking"
    if data.earlier_reasoning == "no_loss":
        use = "they have no loss"
    return [
        f"{source.name}: the chat template drops the thinking of "
        f"{format_count(source.num_bare_answers, 'earlier answer')}: {use} "
        f"(data.earlier_reasoning={data.earlier_reasoning})"
        for source in sources
        if source.num_bare_answers
    ]


def _describe_sources(data: PackedDataset, schedule: RowSchedule) -> Iterator[str]:
    """A line about each source; with its part of the run if sources are mixed by weight. That is an
    estimate: exact numbers need plans of all rows, a second per epoch for a million documents."""
    sources = data.documents.sources
    end = schedule.rows_consumed(len(schedule))
    tokens = [
        float(end * fraction * part.num_tokens / part.count_rows(1))
        for part, fraction in zip(data.stream.parts, data.stream.fractions, strict=True)
    ]
    for number, source in enumerate(sources):
        text = (
            f"{source.name}: {format_count(source.num_documents, 'document')}, "
            f"{format_count(source.num_tokens, 'token')}"
        )
        if data.source_weights is not None:
            epochs = tokens[number] / source.num_tokens
            use = f"{100 * epochs:.1f} % of it is used"
            if epochs > 1:
                use = f"repeated {epochs:.{2 if epochs < 2 else 1}f} times"
            text += (
                f"; weight {100 * data.source_weights[number]:.4g} %, about "
                f"{100 * tokens[number] / sum(tokens):.1f} % of this run, {use}"
            )
        yield text


def describe_documents(data: PackedDataset) -> str:
    """Describes the size of a data set, and what is left out of it."""
    num_tokens = format_count(int(data.documents.segments.length.sum()), "token")
    text = f"{format_count(len(data.documents.lengths), 'document')}, {num_tokens}"
    exclusions = describe_exclusions(data.documents)
    return f"{text}; {exclusions}" if exclusions else text
