"""Table of differences between results of two models, evaluated with the same command."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from jaxsp.core import files
from jaxsp.core.errors import UserError

COMPARED = (
    "loss token_accuracy loss_per_doubling long_ppl num_key_tokens reward_accuracy "
    "exact_rate answer_loss"
).split()
"""Fields of lines of eval.jsonl and tasks.jsonl that a table has, beside the loss by position."""

Results = dict[tuple[str, str], float]
"""Numbers by what they were measured on, and by field."""


def read(path: str | pathlib.Path) -> Results:
    """Reads a file of `jaxsp eval --out`; of several lines for a set, the last one counts.

    Raises: UserError if it is no such file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(
            f"--baseline = {path}: there is no such file. Use one that jaxsp eval --out FILE wrote."
        )
    lines = [files.parse_json(line) or {} for line in path.read_bytes().splitlines()]
    found = collect(line for line in lines if line.keys() & {"data", "task", "lm_eval"})
    if not found:
        raise UserError(
            f"--baseline = {path}: has no results. Use a file that jaxsp eval --out FILE wrote."
        )
    return found


def collect(lines: Iterable[Mapping[str, Any]]) -> Results:
    """Numbers of lines of eval.jsonl, tasks.jsonl and lm_eval.jsonl."""
    return {
        (_name(line), field): value
        for line in lines
        for field, value in _list_numbers(line)
        if isinstance(value, int | float)
    }


def print_table(
    console: rich.console.Console, before: Results, lines: Sequence[Mapping[str, Any]]
) -> None:
    """Prints the numbers of both, and their differences. Args: lines: of the other model."""
    after = collect(lines)
    table = rich.table.Table(box=None, pad_edge=False)
    for header in ("", "", "before", "after", "difference"):
        table.add_column(header, justify="left" if not header else "right")
    last = None
    for key in dict.fromkeys([*after, *before]):
        name, field = key
        numbers = [before.get(key), after.get(key)]
        difference = None if None in numbers else after[key] - before[key]
        texts = [_format(number, "") for number in numbers]
        table.add_row("" if name == last else name, field, *texts, _format(difference, "+"))
        last = name
    console.print(table)


def _format(number: float | None, sign: str) -> str:
    if number is None:
        return "-"
    return f"{number:{sign},}" if isinstance(number, int) else f"{number:{sign}.4f}"


def _name(line: Mapping[str, Any]) -> str:
    if "task" in line:
        return f"task {line['task']}, {line.get('length')} tokens"
    return str(line.get("data") or f"lm-eval {line['lm_eval']}")


def _list_numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    scores, losses = (
        line[name] if isinstance(line.get(name), dict) else {}
        for name in ("results", "loss_by_position")
    )
    yield from ((name, score) for name, score in scores.items() if "_stderr" not in name)
    yield from ((field, line[field]) for field in COMPARED if field in line)
    yield from ((f"loss from position {first}", loss) for first, loss in losses.items())
