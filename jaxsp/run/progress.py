"""Progress of a run: a bar on a terminal, otherwise a line every few seconds."""

import time

import rich.console
import rich.progress

from jaxsp.core import durations
from jaxsp.run import console as output
from jaxsp.training.metric_table import Line


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
            time_left = [f"left {durations.describe(left_s)}"]
        numbers = [f"loss {_format_number(line['loss'], '.4f')}"]
        if "reward_accuracy" in line:
            numbers.append(f"reward accuracy {_format_number(line['reward_accuracy'], '.3f')}")
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
                f"grad norm {_format_number(line['grad_norm'], '.3g')}",
                speed,
                f"elapsed {durations.describe(now - self._began)}",
                *time_left,
            ]
            self.print_line("  ".join(parts))

    def print_line(self, text: str) -> None:
        """Prints a line: above the bar on a terminal, otherwise after the time of day."""
        time_of_day = "" if self._console.is_terminal else time.strftime("%H:%M:%S  ")
        output.print_line(self._console, time_of_day + text)


def _format_number(value: float | None, form: str) -> str:
    return "none" if value is None else f"{value:{form}}"
