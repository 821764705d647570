"""Output of the commands: labeled lines, evaluation results, and the progress of a run."""

import textwrap
import time
from collections.abc import Iterable

import rich.console
import rich.progress
import rich.text

from jaxsp.core import units
from jaxsp.core.units import format_count
from jaxsp.training.metric_table import Line

MAX_COLUMNS = 100
"""Columns of labeled lines, in a file and on a wide terminal."""

LABEL_COLUMNS = 10


def format_pairs(pairs: Iterable[tuple[str, str]], columns: int = MAX_COLUMNS) -> str:
    """Formats labels and texts as lines, wrapped at words. Commands stay whole, to be copied."""
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


def format_result(line: Line, *, with_step: bool = True) -> str:
    """Formats a line of eval.jsonl or tasks.jsonl as text."""
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
    of_labels = "loss"
    if "cross_entropy" in line:  # the objective has another loss
        of_labels = "cross entropy"
        parts.append(f"{of_labels} {_format_number(line['cross_entropy'])}")
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
        parts.append(f"{of_labels} {line['loss_per_doubling']:+.4f} per doubling of the position")
    if line["num_key_tokens"] is not None:
        value = "undefined" if line["long_ppl"] is None else f"{line['long_ppl']:.4g}"
        parts.append(f"LongPPL {value} over {format_count(line['num_key_tokens'], 'key token')}")
    duration = units.format_seconds(round(line["seconds"], 1))
    return f"{step}{line['data']}: {', '.join(parts)} ({duration})"


class Progress:
    """Progress bar on a terminal; otherwise a line with the time of day every 10 seconds."""

    SECONDS_BETWEEN_LINES = 10.0
    WIDE_COLUMNS = 120
    """Terminal width from which the bar has 40 columns instead of 10."""

    def __init__(self, console: rich.console.Console, *, first_step: int, num_steps: int):
        self._console = console
        self._first_step = first_step
        self._num_steps = num_steps
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.BarColumn(40 if console.width >= self.WIDE_COLUMNS else 10),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=num_steps, completed=first_step, numbers="")
        self._began = self._printed = time.perf_counter()
        self._first_step_end: float | None = None
        """End of the first step. It and everything before it take longer than later steps."""

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show_step(self, line: Line) -> None:
        """Shows a finished step."""
        now = time.perf_counter()
        num_done = line["step"] - self._first_step
        num_left = self._num_steps - line["step"]
        time_left = []
        if self._first_step_end is None:
            self._first_step_end = now
        else:
            left_s = (now - self._first_step_end) / (num_done - 1) * num_left
            time_left = [f"left {units.format_seconds(left_s)}"]
        numbers = [f"loss {_format_number(line['loss'], null='none')}"]
        if "reward_accuracy" in line:
            numbers.append(
                f"reward accuracy {_format_number(line['reward_accuracy'], '.3f', null='none')}"
            )
        numbers.append(f"lr {line['learning_rate']:.3g}")
        speed = f"{line['tokens_per_s']:,.0f} tokens/s"
        if self._console.is_terminal:
            peak_gib = line["device_peak_gib"]
            peak = [] if peak_gib is None else [f"peak {peak_gib:.1f} GiB"]
            text = "  ".join([*numbers, speed, *peak, *time_left])
            self._bar.update(self._task, completed=line["step"], numbers=text)
        elif now - self._printed > self.SECONDS_BETWEEN_LINES or num_done == 1 or num_left == 0:
            self._printed = now
            parts = [
                f"step {line['step']}/{self._num_steps}",
                *numbers,
                f"grad norm {_format_number(line['grad_norm'], '.3g', null='none')}",
                speed,
                f"elapsed {units.format_seconds(now - self._began)}",
                *time_left,
            ]
            self.print_line("  ".join(parts))

    def print_line(self, text: str) -> None:
        """Prints a line: above the bar on a terminal, otherwise after the time of day."""
        time_of_day = "" if self._console.is_terminal else time.strftime("%H:%M:%S  ")
        print_line(self._console, time_of_day + text)


def _format_number(value: float | None, form: str = ".4f", *, null: str = "not finite") -> str:
    return null if value is None else f"{value:{form}}"
