"""python -m jaxsp.train CONFIG.yaml --preview: what is learned of the first record of each training source."""

import itertools
from typing import Any

import numpy as np
import rich.console
import rich.text

from jaxsp.config.schema import Config, DataConfig, SourceConfig
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import ProblemCollector
from jaxsp.data.ingest import sources
from jaxsp.data.tokenization import tokenize
from jaxsp.hf import folder
from jaxsp.run import build

_LOSS_STYLE = "black on green"

_LOSS_OPEN, _LOSS_CLOSE = "\u27e6", "\u27e7"
"""Around what is learned, where there are no colours."""

_MAX_TOKENS = {"text": 400, "tokens": 400, "messages": 4000, "prompt_completion": 4000}
"""Most tokens shown of a record, by the source's format: the first and the last half. All tokens of a
text have a loss, whereas a chat has to be read to see which of its messages do."""


def print_preview(config: Config, console: rich.console.Console) -> None:
    """Prints the first usable record of each training source, as the text of its tokens, with those that are learned marked.

    It reads, renders and tokenises as training does, but tokenises no more than it shows, and needs no device.

    Raises: UserError with the problems of all sources.
    """
    problems, tokenizer = ProblemCollector(), None
    named, model = config.model.tokenizer, config.model.source
    if named is not None or any(source.format != "tokens" for source in config.data.train):
        tokenizer = build.load_tokenizer(
            config, folder.find(model) if named is None and model is not None else None, None
        )
    for number, source in enumerate(config.data.train):
        with problems.collect():
            _print_source(
                source, config.data, tokenizer, console, field=f"data.train.{number}.source"
            )
    problems.raise_if_any()


def _print_source(
    source: SourceConfig,
    data: DataConfig,
    tokenizer: Any,
    console: rich.console.Console,
    *,
    field: str,
) -> None:
    records = sources.read(source, data=data, field=field)
    place, tokens, labels = tokenize.encode_first_record(
        records, source=source, data=data, tokenizer=tokenizer, field=field
    )
    learned = np.ones(len(tokens), bool) if labels is None else labels != NO_LABEL
    learned[:1] = False  # no token comes before it that it could be told from
    legend = _highlight("like this" if learned.any() else "nothing", console)
    said = rich.text.Text(f"{field} = {source.source}: {place}\n{len(tokens):,} tokens, ")
    said.append(f"{learned.sum():,} of them with a loss, ").append(legend).append("\n\n")
    half = _MAX_TOKENS[source.format] // 2
    for start, stop in _choose_spans(len(tokens), half=half):
        if start:
            said.append(f"\n\n... {start - half:,} tokens ...\n\n")
        borders = [start, *(np.flatnonzero(np.diff(learned[start:stop])) + start + 1), stop]
        for first, last in itertools.pairwise(borders):
            words = _decode(tokens[first:last], tokenizer)
            said.append(_highlight(words, console) if learned[first] else words)
    console.print(said.append("\n"), highlight=False, soft_wrap=True)


def _choose_spans(num_tokens: int, *, half: int) -> list[tuple[int, int]]:
    """First token and end of each part that is shown: all, or the first and the last `half`."""
    if num_tokens <= 2 * half:
        return [(0, num_tokens)]
    return [(0, half), (num_tokens - half, num_tokens)]


def _decode(tokens: np.ndarray, tokenizer: Any) -> str:
    """The text of tokens, with special tokens; their numbers, where there is no tokenizer."""
    if tokenizer is None:
        return "".join(f" {token}" for token in tokens)
    return tokenizer.decode(
        tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _highlight(words: str, console: rich.console.Console) -> rich.text.Text:
    """Text that is learned: in colour, or in brackets where there is none. Line breaks are tokens too, and made visible."""
    words = words.replace("\n", "\u21b5\n")
    if console.is_terminal and not console.no_color:
        return rich.text.Text(words, style=_LOSS_STYLE)
    return rich.text.Text(f"{_LOSS_OPEN}{words}{_LOSS_CLOSE}")
