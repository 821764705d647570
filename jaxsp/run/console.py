"""Output of the commands: labeled lines, and evaluation results."""

import textwrap
from collections.abc import Iterable
from typing import Any

import rich.console
import rich.text

from jaxsp.core import durations
from jaxsp.core.units import format_count
from jaxsp.training.metric_table import Line

MAX_COLUMNS = 100
"""Columns of labeled lines, in a file and on a wide terminal."""

LABEL_COLUMNS = 10


def format_pairs(pairs: Iterable[tuple[str, str]], columns: int = MAX_COLUMNS) -> str:
    """Formats pairs of a label and a text as lines of a number of columns, wrapped at words.

    Commands stay whole, so that they can be copied.
    """
    text_columns = max(columns - LABEL_COLUMNS - 1, 1)
    lines = []
    for label, text in pairs:
        wrapped = [text]
        if not text.startswith("jaxsp "):
            wrapped = textwrap.wrap(
                text, text_columns, break_on_hyphens=False, break_long_words=False
            )
        for number, line in enumerate(wrapped):
            lines.append(f"{'' if number else label:<{LABEL_COLUMNS}} {line}\n")
    return "".join(lines)


def print_pairs(console: rich.console.Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Prints pairs of a label and a text, wrapped at words."""
    columns = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    text = rich.text.Text(format_pairs(pairs, columns))
    text.highlight_regex(rf"(?m)^.{{{LABEL_COLUMNS}}}", "bold cyan")
    console.print(text, end="", soft_wrap=True, highlight=False)


def print_line(console: rich.console.Console, text: str) -> None:
    """Prints a text: wrapped at words on a terminal, as one line in a log."""
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def format_sample(line: dict[str, Any]) -> str:
    """Formats the beginning of an answer of samples.jsonl as text."""
    return f"{line['data']}: the first answer begins with {line['answer'][:80]!r}"


def format_result(line: Line, *, with_step: bool = True) -> str:
    """Formats a line of eval.jsonl or tasks.jsonl as text.

    Example: `step 10  needle, 4,096 tokens: 95.5 % exact answers of 220 (worst depth 0.5: 80.0 %),
        answer loss 0.0312`.
    """
    step = f"step {line['step']}  " if with_step else ""
    if "task" in line:
        text = f"{step}{line['task']}, {line['length']:,} tokens: {line['exact_rate']:.1%} exact "
        text += f"{'answer' if line['num_samples'] == 1 else 'answers'} of {line['num_samples']:,}"
        by_depth = line["exact_rate_by_depth"]
        if by_depth and min(by_depth.values()) < max(by_depth.values()):
            worst = min(by_depth, key=by_depth.__getitem__)
            text += f" (worst depth {worst}: {by_depth[worst]:.1%})"
        return f"{text}, answer loss {_format_number(line['answer_loss'])}"
    parts = [f"loss {_format_number(line['loss'])}"]
    if line["perplexity"] is not None:
        parts.append(f"perplexity {line['perplexity']:.4g}")
    if "num_pairs" in line:
        if "reward_accuracy" in line:
            parts.append(f"reward accuracy {_format_number(line['reward_accuracy'])}")
        margin = _format_number(line["reward_margin"])
        parts.append(f"margin {margin} over {format_count(line['num_pairs'], 'pair')}")
    if "token_accuracy" in line:
        loss_tokens = format_count(line["num_loss_tokens"], "loss token")
        accuracy = _format_number(line["token_accuracy"])
        parts.append(f"token accuracy {accuracy} over {loss_tokens}")
    if line["loss_per_doubling"] is not None:
        parts.append(f"loss {line['loss_per_doubling']:+.4f} per doubling of the position")
    if line["num_key_tokens"] is not None:
        value = "undefined" if line["long_ppl"] is None else f"{line['long_ppl']:.4g}"
        parts.append(f"LongPPL {value} over {format_count(line['num_key_tokens'], 'key token')}")
    duration = durations.describe(round(line["seconds"], 1))
    return f"{step}{line['data']}: {', '.join(parts)} ({duration})"


def _format_number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
