"""What becomes of the documents, in words: all counts before the first step, and who is dealt which rows."""

from collections.abc import Sequence

import numpy as np

from jaxsp.config.schema import Config
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule, RowStream
from jaxsp.data.packing.packing import PackedEpochs
from jaxsp.data.packing.pipeline import Assignment
from jaxsp.data.packing.row_reader import SourceCounts


def describe_data(
    data: PackedDataset, config: Config, schedule: RowSchedule
) -> list[tuple[str, str]]:
    """Pairs of a word and what is to be known: documents, pieces, tokens, rows; what is left out; each source's share."""
    sources, lengths = data.documents.sources, data.documents.lengths
    tokens, pieces = int(lengths.sum()), int(np.sum(-(-lengths // config.data.max_row_tokens)))
    num_rows = {
        stream.row_tokens: sum(part.count_rows(1) for part in stream.parts)
        for stream in data.streams
    }
    space = sum(row_tokens * count for row_tokens, count in num_rows.items())
    several = len(config.data.row_lengths) > 1
    packed = " and ".join(
        f"{format_count(number, 'row')}{f' of {row_tokens:,} tokens' if several else ''}"
        for row_tokens, number in num_rows.items()
    )
    said = [
        (
            "data",
            f"{format_count(len(lengths), 'document')} in {format_count(pieces, 'piece')}, {format_count(tokens, 'token')}, "
            f"{data.documents.num_loss_tokens:,} with a loss; packed into {packed}, {100 * tokens / space:.2f} % full",
        )
    ]
    if others := describe_exclusions(sources):
        said.append(("", others))
    said += [("skipped", words) for source in sources for words in source.skipped_examples]
    said += [
        ("note", words)
        for stream in data.streams
        for part in stream.parts
        if (words := _suggest_packing(part, config, stream))
    ]
    if len(sources) > 1:
        passes = None if data.source_weights is None else _estimate_epochs(data, schedule)
        said += [
            ("source", _describe_source(data, number, passes)) for number in range(len(sources))
        ]
    return said


def num_steps_per_epoch(data: PackedDataset, config: Config) -> int | None:
    """Steps of one pass over the data; None where sources are mixed by weight."""
    return None if data.source_weights is not None else len(data.make_schedule(config, epochs=1))


def describe_exclusions(sources: Sequence[SourceCounts]) -> str:
    """What is left out, cut or split; nothing where all documents are as they were."""
    total = {
        name: sum(getattr(source, name) for source in sources)
        for name in vars(sources[0])
        if name.startswith("num_")
    }
    longer = "longer than a row:"
    cut, dropped = (
        format_count(total["num_tokens_truncated"], "token"),
        format_count(total["num_tokens_dropped"], "token"),
    )
    held_out = format_count(total["num_tokens_held_out"], "token")
    said = {
        "num_held_out": f"{format_count(total['num_held_out'], 'document')} held out for evaluation, with {held_out}",
        "num_split": f"{format_count(total['num_split'], 'document')} {longer} split",
        "num_truncated": f"{format_count(total['num_truncated'], 'document')} {longer} truncated by {cut}",
        "num_dropped": f"{format_count(total['num_dropped'], 'document')} {longer} dropped, with {dropped}",
        "num_skipped": f"{format_count(total['num_skipped'], 'bad record')} skipped",
        "num_empty": f"{format_count(total['num_empty'], 'empty document')} left out",
    }
    return "; ".join(words for name, words in said.items() if total[name])


def _suggest_packing(part: PackedEpochs, config: Config, stream: RowStream) -> str | None:
    """What would fill rows that the cap on pieces leaves empty."""
    advice = part.suggest_limits()
    if advice is None:
        return None
    most = format_count(config.data.max_segments_per_row, "document")
    said = (
        f"rows of {stream.row_tokens:,} tokens are {100 * advice.filled_fraction:.0f} % full, because they hold at most {most}: "
        f"data.max_segments_per_row={advice.max_segments} would fill them"
    )
    if advice.row_tokens is None or advice.num_cut or len(config.data.row_lengths) > 1:
        return said
    return f"{said}, or data.row_tokens={advice.row_tokens}"


def _describe_source(data: PackedDataset, number: int, passes: Sequence[float] | None) -> str:
    source = data.documents.sources[number]
    said = f"{source.name}: {format_count(source.num_documents, 'document')}, {format_count(source.num_tokens, 'token')}"
    if passes is None or data.source_weights is None:
        return said
    learned = [
        times * one.num_tokens for times, one in zip(passes, data.documents.sources, strict=True)
    ]
    times, share = passes[number], 100 * learned[number] / sum(learned)
    often = (
        f"repeated {times:.{1 + (times < 2)}f} times"
        if times > 1
        else f"{100 * times:.1f} % of it is used"
    )
    return f"{said}; weight {100 * data.source_weights[number]:.4g} %, about {share:.1f} % of this run, {often}"


def _estimate_epochs(data: PackedDataset, schedule: RowSchedule) -> list[float]:
    """About how often each source is gone through by the end of a run, passes before a resume counted.

    Exactly it is known when all those rows are planned, which takes a second for a million documents, each time.
    """
    tokens = np.zeros(len(data.documents.sources))
    for stream, end in zip(data.streams, schedule.rows_consumed(len(schedule)), strict=True):
        for part, source, number in zip(
            stream.parts, stream.sources, stream.count_rows_by_part(end), strict=True
        ):
            tokens[source] += number * part.num_tokens / part.count_rows(1)
    return [
        float(sum_) / one.num_tokens
        for sum_, one in zip(tokens, data.documents.sources, strict=True)
    ]


def describe_assignments(assignments: Sequence[Assignment]) -> list[str]:
    """Who gets which rows of a step, a line for each turn of a group."""
    return [
        f"turn {hand.microbatch + 1}  group {hand.group}  {_describe_devices(hand)}  "
        f"{'rows' if len(hand.rows) > 1 else 'row'} {' '.join('-' if row is None else str(row) for row in hand.rows)}  "
        f"{format_count(hand.num_segments, 'piece')}, {format_count(hand.num_tokens, 'token')}"
        for hand in assignments
    ]


def _describe_devices(hand: Assignment) -> str:
    devices = "device" if len(hand.devices) == 1 else "devices"
    processes = f" of {'processes' if len(hand.processes) > 1 else 'process'} {' '.join(map(str, hand.processes))}"
    return f"{devices} {' '.join(map(str, hand.devices))}{processes}"


def format_count(number: int, thing: str) -> str:
    """A number of things: `1 row`, `2,000 rows`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
