"""Comparisons of results: the table of two models, and settings that make results differ."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.run import metrics
from jaxsp.training.metric_table import Line

COMPARED = (
    "loss token_accuracy loss_per_doubling long_ppl num_key_tokens reward_accuracy "
    "exact_rate answer_loss"
).split()
"""Fields of lines of eval.jsonl and tasks.jsonl that are shown, beside the loss by position."""

_SETTINGS = {
    "compute_dtype": ("{} compute", "unknown dtype"),
    "rope": ("RoPE {}", "no RoPE"),
    "limit": ("{:,} records", "all records"),
    "num_fewshot": ("{:,} examples", "the task's examples"),
    "chat_template_kwargs": ("chat template with {}", "no chat template"),
}
"""Fields of a line that are settings, with a text for a value and for null."""

RESULT_FILES = (metrics.EVAL_FILE, metrics.TASKS_FILE, metrics.HARNESS_FILE)
"""Files of results in a run's directory."""


def find_file(path: pathlib.Path, line: Line) -> pathlib.Path:
    """File of a line of results: in a run's directory, or the path itself."""
    name = RESULT_FILES[2 if "lm_eval" in line else int("task" in line)]
    return path / name if path.is_dir() else path


def list_files(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Files of results: the path, or those of a run's directory."""
    path = pathlib.Path(path)
    return [path / name for name in RESULT_FILES] if path.is_dir() else [path]


def read(path: str | pathlib.Path) -> list[Line]:
    """Reads the results of `jaxsp eval --out`, or of a run, by step. Raises: UserError"""
    texts = [file.read_bytes() for file in list_files(path) if file.is_file()]
    lines = [files.parse_json(line) or {} for text in texts for line in text.splitlines()]
    lines = [line for line in lines if _name(line) and list_numbers(line)]
    if not lines:
        reason = "has no results" if pathlib.Path(path).exists() else "there is no such file"
        raise UserError(
            f"--baseline = {path}: {reason}. Use a file that jaxsp eval --out FILE wrote, or the "
            "directory of an evaluated run."
        )
    if pathlib.Path(path).is_dir():  # jaxsp eval appends lines of earlier checkpoints
        lines.sort(key=lambda line: step if type(step := line.get("step")) is int else 0)
    return lines


def list_differences(line: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that make two lines of a name differ, such as `["rows of 32,768 tokens"]`."""
    common = line.keys() & other.keys()
    changed = {name for name in common if line[name] != other[name]}
    texts = []
    if "row_tokens" in changed and ("data_digest" in changed or "lm_eval" in line):
        texts.append(f"rows of {line['row_tokens']:,} tokens")
    elif "data_digest" in changed:
        texts.append(f"data {str(line['data_digest'])[:6]}")
    for name, (form, null) in _SETTINGS.items():
        if name in changed:
            texts.append(null if line[name] is None else form.format(line[name]))
    return texts


def group(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by what was evaluated, and by settings that are not those of its first line."""
    groups: dict[str, list[Line]] = {}
    first: dict[str, Line] = {}
    for line in filter(_name, lines):
        name = _name(line)
        settings = list_differences(line, first.setdefault(name, line))
        groups.setdefault(", ".join([name, *settings]), []).append(line)
    return groups


def print_table(
    console: rich.console.Console, lines_before: Sequence[Line], lines_after: Sequence[Line]
) -> None:
    """Prints the last numbers of each name of two models, their differences, and other settings."""
    before, after = ({_name(x): x for x in lines} for lines in (lines_before, lines_after))
    table = rich.table.Table(box=None, pad_edge=False)
    for header in ("", "", "before", "after", "difference"):
        table.add_column(header, justify="left" if not header else "right")
    for name in dict.fromkeys([*after, *before]):
        old, new = (list_numbers(lines.get(name, {})) for lines in (before, after))
        label = name
        for field in dict.fromkeys([*new, *old]):
            texts = [format_number(numbers.get(field)) for numbers in (old, new)]
            has_both = field in old and field in new
            difference = format_number(new[field] - old[field], "+") if has_both else "-"
            table.add_row(label, field, *texts, difference)
            label = ""
    # wider than a narrow terminal rather than wrapped
    console.print(table, width=200, no_wrap=True, crop=False)
    for name, line in after.items():
        other = before.get(name, line)
        settings = [", ".join(list_differences(*pair)) for pair in ((other, line), (line, other))]
        if any(settings):
            text = f"{name}: settings differ: {settings[0]} before, {settings[1]} after"
            console.print(text, highlight=False, soft_wrap=True)


def list_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of eval.jsonl, tasks.jsonl or lm_eval.jsonl by field."""
    scores, losses = (
        line[name] if isinstance(line.get(name), dict) else {}
        for name in ("results", "loss_by_position")
    )
    fields = {name: score for name, score in scores.items() if "_stderr" not in name}
    fields |= {field: line[field] for field in COMPARED if field in line}
    fields |= {f"loss from position {first}": loss for first, loss in losses.items()}
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}


def format_number(number: float | None, sign: str = "") -> str:
    """Formats a number of a result; - for None."""
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
