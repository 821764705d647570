"""Comparisons of results: the table of two models, and settings that make results differ."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.reporting import metrics
from jaxsp.training.metric_table import Line

COMPARED = (
    "loss token_accuracy loss_per_doubling long_ppl num_key_tokens reward_accuracy "
    "exact_rate answer_loss"
).split()
"""Fields of lines of eval.jsonl and tasks.jsonl that a table has, beside the loss by position."""

WEIGHT_SETTINGS = {"compute_dtype": ("{} compute", "unknown dtype"), "rope": ("RoPE {}", "no RoPE")}
"""Fields of a line that are the same for all data, with a text for a value and for null."""

_HARNESS_SETTINGS = {
    "limit": ("{} records", "all records"),
    "num_fewshot": ("{} examples", "the task's examples"),
    "chat_template_kwargs": ("chat template with {}", "no chat template"),
}

DATA_SETTINGS = {"data_digest", "row_tokens"}
"""Fields of a line that say what was evaluated."""

_MAX_COLUMNS = 200

_FILES = (metrics.EVAL_FILE, metrics.TASKS_FILE, metrics.HARNESS_FILE)

Results = dict[tuple[str, str], float]
"""Numbers by what they were measured on, and by field."""


def read(path: str | pathlib.Path) -> list[Line]:
    """Reads the results in a file of `jaxsp eval --out`, or in a run's directory, by step.

    Raises: UserError if there are none.
    """
    texts = [file.read_bytes() for file in list_files(path) if file.is_file()]
    lines = [files.parse_json(line) or {} for text in texts for line in text.splitlines()]
    lines = [line for line in lines if _name(line) and _collect([line])]
    if not lines:
        reason = "has no results" if pathlib.Path(path).exists() else "there is no such file"
        raise UserError(
            f"--baseline = {path}: {reason}. Use a file that jaxsp eval --out FILE wrote, or the "
            "directory of an evaluated run."
        )
    if not pathlib.Path(path).is_dir():
        return lines
    # jaxsp eval appends lines of earlier checkpoints
    return sorted(lines, key=lambda line: step if type(step := line.get("step")) is int else 0)


def list_files(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Files with the results in a path: itself, or those of a run's directory."""
    path = pathlib.Path(path)
    return [path / name for name in _FILES] if path.is_dir() else [path]


def list_differences(line: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings of a line that make its numbers differ from those of another one of the same name.

    Example: `["rows of 32,768 tokens", "float32 compute"]`.
    """
    common = line.keys() & other.keys()
    changed = {name for name in common if line[name] != other[name]}
    texts = []
    if "row_tokens" in changed and ("data_digest" in changed or "lm_eval" in line):
        texts.append(f"rows of {_format(line['row_tokens'])} tokens")
    elif "data_digest" in changed:
        texts.append(f"data {str(line['data_digest'])[:6]}")
    for name, (form, null) in (WEIGHT_SETTINGS | _HARNESS_SETTINGS).items():
        if name in changed:
            texts.append(null if line[name] is None else form.format(_format(line[name])))
    return texts


def print_table(
    console: rich.console.Console,
    lines_before: Sequence[Mapping[str, Any]],
    lines_after: Sequence[Mapping[str, Any]],
) -> None:
    """Prints the numbers of two models, their differences, and settings that differ.

    Of several lines of a name, the last one counts.
    """
    last_before, last_after = (
        {_name(line): line for line in lines} for lines in (lines_before, lines_after)
    )
    before, after = (_collect(lines.values()) for lines in (last_before, last_after))
    table = rich.table.Table(box=None, pad_edge=False)
    for header in ("", "", "before", "after", "difference"):
        table.add_column(header, justify="left" if not header else "right")
    last = None
    for key in dict.fromkeys([*after, *before]):
        name, field = key
        numbers = [before.get(key), after.get(key)]
        difference = None if None in numbers else after[key] - before[key]
        texts = [_format_number(number, "") for number in numbers]
        table.add_row("" if name == last else name, field, *texts, _format_number(difference, "+"))
        last = name
    # wider than a narrow terminal rather than wrapped
    console.print(table, width=_MAX_COLUMNS, no_wrap=True, crop=False)
    for name, line in last_after.items():
        other = last_before.get(name, line)
        settings = [", ".join(list_differences(*pair)) for pair in ((other, line), (line, other))]
        if any(settings):
            text = f"{name}: settings differ: {settings[0]} before, {settings[1]} after"
            console.print(text, highlight=False, soft_wrap=True)


def _collect(lines: Iterable[Mapping[str, Any]]) -> Results:
    """Numbers of lines of eval.jsonl, tasks.jsonl and lm_eval.jsonl."""
    return {
        (_name(line), field): value
        for line in lines
        for field, value in _list_numbers(line)
        if isinstance(value, int | float)
    }


def _format(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_number(number: float | None, sign: str) -> str:
    if number is None:
        return "-"
    return f"{number:{sign},}" if isinstance(number, int) else f"{number:{sign}.4f}"


def _name(line: Mapping[str, Any]) -> str:
    """Name of what was evaluated; empty if the line has no results."""
    if line.get("task"):
        return f"task {line['task']}, {line.get('length')} tokens"
    if line.get("lm_eval"):
        return f"lm-eval {line['lm_eval']}"
    return str(line.get("data") or "")


def _list_numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    scores, losses = (
        line[name] if isinstance(line.get(name), dict) else {}
        for name in ("results", "loss_by_position")
    )
    yield from ((name, score) for name, score in scores.items() if "_stderr" not in name)
    yield from ((field, line[field]) for field in COMPARED if field in line)
    yield from ((f"loss from position {first}", loss) for first, loss in losses.items())
