"""Banner: what a run will do, printed before its first step.

Each module describes its own part; this file sets the order.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxsp.attention.choice import describe_choice
from jaxsp.blocks import rope
from jaxsp.checkpoint import run_paths
from jaxsp.core.units import format_count
from jaxsp.data.packing import summary
from jaxsp.evaluation import retrieval
from jaxsp.hf import context_range, multimodal
from jaxsp.optimizers import optimizer
from jaxsp.planning import descriptions
from jaxsp.run import run_directory
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


def describe_run(run: Run) -> list[BannerEntry]:
    """Returns the banner, first the lines that users check before they wait for a run."""
    spec = run.spec
    config = run.config
    num_shards = device_mesh.num_shards(spec.mesh)
    has_xla_options = config.run.deterministic or bool(config.run.xla_options)
    xla = spec.compile_options.description
    choice = spec.attention
    attention_text = describe_choice(choice, spec.model)
    attention_short, _, rest = attention_text.partition("; ")
    if rest and choice.fallback_reason:
        attention_short += f" ({choice.kernel.name} because {choice.fallback_reason})"
    stop_text = run.stop_tokens.description
    if stop_text:
        stop_text += f"; the export has eos_token_id {run.hf_config['eos_token_id']}"
    excess = context_range.describe_excess(
        run.hf_config,
        row_tokens=config.data.row_tokens,
        longest_document=int(run.train_set.documents.lengths.max()),
    )
    reference = config.model.source or "the random model of step 0"
    output = run_directory.describe(
        config, has_eval_sets=bool(run.eval_sets), first_step=run.start.step
    )
    return [
        BannerEntry("training", _describe_steps(run)),
        BannerEntry(
            "batch",
            step_descriptions.describe_batch(spec) + _auto("batch.rows_per_microbatch", run),
        ),
        BannerEntry(
            "optimizer",
            *optimizer.describe(
                config.optimizer, spec.table, num_steps=spec.num_steps, num_shards=num_shards
            ),
        ),
        BannerEntry(
            "model",
            f"{run.hf_config['model_type']}, {step_descriptions.describe_weights(spec)}",
        ),
        BannerEntry("objective", step_descriptions.describe_objective(spec, reference)),
        BannerEntry("layers", step_descriptions.describe_layers(spec)),
        BannerEntry("rope", rope.describe(spec.model, is_changed=config.model.rope is not None)),
        BannerEntry("start", _describe_weights(run)),
        BannerEntry("changed", ", ".join(run.start.config_changes)),
        *itertools.starmap(
            BannerEntry, summary.describe_data(run.train_set, config.data, run.schedule)
        ),
        BannerEntry("stop", stop_text),
        BannerEntry("note", multimodal.describe_missing(run.hf_config, run.small_files)),
        BannerEntry("note", excess),
        BannerEntry("evaluation", _describe_evaluation(run)),
        BannerEntry("devices", device_mesh.describe_devices(spec.mesh)),
        BannerEntry("mesh", device_mesh.describe(spec.mesh) + _auto("mesh.seq", run)),
        BannerEntry("weights", sharding.describe(spec.table, num_shards), short=""),
        BannerEntry("attention", attention_text, attention_short),
        BannerEntry("memory", descriptions.describe(spec), short=""),
        # to all if the config has some
        BannerEntry("XLA", xla, short=xla if has_xla_options else ""),
        BannerEntry("output", *output),
    ]


def select_pairs(entries: Iterable[BannerEntry], *, is_verbose: bool) -> list[tuple[str, str]]:
    """Pairs of a label and a text: of the whole banner, or of the short one."""
    pairs = []
    for entry in entries:
        text = entry.text if is_verbose or entry.short is None else entry.short
        if text:
            pairs.append((entry.label, text))
    return pairs


def _auto(field: str, run: Run) -> str:
    """The end of a line with the choice for a field; empty if the config has a number."""
    return f" ({field}: auto)" if field in run.automatic_fields else ""


def _describe_steps(run: Run) -> str:
    """Describes the length of the run, with the learning rate: what a user checks first."""
    config = run.config
    num_tokens = config.batch.rows_per_step * config.data.row_tokens
    text = format_count(run.spec.num_steps, "step")
    if run.start.step:
        text += f" ({len(run.schedule):,} remaining)"
    text += f" of {format_count(num_tokens, 'token')}"
    if epochs := summary.describe_epochs(run.train_set, run.schedule, config.run.epochs):
        text += f"; {epochs}"
    return f"{text}; learning rate {config.optimizer.learning_rate:g}"


def _describe_weights(run: Run) -> str:
    """Describes where the weights of the first step come from."""
    config = run.config
    if run.start.checkpoint is not None:
        return f"step {run.start.step} of {run.start.checkpoint}"
    if run.weights.reader is None:
        origin = f"random weights, seed {config.run.seed}"
    else:
        origin = f"weights of {config.model.source}"
        if run.weights.left_out:
            origin += f": {run.weights.left_out}"
    if config.adapter.source is not None:
        origin += f"; adapters of {config.adapter.source}"
    if (run.directory / run_paths.CONFIG_FILE).is_file():
        origin += "; the run in this directory has no checkpoint and starts again"
    return origin


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
    text = " and ".join(filter(None, (", ".join(times), "after the last step")))
    names = [f"{data.name} ({summary.describe_documents(data)})" for data in run.eval_sets]
    text += f": {', '.join(filter(None, (*names, tasks)))}"
    if config.early_stopping_patience is not None:
        patience = format_count(config.early_stopping_patience, "evaluation")
        text += f"; the run stops after {patience} without improvement"
    return text
