"""Banner: what a run will do, printed before its first step.

Each module describes its own part; this file sets the order.
"""

import functools

from jaxsp.attention.selection import describe_choice
from jaxsp.blocks import rope
from jaxsp.checkpoint import run_paths
from jaxsp.core import units
from jaxsp.core.units import format_count
from jaxsp.data import dataset
from jaxsp.evaluation import retrieval
from jaxsp.hf import context_range, folder, multimodal
from jaxsp.objectives.distill import find_teacher
from jaxsp.optimizers import optimizer
from jaxsp.planning import fit
from jaxsp.run.build import Run
from jaxsp.sharding import sharding
from jaxsp.system import device_mesh
from jaxsp.training import step_descriptions


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
    if epochs := dataset.describe_epochs(run.train_set, run.schedule, config.run.epochs):
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
    # label, whole text, and short text if it differs
    entries: list[tuple[str, ...]] = [
        ("training", f"{steps}; learning rate {config.optimizer.learning_rate:g}"),
        ("batch", batch),
        ("optimizer", *optimizers),
        ("model", f"{fields['model_type']}, {step_descriptions.describe_weights(spec)}"),
        ("objective", step_descriptions.describe_objective(spec, reference)),
        ("layers", step_descriptions.describe_layers(spec)),
        ("rope", rope.describe(spec.model, is_changed=config.model.rope is not None)),
        ("start", origin),
        ("changed", ", ".join(start.config_changes)),
        *dataset.describe_data(run.train_set, config.data, run.schedule),
        ("stop", stops),
        ("note", multimodal.describe_missing(fields, run.small_files)),
        ("note", "; ".join(filter(None, notes))),
        ("evaluation", _describe_evaluation(run)),
        ("devices", devices),
        ("mesh", mesh + auto.get("mesh.seq", "")),
        ("weights", sharding.describe(spec.state_table, num_shards), ""),
        ("attention", attention, attention_short),
        ("memory", fit.describe(spec), ""),
        # to all if the config has some
        ("XLA", xla, xla if has_xla_options else ""),
        ("output", *_describe_output(run)),
    ]
    whole = [(label, text) for label, text, *_ in entries if text]
    return whole, [(entry[0], entry[-1]) for entry in entries if entry[-1]]


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
    names = [f"{data.name} ({dataset.describe_documents(data)})" for data in run.eval_sets]
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
        times = f"every {units.format_duration(every)} and at the end"
    names += ["model/", f"checkpoints/ ({times})"]
    directory = config.directory
    short = f"{directory}, with a checkpoint {times}; details: {directory}/banner.txt"
    return f"{directory}: {', '.join(names)}", short
