"""Preview of the training data: records of each source, with the tokens that have a loss.

Printed by `jaxsp train CONFIG.yaml --preview`.
"""

import itertools
from typing import Any

import numpy as np
import rich.console
import rich.text

from jaxsp.core import errors
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import ProblemCollector, at
from jaxsp.data import sources, tokenize
from jaxsp.data.tokenize import Example
from jaxsp.hf import folder
from jaxsp.run import model_files
from jaxsp.run.config_file import Config

_MAX_TOKENS = 400
_MAX_CHAT_TOKENS = 4000
"""Maximum number of tokens shown of a document: its first and last half. All tokens of a text have
a loss; in a chat, a user wants to see which messages have one."""


def print_preview(config: Config, console: rich.console.Console, *, num_records: int = 1) -> None:
    """Prints records of each training source and marks the tokens with a loss. Raises: UserError

    Reads only these records, as training does. Needs no device.

    Args: num_records: number of records of each source.
    """
    problems = ProblemCollector()
    tokenizer = None
    model_folder = None
    model = config.model
    if model.tokenizer or any(source.needs_tokenizer for source in config.data.train):
        if model.tokenizer is None and model.source is not None:
            model_folder = folder.find(model.source)
        tokenizer = model_files.load_tokenizer(config, model_folder, None)
    for number, source in enumerate(config.data.train):
        num_problems = len(problems)
        field = f"data.train.{number}.source"
        with problems.collect(), at(field, source.source):
            records = sources.read(source, data=config.data)
            encoded = tokenize.encode_examples(
                records,
                tokenizer=tokenizer,
                num_records=num_records,
            )
            name = f"{field} = {source.source}"
            max_tokens = _MAX_CHAT_TOKENS if source.is_chat else _MAX_TOKENS
            for example in encoded:
                _print_example(example, name, tokenizer, console, max_tokens=max_tokens)
        if number + 1 < len(config.data.train):
            # Also printed here, next to their source; all are raised again at the end
            for problem in problems[num_problems:]:
                console.print(f"{problem}\n", highlight=False, soft_wrap=True)
    problems.raise_if_any()


def _print_example(
    example: Example, name: str, tokenizer: Any, console: rich.console.Console, *, max_tokens: int
) -> None:
    """Prints a title, the numbers of tokens, and the text with its loss spans highlighted."""
    _, tokens, labels = example
    has_loss = np.ones(len(tokens), bool) if labels is None else labels != NO_LABEL
    has_loss[:1] = False  # the first token is never a target
    legend = _highlight("like this" if has_loss.any() else "nothing", console)
    title = errors.escape(f"{name}: {example.place}")
    text = rich.text.Text(f"{title}\n{len(tokens):,} tokens, ")
    text.append(f"{has_loss.sum():,} of them with a loss, ").append(legend).append("\n\n")
    half = max_tokens // 2
    spans = [(0, len(tokens))]
    if len(tokens) > 2 * half:
        spans = [(0, half), (len(tokens) - half, len(tokens))]
    for start, stop in spans:
        if start:
            text.append(f"\n\n... {start - half:,} tokens ...\n\n")
        changes = np.flatnonzero(np.diff(has_loss[start:stop])) + start + 1
        for first, last in itertools.pairwise([start, *changes, stop]):
            ids = tokens[first:last].tolist()
            part = "".join(f" {token}" for token in ids)
            if tokenizer is not None:
                part = tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            part = errors.escape(part, keep="\n\t")
            text.append(_highlight(part, console) if has_loss[first] else part)
    console.print(text.append("\n"), highlight=False, soft_wrap=True)


def _highlight(part: str, console: rich.console.Console) -> rich.text.Text:
    """Text with a loss: in color, or in brackets. Line breaks are tokens too and made visible."""
    part = part.replace("\n", "\u21b5\n")
    if console.is_terminal and not console.no_color:
        return rich.text.Text(part, style="black on green")
    return rich.text.Text(f"\u27e6{part}\u27e7")
