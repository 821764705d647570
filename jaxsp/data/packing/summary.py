"""What becomes of the documents, in words: all counts before the first step, and who is dealt which rows."""

from collections.abc import Sequence

import numpy as np

from jaxsp.config import schema
from jaxsp.data.packing import dataset, mixing, packing, pipeline, row_reader


def account(data: dataset.DataSet, settings: schema.Config, schedule: mixing.Schedule) -> list[tuple[str, str]]:
    """Pairs of a word and what is to be known: documents, pieces, tokens, rows; what is left out; each source's share."""
    sources, lengths = data.documents.sources, data.documents.lengths
    tokens, pieces = int(lengths.sum()), int(np.sum(-(-lengths // settings.data.longest_row)))
    num_rows = {stream.row_tokens: sum(part.rows_in(1) for part in stream.parts) for stream in data.streams}
    space = sum(row_tokens * count for row_tokens, count in num_rows.items())
    several = len(settings.data.row_lengths) > 1
    packed = " and ".join(
        f"{count(number, 'row')}{f' of {row_tokens:,} tokens' if several else ''}" for row_tokens, number in num_rows.items()
    )
    said = [
        (
            "data",
            f"{count(len(lengths), 'document')} in {count(pieces, 'piece')}, {count(tokens, 'token')}, "
            f"{data.documents.num_loss_tokens:,} with a loss; packed into {packed}, {100 * tokens / space:.2f} % full",
        )
    ]
    if others := not_as_they_are(sources):
        said.append(("", others))
    said += [("skipped", words) for source in sources for words in source.skipped]
    said += [("note", words) for stream in data.streams for part in stream.parts if (words := _advice(part, settings, stream))]
    if len(sources) > 1:
        passes = None if data.weights is None else _passes(data, schedule)
        said += [("source", _source(data, number, passes)) for number in range(len(sources))]
    return said


def num_steps_per_epoch(data: dataset.DataSet, settings: schema.Config) -> int | None:
    """Steps of one pass over the data; None where sources are mixed by weight."""
    return None if data.weights is not None else len(data.schedule(settings, epochs=1))


def not_as_they_are(sources: Sequence[row_reader.Source]) -> str:
    """What is left out, cut or split; nothing where all documents are as they were."""
    total = {name: sum(getattr(source, name) for source in sources) for name in vars(sources[0]) if name.startswith("num_")}
    longer = "longer than a row:"
    cut, dropped = count(total["num_tokens_truncated"], "token"), count(total["num_tokens_dropped"], "token")
    held_out = count(total["num_tokens_held_out"], "token")
    said = {
        "num_held_out": f"{count(total['num_held_out'], 'document')} held out for evaluation, with {held_out}",
        "num_split": f"{count(total['num_split'], 'document')} {longer} split",
        "num_truncated": f"{count(total['num_truncated'], 'document')} {longer} truncated by {cut}",
        "num_dropped": f"{count(total['num_dropped'], 'document')} {longer} dropped, with {dropped}",
        "num_skipped": f"{count(total['num_skipped'], 'bad record')} skipped",
        "num_empty": f"{count(total['num_empty'], 'empty document')} left out",
    }
    return "; ".join(words for name, words in said.items() if total[name])


def _advice(part: packing.Epochs, settings: schema.Config, stream: mixing.Stream) -> str | None:
    """What would fill rows that the cap on pieces leaves empty."""
    advice = part.advice()
    if advice is None:
        return None
    most = count(settings.data.max_documents_per_row, "document")
    said = (
        f"rows of {stream.row_tokens:,} tokens are {100 * advice.fullness:.0f} % full, because they hold at most {most}: "
        f"data.max_documents_per_row={advice.max_pieces} would fill them"
    )
    if advice.row_tokens is None or advice.num_cut or len(settings.data.row_lengths) > 1:
        return said
    return f"{said}, or data.row_tokens={advice.row_tokens}"


def _source(data: dataset.DataSet, number: int, passes: Sequence[float] | None) -> str:
    source = data.documents.sources[number]
    said = f"{source.name}: {count(source.num_documents, 'document')}, {count(source.num_tokens, 'token')}"
    if passes is None or data.weights is None:
        return said
    learned = [times * one.num_tokens for times, one in zip(passes, data.documents.sources, strict=True)]
    times, share = passes[number], 100 * learned[number] / sum(learned)
    often = f"repeated {times:.{1 + (times < 2)}f} times" if times > 1 else f"{100 * times:.1f} % of it is used"
    return f"{said}; weight {100 * data.weights[number]:.4g} %, about {share:.1f} % of this run, {often}"


def _passes(data: dataset.DataSet, schedule: mixing.Schedule) -> list[float]:
    """About how often each source is gone through by the end of a run, passes before a resume counted.

    Exactly it is known when all those rows are planned, which takes a second for a million documents, each time.
    """
    tokens = np.zeros(len(data.documents.sources))
    for stream, end in zip(data.streams, schedule.consumed(len(schedule)), strict=True):
        for part, source, number in zip(stream.parts, stream.sources, stream.num_rows(end), strict=True):
            tokens[source] += number * part.num_tokens / part.rows_in(1)
    return [float(sum_) / one.num_tokens for sum_, one in zip(tokens, data.documents.sources, strict=True)]


def hands(dealt: Sequence[pipeline.Hand]) -> list[str]:
    """Who gets which rows of a step, a line for each turn of a group."""
    return [
        f"turn {hand.turn + 1}  group {hand.group}  {_devices(hand)}  "
        f"{'rows' if len(hand.rows) > 1 else 'row'} {' '.join('-' if row is None else str(row) for row in hand.rows)}  "
        f"{count(hand.num_pieces, 'piece')}, {count(hand.num_tokens, 'token')}"
        for hand in dealt
    ]


def _devices(hand: pipeline.Hand) -> str:
    devices = "device" if len(hand.devices) == 1 else "devices"
    processes = f" of {'processes' if len(hand.processes) > 1 else 'process'} {' '.join(map(str, hand.processes))}"
    return f"{devices} {' '.join(map(str, hand.devices))}{processes}"


def count(number: int, thing: str) -> str:
    """A number of things: `1 row`, `2,000 rows`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
