"""Banner: what a run will do, printed before its first step.

Each module describes its own part; this file sets the order.
"""

import functools
import itertools
from typing import NamedTuple

from jaxsp.attention.selection import describe_choice
from jaxsp.blocks import rope
from jaxsp.checkpoint import run_paths
from jaxsp.core import durations
from jaxsp.core.units import format_count
from jaxsp.data.packing import summary
from jaxsp.evaluation import retrieval
from jaxsp.hf import context_range, folder, multimodal
from jaxsp.objectives.distill import find_teacher
from jaxsp.optimizers import optimizer
from jaxsp.planning import fit
from jaxsp.run.run import Run
from jaxsp.sharding import sharding
from jaxsp.system import device_mesh
from jaxsp.training import step_descriptions


class BannerEntry(NamedTuple):
    """One entry of the banner. Entries without text are left out."""

    label: str
    text: str
    """Everything, for banner.txt and --verbose."""
    short: str | None = None
    """Text for a terminal without --verbose. None: the same text; empty: no entry."""


def describe_run(run: Run) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the labels and texts of the whole banner, and of the short one. Both begin with the
    lines that users check before they wait for a run."""
    spec = run.spec
    config = run.config
    fields = run.hf_config
    start = run.start
    auto = {field: f" ({field}: auto)" for field in run.automatic_fields}
    num_shards = device_mesh.num_shards(spec.mesh)
    num_tokens = config.batch.rows_per_step * config.data.row_tokens
    steps = format_count(spec.num_steps, "step")
    if start.step:
        steps += f" ({len(run.schedule):,} remaining)"
    steps += f" of {format_count(num_tokens, 'token')}"
    if epochs := summary.describe_epochs(run.train_set, run.schedule, config.run.epochs):
        steps += f"; {epochs}"
    batch = step_descriptions.describe_batch(spec) + auto.get("batch.rows_per_microbatch", "")
    optimizers = optimizer.describe(
        config.optimizer, spec.table, num_steps=spec.num_steps, num_shards=num_shards
    )
    reference = config.model.source or "the random model of step 0"
    stops = run.stop_tokens.description
    if stops:
        stops += f"; the export has eos_token_id {fields['eos_token_id']}"
    describe_excess = functools.partial(
        context_range.describe_excess,
        row_tokens=config.data.row_tokens,
        longest_document=int(run.train_set.documents.lengths.max()),
    )
    notes = [describe_excess(fields)]
    if (teacher := find_teacher(config.objective)) is not None:
        excess = describe_excess(folder.find(teacher).config_fields).partition(" Extend")[0]
        notes.append(f"the teacher: {excess}" if excess else "")
    choice = spec.attention
    attention = describe_choice(choice, spec.model)
    attention_short, _, rest = attention.partition("; ")
    if rest and choice.fallback_reason:
        attention_short += f" ({choice.kernel.name} because {choice.fallback_reason})"
    xla = spec.compile_options.description
    has_xla_options = config.run.deterministic or bool(config.run.xla_options)
    if start.checkpoint is not None:
        origin = f"step {start.step} of {start.checkpoint}"
    else:
        origin = f"random weights, seed {config.run.seed}"
        if run.weights.reader is not None:
            origin = f"weights of {config.model.source}"
            if run.weights.reader.left_out:
                origin += f": {run.weights.reader.left_out}"
        if config.adapter.source is not None:
            origin += f"; adapters of {config.adapter.source}"
        if (run.directory / run_paths.CONFIG_FILE).is_file():
            origin += "; the run in this directory has no checkpoint and starts again"
    devices, mesh = device_mesh.describe(spec.mesh)
    entries = [
        BannerEntry("training", f"{steps}; learning rate {config.optimizer.learning_rate:g}"),
        BannerEntry("batch", batch),
        BannerEntry("optimizer", *optimizers),
        BannerEntry("model", f"{fields['model_type']}, {step_descriptions.describe_weights(spec)}"),
        BannerEntry("objective", step_descriptions.describe_objective(spec, reference)),
        BannerEntry("layers", step_descriptions.describe_layers(spec)),
        BannerEntry("rope", rope.describe(spec.model, is_changed=config.model.rope is not None)),
        BannerEntry("start", origin),
        BannerEntry("changed", ", ".join(start.config_changes)),
        *itertools.starmap(
            BannerEntry, summary.describe_data(run.train_set, config.data, run.schedule)
        ),
        BannerEntry("stop", stops),
        BannerEntry("note", multimodal.describe_missing(fields, run.small_files)),
        BannerEntry("note", "; ".join(filter(None, notes))),
        BannerEntry("evaluation", _describe_evaluation(run)),
        BannerEntry("devices", devices),
        BannerEntry("mesh", mesh + auto.get("mesh.seq", "")),
        BannerEntry("weights", sharding.describe(spec.state_table, num_shards), short=""),
        BannerEntry("attention", attention, attention_short),
        BannerEntry("memory", fit.describe(spec), short=""),
        # to all if the config has some
        BannerEntry("XLA", xla, short=xla if has_xla_options else ""),
        BannerEntry("output", *_describe_output(run)),
    ]
    whole = [(x.label, x.text) for x in entries]
    short = [(x.label, x.text if x.short is None else x.short) for x in entries]
    return [pair for pair in whole if pair[1]], [pair for pair in short if pair[1]]


def _describe_evaluation(run: Run) -> str:
    """Describes what is evaluated, and when; empty without eval sets and tasks."""
    config = run.config.run
    tasks = retrieval.describe(run.task_samples)
    if not (run.eval_sets or tasks):
        return ""
    times = []
    if config.eval_at_start and not run.is_resume:
        times.append("before the first step")
    if config.eval_every == "epoch":
        times.append("after every epoch")
    elif config.eval_every is not None:
        times.append(f"every {format_count(config.eval_every, 'step')}")
    names = [f"{data.name} ({summary.describe_documents(data)})" for data in run.eval_sets]
    text = " and ".join(filter(None, (", ".join(times), "after the last step")))
    text += f": {', '.join(filter(None, (*names, tasks)))}"
    if config.early_stopping_patience is not None:
        patience = format_count(config.early_stopping_patience, "evaluation")
        text += f"; the run stops after {patience} without improvement"
    return text


def _describe_output(run: Run) -> tuple[str, str]:
    """Describes what is written: all names, and the directory with the times of checkpoints."""
    config = run.config.run
    logging = run.config.logging
    profiled = logging.profile_steps
    names = ["config.yaml", "banner.txt", "starts.jsonl", "metrics.jsonl"]
    names += ["eval.jsonl"] if run.eval_sets else []
    names += ["tasks.jsonl"] if run.config.eval.tasks else []
    names += ["samples.jsonl"] if config.generate_samples else []
    names += ["profile/"] if profiled is not None and profiled[0] > run.start.step else []
    names += [f"{tracker.folder}/" for tracker in logging.trackers if tracker.folder]
    times = "at the end"
    every = config.save_every
    if every == "epoch":
        times = "after every epoch"
    elif isinstance(every, int):
        times = f"every {format_count(every, 'step')} and at the end"
    elif every is not None:
        times = f"every {durations.to_text(every)} and at the end"
    names += ["model/", f"checkpoints/ ({times})"]
    directory = config.directory
    short = f"{directory}, with a checkpoint {times}; details: {directory}/banner.txt"
    return f"{directory}: {', '.join(names)}", short
