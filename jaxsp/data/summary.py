"""Text about the data before step 0: counts of documents and rows, and suggestions."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxsp.core.units import format_count
from jaxsp.data.data_config import DataConfig
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.mixing import RowSchedule
from jaxsp.data.packing import PackedEpochs
from jaxsp.data.row_reader import SourceCounts


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
    if exclusions := describe_exclusions(sources):
        lines.append(("", exclusions))
    for source in sources:
        lines += [("skipped", example) for example in source.skipped_examples]
    lines += [("note", note) for note in describe_bare_answers(sources, config)]
    for part in data.stream.parts:
        if suggestion := _suggest_packing(part):
            lines.append(("note", suggestion))
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


def describe_exclusions(sources: Sequence[SourceCounts]) -> str:
    """Lists what is held out, split, truncated or left out; empty if nothing is."""

    def count(field: str, noun: str) -> str:
        total = sum(getattr(source, field) for source in sources)
        return format_count(total, noun) if total else ""

    parts = []
    for field, text, tokens_field in (
        ("num_held_out", " held out for evaluation, with ", "num_tokens_held_out"),
        ("num_split", " longer than a row: split", None),
        ("num_truncated", " longer than a row: truncated by ", "num_tokens_truncated"),
        ("num_dropped", " longer than a row: dropped, with ", "num_tokens_dropped"),
    ):
        if documents := count(field, "document"):
            parts.append(documents + text + (count(tokens_field, "token") if tokens_field else ""))
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


def _suggest_packing(part: PackedEpochs) -> str | None:
    """Suggests a limit on segments that would about fill the rows; a multiple of 16. None if the
    rows are full, or if most of the empty space is in rows that have fewer segments than the limit,
    or no space for another one."""
    plan = part.plan_epoch(0)
    row_tokens = part.row_tokens
    if len(plan) < 2:
        return None
    filled = np.bincount(plan.row_of_segment, plan.length, minlength=len(plan))
    is_limited = np.diff(plan.row_starts) >= part.max_segments
    is_limited &= row_tokens - filled >= plan.length.min()
    num_empty = row_tokens * len(plan) - filled.sum()
    num_limited = np.sum(row_tokens - filled[is_limited])
    is_full = filled.mean() >= 0.99 * row_tokens
    if is_full or num_limited <= num_empty / 2:
        return None
    # some rows need more than the mean: lengths differ, and each epoch has another plan
    needed = 1.25 * part.max_segments * row_tokens / filled[is_limited].mean()
    suggested = math.ceil(min(needed, len(plan.length)) / 16) * 16
    return (
        f"rows of {row_tokens:,} tokens are {100 * filled.mean() / row_tokens:.0f} % full, because "
        f"they have at most {format_count(part.max_segments, 'segment')}: "
        f"data.max_segments_per_row={suggested} would fill them"
    )


def describe_documents(data: PackedDataset) -> str:
    """Describes the size of a data set, and what is left out of it."""
    num_tokens = format_count(int(data.documents.segments.length.sum()), "token")
    text = f"{format_count(len(data.documents.lengths), 'document')}, {num_tokens}"
    exclusions = describe_exclusions(data.documents.sources)
    return f"{text}; {exclusions}" if exclusions else text
