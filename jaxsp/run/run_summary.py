"""Summary of a finished run, with the commands to run next."""

import statistics
from collections.abc import Sequence

from jaxsp.core import durations, urls
from jaxsp.core.units import format_count
from jaxsp.training.metric_table import Line


def summarize_run(
    directory: str,
    first: Line,
    last: Line,
    *,
    recent_losses: Sequence[float],
    seconds: float,
    steps_s: float,
    has_eval_sets: bool,
) -> list[tuple[str, str]]:
    """Returns the summary of a finished run, with the commands to run next.

    Args:
        directory: run.directory.
        steps_s: seconds of the steps, without evaluations, checkpoints and compilations.
    """
    out = "hf" if urls.is_url(directory) else f"{directory}/hf"
    num_steps = format_count(last["step"] - first["step"] + 1, "step")
    num_tokens = last["num_tokens_total"] - first["num_tokens_total"] + first["num_tokens"]
    first_loss = "none" if first["loss"] is None else f"{first['loss']:.4f}"
    mean_loss = f"{statistics.mean(recent_losses):.4f}" if recent_losses else "none"
    recent_steps = format_count(len(recent_losses), "step")
    duration = durations.describe(seconds)
    commands = [f"report {directory}", f"export {directory} {out}"]
    if has_eval_sets:
        commands.insert(1, f"eval {directory}")
    return [
        ("trained", f"{num_steps}, {format_count(num_tokens, 'token')} in {duration}"),
        (
            "loss",
            f"{first_loss} at step {first['step']}, mean of the last {recent_steps} {mean_loss}",
        ),
        ("speed", f"{num_tokens / steps_s:,.0f} tokens/s, mean of the steps"),
        ("output", f"{directory}/metrics.jsonl, {directory}/checkpoints/{last['step']}"),
        *zip(("next", "", ""), (f"jaxsp {command}" for command in commands), strict=False),
    ]
