"""What a run says of itself in plain words, before its first step and after its last."""

import pathlib
import platform
import time
from collections.abc import Iterable, Sequence

import jax
import rich.console
import rich.progress
import rich.table
import rich.text

from jaxsp import attention
from jaxsp.config.schema import RunConfig
from jaxsp.core import axes, durations
from jaxsp.data.packing import summary
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.summary import format_count
from jaxsp.model import flops
from jaxsp.reporting.metrics import MetricsLine
from jaxsp.runtime import device_mesh, distributed
from jaxsp.training import memory_options, sharding
from jaxsp.training.evaluator import EvalResult
from jaxsp.training.inputs import RunInputs
from jaxsp.training.train_step import Program


def describe_run(program: Program, inputs: RunInputs) -> list[tuple[str, str]]:
    """The banner: pairs of a word and what is to be known about it."""
    config, model, mesh = program.config, program.model, program.mesh
    row_tokens, rows_per_step, at_once = (
        config.data.max_row_tokens,
        config.batch.rows_per_step,
        config.batch.rows_per_microbatch,
    )
    groups, seq = device_mesh.num_groups(mesh), mesh.shape[axes.SEQ]
    devices = mesh.devices.flatten()
    table = program.table

    placed = [
        (row, sharding.choose_placement(row, device_mesh.num_shards(mesh)))
        for row in jax.tree.leaves(table)
    ]
    repeated = sum(
        4 * row.size * (row.num_layers or 1) for row, place in placed if place.dim is None
    )
    lie = f"{repeated / 2**20:.1f} MiB of small weights on every device, the rest sharded"
    lie = lie if device_mesh.num_shards(mesh) > 1 else "whole on every device"
    held = (
        f"one row at a time, {_describe_row_devices(seq)}"
        if at_once == 1
        else f"{at_once} rows at a time, each {_describe_row_devices(seq)}"
    )
    turns = rows_per_step // (groups * at_once)
    documents, schedule = inputs.train_set.documents, inputs.schedule
    num_rows, to_come = schedule.num_rows, ""
    if inputs.start.step:
        to_come = f", {len(schedule):,} of them to come"
    per_epoch = summary.num_steps_per_epoch(inputs.train_set, config)
    epoch = "" if per_epoch is None else f"; an epoch is {format_count(per_epoch, 'step')}"
    shorter = [config.with_row_tokens(length) for length in reversed(config.data.row_lengths[:-1])]
    others = "".join(
        f" or {one.batch.rows_per_step:,} of {one.data.max_row_tokens:,}" for one in shorter
    )
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    settings = config.optimizer
    num_warmup_steps = settings.num_warmup_steps(program.num_steps)
    never = " (the run ends before)" if num_warmup_steps >= program.num_steps else ""
    clip = f", gradients clipped to {settings.max_grad_norm:g}" if settings.max_grad_norm else ""
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return [
        (
            "devices",
            f"{len(devices)} x {devices[0].device_kind}{several}, jax {jax.__version__}, Python {platform.python_version()}",
        ),
        (
            "mesh",
            f"{' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())}: {format_count(groups, 'group')} of {seq}",
        ),
        (
            "model",
            f"{inputs.hf_config['model_type']} with {flops.num_parameters(table):,} parameters, {program.dtype} compute, "
            f"float32 weights; {lie}",
        ),
        ("begins", inputs.weights_origin),
        *[("changed", ", ".join(inputs.start.config_changes))] * bool(inputs.start.config_changes),
        (
            "step",
            f"{format_count(rows_per_step, 'row')} of {row_tokens:,} tokens{others} ({rows_per_step * row_tokens:,} in all); "
            f"a group works on {held}; {format_count(groups * at_once, 'row')} in flight; {format_count(turns, 'turn')}",
        ),
        (
            "run",
            f"{format_count(program.num_steps, 'step')}{to_come} over {format_count(num_rows, 'row')}{epoch}",
        ),
        *summary.describe_data(inputs.train_set, config, schedule),
        ("attention", attention.describe(inputs.attention_choice, **heads)),
        ("memory", memory_options.describe(program)),
        *[("XLA", program.compile_options.description)] * bool(program.compile_options.description),
        (
            "optimizer",
            f"{settings.name}, learning rate {settings.learning_rate:g} {settings.schedule} after "
            f"{format_count(num_warmup_steps, 'step')} of warm-up{never}{clip}",
        ),
        *_describe_evaluation(inputs, config.run),
        *_note_long_documents(model_fields=inputs.hf_config, longest=int(documents.lengths.max())),
        ("writes", f"{config.run.directory}: {_describe_outputs(program, inputs)}"),
    ]


def _describe_evaluation(inputs: RunInputs, run: RunConfig) -> list[tuple[str, str]]:
    if not inputs.eval_sets:
        return []
    sets = [f"{one.name} ({describe_documents(one)})" for one in inputs.eval_sets]
    is_first = run.eval_at_start and not inputs.start.is_resume_in(pathlib.Path(run.directory))
    times = ["before the first step"] if is_first else []
    if run.eval_every is not None:
        times.append(
            "after every epoch"
            if run.eval_every == "epoch"
            else f"every {format_count(run.eval_every, 'step')}"
        )
    sets_and_patience = ", ".join(sets)
    if run.early_stopping_patience is not None:
        sets_and_patience += f"; stops after {run.early_stopping_patience} without improvement"
    before_last = f"{', '.join(times)} and " if times else ""
    return [("evaluates", f"{before_last}after the last step: {sets_and_patience}")]


def describe_documents(data: PackedDataset) -> str:
    """How many documents and tokens a data set has, and what is left out of it."""
    lengths, others = data.documents.lengths, summary.describe_exclusions(data.documents.sources)
    return f"{format_count(len(lengths), 'document')}, {format_count(int(lengths.sum()), 'token')}{'; ' * bool(others)}{others}"


def _describe_outputs(program: Program, inputs: RunInputs) -> str:
    config = program.config
    if config.run.save_steps is not None:
        when = f"every {config.run.save_steps} steps and at the end"
    elif config.run.save_interval is not None:
        when = f"every {durations.to_text(config.run.save_interval)} and at the end"
    elif config.run.save_every == "epoch":
        when = "after every epoch"
    else:
        when = "at the end"
    parts = ["config.yaml", "banner.txt", "metrics.jsonl"] + ["eval.jsonl"] * bool(inputs.eval_sets)
    profiled = config.logging.profile_steps
    parts += ["tensorboard/"] * config.logging.tensorboard
    parts += ["profile/"] * (profiled is not None and profiled[0] > inputs.start.step)
    return ", ".join([*parts, "model/", f"checkpoints/ {when}"])


def _note_long_documents(*, model_fields: dict, longest: int) -> list[tuple[str, str]]:
    """A word about positions that the model's config does not promise; they are trained all the same."""
    most = model_fields.get("max_position_embeddings")
    if most is None or longest <= most:
        return []
    return [
        (
            "note",
            f"the longest document has {longest:,} tokens, and the model's max_position_embeddings is {most:,}",
        )
    ]


def summarize_run(
    program: Program,
    first: MetricsLine,
    last: MetricsLine,
    *,
    recent_losses: Sequence[float],
    seconds: float,
) -> list[tuple[str, str]]:
    """The summary, with the next command to type."""
    directory = program.config.run.directory
    num_steps, num_tokens = (
        last.step - first.step + 1,
        last.num_tokens_total - first.num_tokens_total + first.num_tokens,
    )
    at_first = "none" if first.loss is None else f"{first.loss:.4f}"
    at_last = f"{sum(recent_losses) / len(recent_losses):.4f}" if recent_losses else "none"
    return [
        (
            "trained",
            f"{format_count(num_steps, 'step')}, {format_count(num_tokens, 'token')} in {durations.describe(seconds)}",
        ),
        (
            "loss",
            f"{at_first} at step {first.step}, {at_last} in the mean of the last {format_count(len(recent_losses), 'step')}",
        ),
        ("speed", f"{num_tokens / seconds:,.0f} tokens/s"),
        ("wrote", f"{directory}/metrics.jsonl, {directory}/checkpoints/{last.step}"),
        ("next", f"python -m jaxsp.export {directory} {directory}/hf"),
    ]


def format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Pairs as lines."""
    return "".join(f"{word:<10} {meaning}\n" for word, meaning in pairs)


def print_pairs(console: rich.console.Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Prints pairs, the words dimmed, long lines folded under their beginning."""
    if not console.is_terminal:  # a log: nothing folded, so that commands can be copied
        console.print(format_pairs(pairs), end="", soft_wrap=True, highlight=False, markup=False)
        return
    grid = rich.table.Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, meaning in pairs:
        grid.add_row(word, rich.text.Text(meaning))
    console.print(grid)


class Progress:
    """Progress of a run: a bar on a terminal, otherwise a line every now and then, with the time."""

    SECONDS_BETWEEN_LINES = 10.0
    WIDE_COLUMNS = 120
    """Columns of a terminal from which the bar is 40 columns long, otherwise 10."""

    def __init__(self, console: rich.console.Console, *, first_step: int, num_steps: int):
        self._console, self._first_step, self._num_steps = console, first_step, num_steps
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
        """When the first step was finished; it and what precedes it take longer than later steps."""

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show_step(self, line: MetricsLine) -> None:
        """Shows a finished step."""
        now = time.perf_counter()
        elapsed_s = now - self._began
        num_done, num_left = line.step - self._first_step, self._num_steps - line.step
        left = []
        if self._first_step_end is None:
            self._first_step_end = now
        else:
            left_s = (now - self._first_step_end) / (num_done - 1) * num_left
            left = [f"left {durations.describe(left_s)}"]
        speed = f"{line.tokens_per_s:,.0f} tokens/s"
        numbers = [f"loss {_format_number(line.loss, '.4f')}", f"lr {line.learning_rate:.3g}"]
        memory = [] if line.device_peak_gib is None else [f"peak {line.device_peak_gib:.1f} GiB"]
        bar_numbers = "  ".join([*numbers, speed, *memory, *left])
        self._bar.update(self._task, completed=line.step, numbers=bar_numbers)
        is_due = now - self._printed > self.SECONDS_BETWEEN_LINES or num_done == 1 or num_left == 0
        if not self._console.is_terminal and is_due:
            self._printed = now
            numbers.append(f"grad norm {_format_number(line.grad_norm, '.3g')}")
            times = [f"elapsed {durations.describe(elapsed_s)}", *left]
            self.print_line(
                "  ".join([f"step {line.step}/{self._num_steps}", *numbers, speed, *times])
            )

    def print_line(self, words: str) -> None:
        """Prints a line: above the bar on a terminal, otherwise after the time of day.

        A line is lost if it goes to a disk that is full.
        """
        time_of_day = "" if self._console.is_terminal else time.strftime("%H:%M:%S  ")
        with distributed.ignore_broken_pipe():
            self._console.print(time_of_day + words, highlight=False, soft_wrap=True)


def _format_number(value: float | None, form: str) -> str:
    return "none" if value is None else f"{value:{form}}"


def format_result(result: EvalResult) -> str:
    """An evaluation in one line."""
    loss_now = "not finite" if result.loss is None else f"{result.loss:.4f}"
    perplexity = "" if result.perplexity is None else f", perplexity {result.perplexity:.4g}"
    return (
        f"step {result.step}  {result.data}: loss {loss_now}{perplexity}, token accuracy {result.token_accuracy:.4f} "
        f"over {format_count(result.num_loss_tokens, 'loss token')} ({durations.describe(round(result.seconds, 1))})"
    )


def _describe_row_devices(seq: int) -> str:
    return f"shared by {seq} devices" if seq > 1 else "on one device"
