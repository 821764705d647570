"""Output of the commands: labeled lines, and evaluation results."""

from collections.abc import Iterable

import rich.console
import rich.table
import rich.text

from jaxsp.core import durations
from jaxsp.data.packing.summary import format_count
from jaxsp.training.evaluator import EvalResult


def format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Formats pairs of a label and a text as lines."""
    return "".join(f"{label:<10} {text}\n" for label, text in pairs)


def print_pairs(console: rich.console.Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Prints pairs of a label and a text; on a terminal, long texts are folded."""
    if not console.is_terminal:  # a log: nothing is folded, so that commands can be copied
        console.print(format_pairs(pairs), end="", soft_wrap=True, highlight=False, markup=False)
        return
    grid = rich.table.Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(label, rich.text.Text(text))
    console.print(grid)


def format_result(result: EvalResult) -> str:
    """Formats an evaluation of one eval set as a line."""
    loss = "not finite" if result.loss is None else f"{result.loss:.4f}"
    if result.perplexity is not None:
        loss += f", perplexity {result.perplexity:.4g}"
    loss_tokens = format_count(result.num_loss_tokens, "loss token")
    return (
        f"step {result.step}  {result.data}: loss {loss}, "
        f"token accuracy {result.token_accuracy:.4f} over {loss_tokens} "
        f"({durations.describe(round(result.seconds, 1))})"
    )
