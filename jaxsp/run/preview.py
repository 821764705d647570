"""Screens about data: of `jaxsp train --preview` and `--prepare-data`, and `jaxsp plan --data`."""

import itertools
from typing import Any

import numpy as np
import rich.console
import rich.text

from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes, errors
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import ProblemCollector, at
from jaxsp.core.units import format_count
from jaxsp.data import dataset, sources, tokenize
from jaxsp.data.tokenize import Example
from jaxsp.hf import folder
from jaxsp.hf.folder import ModelFolder
from jaxsp.run import data_sets, model_files
from jaxsp.run.config_file import Config
from jaxsp.training.specs import find_division_problems

_MAX_TOKENS = 4000
"""Maximum number of tokens shown of a document: its first and last half."""


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
        field = f"data.train.{number}.source"
        with problems.collect(), at(field, source.source):
            records = sources.read(source, data=config.data)
            encoded = tokenize.encode_examples(
                records,
                tokenizer=tokenizer,
                num_records=num_records,
            )
            name = f"{field} = {source.source}"
            for example in encoded:
                _print_example(example, name, tokenizer, console)
    problems.raise_if_any()


def _print_example(
    example: Example, name: str, tokenizer: Any, console: rich.console.Console
) -> None:
    """Prints a title, the numbers of tokens, and the text with its loss spans highlighted."""
    _, tokens, labels = example
    has_loss = np.ones(len(tokens), bool) if labels is None else labels != NO_LABEL
    has_loss[:1] = False  # the first token is never a target
    legend = _highlight("like this" if has_loss.any() else "nothing", console)
    title = errors.escape(f"{name}: {example.place}")
    text = rich.text.Text(f"{title}\n{len(tokens):,} tokens, ")
    text.append(f"{has_loss.sum():,} of them with a loss, ").append(legend).append("\n\n")
    half = _MAX_TOKENS // 2
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


def prepare_data(config: Config, console: rich.console.Console) -> None:
    """Reads, tokenizes and packs data into the caches of training. Raises: UserError"""
    problems = ProblemCollector()
    mesh = config.mesh
    if mesh.seq != "auto":  # the number of devices is unknown
        sizes = {axes.REPLICA: mesh.replica, axes.DATA: max(mesh.data, 1), axes.SEQ: mesh.degree}
        with_rows = config.step.with_one_row_for_auto()
        problems += find_division_problems(with_rows, sizes, layout=None)
    source = model = None
    with problems.collect():
        source, _, adapter = model_files.read_model(config)
        model = adapter.model
    print_data(config, source, model, console, problems)


def print_data(
    config: Config,
    source: ModelFolder | None,
    model: ModelConfig | None,
    console: rich.console.Console,
    problems: ProblemCollector,
) -> int:
    """Prepares the data sets of a config, and prints their rows and steps.

    Args: source, model: None if they have reported a problem. problems: found before.
    Returns: the steps of the run.
    """
    config = data_sets.inline_chat_template(config)
    opened = data_sets.open_sources(config, for_training=True, problems=problems)
    tokenizer = None
    with problems.collect():
        tokenizer = model_files.load_checked_tokenizer(
            config, source, model, has_text=opened.have_text
        )
    problems.raise_if_any()
    assert model is not None, "it has reported a problem"
    train, evals = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=model.vocab_size, for_training=True
    )
    assert train is not None, "made for training"
    schedule = train.make_schedule(
        config.batch.rows_per_step, num_steps=config.run.steps, epochs=config.run.epochs
    )
    lines = dataset.describe_data(train, config.data, schedule)
    lines += [("eval", f"{each.name} ({dataset.describe_documents(each)})") for each in evals]
    lines.append(("steps", format_count(len(schedule), "step")))
    for label, line in lines:
        console.print(f"{label:<8}{line}", highlight=False, soft_wrap=True)
    return len(schedule)
