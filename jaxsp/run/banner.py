"""Banner: what a run will do, printed before its first step.

The modules describe themselves; here is the order.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxsp.attention.choice import describe_choice
from jaxsp.blocks import rope
from jaxsp.core.units import format_count
from jaxsp.data.packing import summary
from jaxsp.evaluation import retrieval
from jaxsp.hf.rope import context_range
from jaxsp.memory import memory_descriptions
from jaxsp.optimizers import optimizer
from jaxsp.run.inputs import RunInputs
from jaxsp.runtime import device_mesh, run_dir, run_paths
from jaxsp.sharding import sharding
from jaxsp.training import step_descriptions
from jaxsp.training.specs import StepSpec


class BannerEntry(NamedTuple):
    """One entry of the banner. Entries without text are left out."""

    label: str
    text: str
    """Everything, for banner.txt and --verbose."""
    short: str | None = None
    """Text for a terminal without --verbose. None: the same text; empty: no entry."""


def describe_run(spec: StepSpec, inputs: RunInputs) -> list[BannerEntry]:
    """Returns the banner, first the lines that users check before they wait for a run."""
    config = inputs.config
    run = config.run
    num_shards = device_mesh.num_shards(spec.mesh)
    has_xla_options = run.deterministic or bool(run.xla_options)
    xla = spec.compile_options.description
    choice = spec.attention
    attention_text = describe_choice(choice, spec.model)
    attention_short, _, rest = attention_text.partition("; ")
    if rest and choice.fallback_reason:
        attention_short += f" ({choice.kernel.name} because {choice.fallback_reason})"
    return [
        BannerEntry("training", inputs.describe_steps(spec)),
        BannerEntry(
            "batch",
            step_descriptions.describe_batch(spec)
            + _describe_origin("batch.rows_per_microbatch", inputs),
        ),
        BannerEntry(
            "optimizer",
            *optimizer.describe(
                config.optimizer, spec.table, num_steps=spec.num_steps, num_shards=num_shards
            ),
        ),
        BannerEntry(
            "model",
            f"{inputs.hf_config['model_type']}, {step_descriptions.describe_weights(spec)}",
        ),
        BannerEntry("objective", step_descriptions.describe_objective(spec)),
        BannerEntry("layers", step_descriptions.describe_layers(spec)),
        BannerEntry("rope", rope.describe(spec.model, is_changed=config.model.rope is not None)),
        BannerEntry("start", inputs.weights_origin),
        BannerEntry("changed", ", ".join(inputs.start.config_changes)),
        *itertools.starmap(
            BannerEntry, summary.describe_data(inputs.train_set, config.data, inputs.schedule)
        ),
        BannerEntry("stop", inputs.stop_tokens),
        BannerEntry("note", inputs.missing_parts),
        BannerEntry(
            "note",
            context_range.describe_excess(
                inputs.hf_config,
                row_tokens=config.data.row_tokens,
                longest_document=int(inputs.train_set.documents.lengths.max()),
            ),
        ),
        BannerEntry("evaluation", _describe_evaluation(inputs)),
        BannerEntry("devices", device_mesh.describe_devices(spec.mesh)),
        BannerEntry("mesh", device_mesh.describe(spec.mesh) + _describe_origin("mesh.seq", inputs)),
        BannerEntry("weights", sharding.describe(spec.table, num_shards), short=""),
        BannerEntry("attention", attention_text, attention_short),
        BannerEntry("memory", memory_descriptions.describe(spec), short=""),
        # to all if the config has some
        BannerEntry("XLA", xla, short=xla if has_xla_options else ""),
        BannerEntry(
            "output",
            *run_dir.describe(
                config, has_eval_sets=bool(inputs.eval_sets), first_step=inputs.start.step
            ),
        ),
    ]


def select_pairs(entries: Iterable[BannerEntry], *, is_verbose: bool) -> list[tuple[str, str]]:
    """Pairs of a label and a text: of the whole banner, or of the short one."""
    pairs = []
    for entry in entries:
        text = entry.text if is_verbose or entry.short is None else entry.short
        if text:
            pairs.append((entry.label, text))
    return pairs


def _describe_origin(field: str, inputs: RunInputs) -> str:
    """The end of a line with the choice for a field; empty if the config has a number."""
    return f" ({field}: auto)" if field in inputs.automatic_fields else ""


def _describe_evaluation(inputs: RunInputs) -> str:
    """Describes what is evaluated, and when; empty without eval sets and tasks."""
    run = inputs.config.run
    tasks = retrieval.describe(inputs.task_samples)
    if not (inputs.eval_sets or tasks):
        return ""
    is_resume = inputs.start.is_resume_in(run_paths.local_dir(run))
    times = []
    if run.eval_at_start and not is_resume:
        times.append("before the first step")
    if run.eval_every == "epoch":
        times.append("after every epoch")
    elif run.eval_every is not None:
        times.append(f"every {format_count(run.eval_every, 'step')}")
    text = " and ".join(filter(None, (", ".join(times), "after the last step")))
    names = [f"{data.name} ({summary.describe_documents(data)})" for data in inputs.eval_sets]
    text += f": {', '.join(filter(None, (*names, tasks)))}"
    if run.early_stopping_patience is not None:
        patience = format_count(run.early_stopping_patience, "evaluation")
        text += f"; the run stops after {patience} without improvement"
    return text
