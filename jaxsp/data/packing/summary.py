"""Text about the data before step 0: counts of documents and rows, and suggestions."""

import math
from collections.abc import Sequence

import numpy as np

from jaxsp.core.units import format_count
from jaxsp.data.data_config import DataConfig
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.document_selection import SourceCounts
from jaxsp.data.packing.mixing import RowSchedule
from jaxsp.data.packing.packing import PackedEpochs, PackedRows


def describe_data(
    data: PackedDataset, config: DataConfig, schedule: RowSchedule
) -> list[tuple[str, str]]:
    """Returns lines of the banner about a data set, each with its label.

    Documents, segments, tokens and rows; exclusions; suggestions for packing; and the sources, with
    the fraction of the run that each has.
    """
    sources = data.documents.sources
    lines = [("data", _describe_rows(data))]
    exclusions = describe_exclusions(sources)
    if exclusions:
        lines.append(("", exclusions))
    for source in sources:
        lines += [("skipped", example) for example in source.skipped_examples]
    lines += [("note", note) for note in describe_bare_answers(sources, config)]
    for part in data.stream.parts:
        if suggestion := _suggest_packing(part, config):
            lines.append(("note", suggestion))
    if len(sources) > 1:
        epochs = None if data.source_weights is None else _estimate_epochs(data, schedule)
        for number in range(len(sources)):
            lines.append(("source", _describe_source(data, number, epochs)))
    return lines


def _describe_rows(data: PackedDataset) -> str:
    segments = data.documents.segments
    num_tokens = int(segments.length.sum())
    num_rows = sum(part.count_rows(1) for part in data.stream.parts)
    percent = 100 * num_tokens / (num_rows * data.stream.row_tokens)
    return (
        f"{format_count(len(data.documents.lengths), 'document')} in "
        f"{format_count(len(segments.length), 'segment')}, "
        f"{format_count(num_tokens, 'token')}, {data.documents.num_loss_tokens:,} with a loss; "
        f"packed into {format_count(num_rows, 'row')}, {percent:.2f} % full"
    )


def describe_epochs(data: PackedDataset, schedule: RowSchedule, epochs: int | None) -> str:
    """Describes the number and the size of a run's epochs; empty if sources are mixed by weight.

    Args: epochs: run.epochs.
    Examples: `2 epochs of 5 steps`, `2 epochs of 12 rows (steps continue across epochs)`.
    """
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


def describe_exclusions(sources: Sequence[SourceCounts]) -> str:
    """Lists what is held out, split, truncated or left out; empty if nothing is."""

    def count(field: str, noun: str) -> str:
        """Returns the total of a field, with its noun; empty if it is 0."""
        total = sum(getattr(source, field) for source in sources)
        return format_count(total, noun) if total else ""

    parts = []
    if documents := count("num_held_out", "document"):
        tokens = count("num_tokens_held_out", "token")
        parts.append(f"{documents} held out for evaluation, with {tokens}")
    if documents := count("num_split", "document"):
        parts.append(f"{documents} longer than a row: split")
    if documents := count("num_truncated", "document"):
        tokens = count("num_tokens_truncated", "token")
        parts.append(f"{documents} longer than a row: truncated by {tokens}")
    if documents := count("num_dropped", "document"):
        tokens = count("num_tokens_dropped", "token")
        parts.append(f"{documents} longer than a row: dropped, with {tokens}")
    if tokens := count("num_tokens_without_loss", "token"):
        nouns = {"num_without_loss": "document", "num_segments_without_loss": "segment"}
        without_loss = " and ".join(filter(None, map(count, nouns, nouns.values())))
        parts.append(f"{without_loss} without a loss token: left out, with {tokens}")
    if records := count("num_skipped", "bad record"):
        parts.append(f"{records} skipped")
    if documents := count("num_empty", "empty document"):
        parts.append(f"{documents} left out")
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


def _suggest_packing(part: PackedEpochs, data: DataConfig) -> str | None:
    plan = part.plan_epoch(0)
    max_segments = data.max_segments_per_row
    suggested = suggest_max_segments(plan, row_tokens=data.row_tokens, max_segments=max_segments)
    if suggested is None:
        return None
    percent = 100 * plan.length.sum() / (len(plan) * data.row_tokens)
    return (
        f"rows of {data.row_tokens:,} tokens are {percent:.0f} % full, because they have at most "
        f"{format_count(max_segments, 'segment')}: data.max_segments_per_row={suggested} would "
        "fill them"
    )


def _describe_source(data: PackedDataset, number: int, epochs: Sequence[float] | None) -> str:
    """A line about a source; with its part of the run if sources are mixed by weight.

    Args:
        epochs: estimated number of epochs of each source.
    """
    sources = data.documents.sources
    source = sources[number]
    text = (
        f"{source.name}: {format_count(source.num_documents, 'document')}, "
        f"{format_count(source.num_tokens, 'token')}"
    )
    if epochs is None or data.source_weights is None:
        return text
    tokens = [
        source_epochs * counts.num_tokens
        for source_epochs, counts in zip(epochs, sources, strict=True)
    ]
    percent = 100 * tokens[number] / sum(tokens)
    if epochs[number] > 1:
        num_digits = 2 if epochs[number] < 2 else 1
        use = f"repeated {epochs[number]:.{num_digits}f} times"
    else:
        use = f"{100 * epochs[number]:.1f} % of it is used"
    weight = 100 * data.source_weights[number]
    return f"{text}; weight {weight:.4g} %, about {percent:.1f} % of this run, {use}"


def _estimate_epochs(data: PackedDataset, schedule: RowSchedule) -> list[float]:
    """Estimates the number of epochs of each source by the end of a run, from step 0.

    Exact numbers need plans of all those rows, which take a second per epoch for a million
    documents.
    """
    end = schedule.rows_consumed(len(schedule))
    parts = zip(data.stream.parts, data.stream.fractions, data.documents.sources, strict=True)
    return [
        float(end * fraction * part.num_tokens / part.count_rows(1)) / source.num_tokens
        for part, fraction, source in parts
    ]


FULL_FRACTION = 0.99
"""Fraction of the tokens of a row from which on rows count as full."""

_SPREAD = 1.25
"""Segments that some rows need, over the mean: lengths differ, and each epoch has another plan."""


def suggest_max_segments(plan: PackedRows, *, row_tokens: int, max_segments: int) -> int | None:
    """Returns a limit on segments that would about fill the rows of a plan; a multiple of 16.

    None if the rows are full, or if most of the empty space is in rows that have fewer segments
    than the limit, or no space for another one.
    """
    if len(plan) < 2:
        return None
    filled = np.bincount(plan.row_of_segment, plan.length, minlength=len(plan))
    is_limited = np.diff(plan.row_starts) >= max_segments
    is_limited &= row_tokens - filled >= plan.length.min()
    num_empty = row_tokens * len(plan) - filled.sum()
    num_limited = np.sum(row_tokens - filled[is_limited])
    is_full = filled.mean() >= FULL_FRACTION * row_tokens
    if is_full or num_limited <= num_empty / 2:
        return None
    needed = _SPREAD * max_segments * row_tokens / filled[is_limited].mean()
    return math.ceil(min(needed, len(plan.length)) / 16) * 16


def describe_documents(data: PackedDataset) -> str:
    """Describes the size of a data set, and what is left out of it."""
    num_tokens = format_count(int(data.documents.segments.length.sum()), "token")
    text = f"{format_count(len(data.documents.lengths), 'document')}, {num_tokens}"
    exclusions = describe_exclusions(data.documents.sources)
    return f"{text}; {exclusions}" if exclusions else text
