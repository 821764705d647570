"""Banner: what a run will do, printed before its first step."""

import collections
import itertools
import platform
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax

from jaxsp import attention
from jaxsp.core import axes, durations, units
from jaxsp.data.packing import summary
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.summary import format_count
from jaxsp.hf import context_range
from jaxsp.model import adapters, flops
from jaxsp.reporting.trackers import registry
from jaxsp.reporting.trackers.tracker import TrackedRun
from jaxsp.runtime import device_mesh, run_paths
from jaxsp.training import memory_descriptions, optimizer, sharding
from jaxsp.training.inputs import RunInputs
from jaxsp.training.optimizers import param_groups, schedules
from jaxsp.training.specs import RunSpec, StepSpec


class BannerEntry(NamedTuple):
    """One entry of the banner. Entries without text are left out."""

    label: str
    text: str
    """Everything, for banner.txt and --verbose."""
    short: str | None = None
    """Text for a terminal without --verbose. None: the same text; empty: no entry."""


def describe_run(program: RunSpec, inputs: RunInputs) -> list[BannerEntry]:
    """Returns the banner, first the lines that users check before they wait for a run."""
    spec = program.longest
    return [
        BannerEntry("training", _describe_steps(program, inputs)),
        BannerEntry("batch", _describe_batch(program)),
        _describe_optimizer(spec),
        BannerEntry("model", _describe_model(spec, inputs)),
        BannerEntry("rope", describe_rope(spec)),
        BannerEntry("start", inputs.weights_origin),
        BannerEntry("changed", ", ".join(inputs.start.config_changes)),
        *itertools.starmap(
            BannerEntry,
            summary.describe_data(inputs.train_set, program.config, inputs.schedule),
        ),
        BannerEntry("stop", _describe_stop(inputs)),
        BannerEntry("note", _describe_long_documents(program, inputs)),
        BannerEntry("evaluation", _describe_evaluation(program, inputs)),
        BannerEntry("devices", _describe_devices(spec)),
        *_describe_meshes(program, inputs),
        BannerEntry("weights", _describe_placement(spec), short=""),
        *_describe_attention(program),
        *_describe_memory(program),
        _describe_xla(spec),
        _describe_output(program, inputs),
        BannerEntry("trackers", _describe_trackers(program)),
    ]


def select_pairs(entries: Iterable[BannerEntry], *, is_verbose: bool) -> list[tuple[str, str]]:
    """Pairs of a label and a text: of the whole banner, or of the short one."""
    pairs = []
    for entry in entries:
        text = entry.text if is_verbose or entry.short is None else entry.short
        if text:
            pairs.append((entry.label, text))
    return pairs


def _describe_devices(program: StepSpec) -> str:
    devices = program.mesh.devices.flatten()
    text = f"{len(devices)} x {devices[0].device_kind}"
    if jax.process_count() > 1:
        text += f" in {jax.process_count()} processes"
    return f"{text}, jax {jax.__version__}, Python {platform.python_version()}"


def _describe_meshes(program: RunSpec, inputs: RunInputs) -> list[BannerEntry]:
    """The mesh, or that of each row length, the longest first."""
    origin = " (mesh.seq: auto)" if inputs.is_mesh_automatic else ""
    texts = {
        length: _describe_mesh(spec.mesh) + origin
        for length, spec in reversed(program.steps.items())
    }
    return _describe_by_length("mesh", texts)


def _describe_attention(program: RunSpec) -> list[BannerEntry]:
    """Attention, or that of each row length, the longest first."""
    texts = {}
    shorts = {}
    for length, spec in reversed(program.steps.items()):
        choice = spec.attention
        texts[length] = attention.describe(choice, spec.model)
        shorts[length], _, rest = texts[length].partition("; ")
        if rest and choice.fallback_reason:
            shorts[length] += f" ({choice.kernel.name} because {choice.fallback_reason})"
    return _describe_by_length("attention", texts, shorts)


def _describe_memory(program: RunSpec) -> list[BannerEntry]:
    """Memory options, or those of each row length, the longest first."""
    texts = {
        length: memory_descriptions.describe(spec)
        for length, spec in reversed(program.steps.items())
    }
    return _describe_by_length("memory", texts, dict.fromkeys(texts, ""))


def _describe_by_length(
    label: str, texts: Mapping[int, str], shorts: Mapping[int, str] | None = None
) -> list[BannerEntry]:
    """Entries with the text of each row length, or a single one if all are equal."""
    shorts = shorts or texts
    first = next(iter(texts))
    if len(set(texts.values())) == 1:
        return [BannerEntry(label, texts[first], short=shorts[first])]
    entries = []
    for length, text in texts.items():
        name = f"rows of {length:,} tokens: "
        short = name + shorts[length] if shorts[length] else ""
        entries.append(BannerEntry(label if length == first else "", name + text, short=short))
    return entries


def _describe_xla(program: StepSpec) -> BannerEntry:
    """XLA's options, shown to all if the config has some."""
    run = program.config.run
    is_requested = run.deterministic or bool(run.xla_options)
    text = program.compile_options.description
    return BannerEntry("XLA", text, short=text if is_requested else "")


def _describe_mesh(mesh: jax.sharding.Mesh) -> str:
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    seq = mesh.shape[axes.SEQ]
    if seq == 1:
        return f"{shape}: every device works on whole rows"
    groups = format_count(device_mesh.num_groups(mesh), "sequence-parallel group")
    return f"{shape}: {groups} of {seq} devices; the devices of a group split each of its rows"


def _describe_model(program: StepSpec, inputs: RunInputs) -> str:
    params = jax.tree.leaves(program.table)
    num_own = flops.num_parameters([param for param in params if not param.is_adapter])
    text = f"{inputs.hf_config['model_type']}, {num_own:,} parameters, {program.dtype} compute"
    if not program.has_frozen_weights:
        return f"{text}, float32 master weights"
    num_trained = flops.num_parameters([param for param in params if param.is_trainable])
    formats = dict.fromkeys(param.frozen_as for param in params if param.frozen_as is not None)
    text += f"; {num_trained:,} are trained in float32 ({100 * num_trained / num_own:.2f} %)"
    if program.model.lora is not None:
        text += f": {_describe_adapter(program)}"
    return f"{text}; the model's others are frozen in {' and '.join(formats)}"


def _describe_adapter(program: StepSpec) -> str:
    """Describes the adapters, and the model's own weights that are trained with them."""
    adapter = program.config.adapter
    lora = program.model.lora
    assert lora is not None, "the model has adapters"
    names = [target.rpartition(".")[2] for target in lora.targets]
    targets = f"all {len(names)} projections"
    if len(names) < len(adapters.list_projections(program.model)):
        targets = ", ".join(names)
    kind = "DoRA" if lora.is_dora else "LoRA"
    text = f"{kind} of rank {lora.rank}, scale {lora.scale:g}, on {targets}"
    if adapter.dropout:
        text += f", with dropout {adapter.dropout:g}"
    if adapter.modules_to_save:
        text += f", and all of {' and '.join(adapter.modules_to_save)}"
    return text


def _describe_placement(program: StepSpec) -> str:
    num_shards = device_mesh.num_shards(program.mesh)
    if num_shards == 1:
        return "every device holds all weights"
    params = jax.tree.leaves(program.table)
    small = [param for param in params if sharding.choose_placement(param, num_shards).dim is None]
    if len(small) == len(params):
        return "every device holds all weights, because they are too small to shard"
    text = f"sharded over {num_shards} devices"
    if small:
        num_bytes = sum(sharding.shard_bytes(param, num_shards) for param in small)
        text += f", except {num_bytes / 2**20:.1f} MiB of small ones that every device holds"
    return text


def _describe_batch(program: RunSpec) -> str:
    """Describes the rows of a step, those of the longest row length first."""
    by_length = list(reversed(program.steps.values()))
    rows = [
        f"{format_count(each.config.batch.rows_per_step, 'row')} of "
        f"{each.config.data.max_row_tokens:,} tokens"
        for each in by_length
    ]
    parts = [_describe_microbatches(each) for each in by_length]
    if len(set(parts)) == 1:
        return f"{' or '.join(rows)} per step, in {parts[0]}"
    options = [f"{row} in {part}" for row, part in zip(rows, parts, strict=True)]
    return f"per step {', or '.join(options)}"


def _describe_microbatches(program: StepSpec) -> str:
    """Describes the microbatches of a step of one row length."""
    num_microbatches = program.num_microbatches
    microbatches = "1 microbatch" if num_microbatches == 1 else f"{num_microbatches:,} microbatches"
    per_group = format_count(program.config.batch.rows_per_microbatch, "row")
    owner = "device" if program.mesh.shape[axes.SEQ] == 1 else "group"
    return f"{microbatches} of {per_group} per {owner}"


def _describe_steps(program: RunSpec, inputs: RunInputs) -> str:
    """Describes the length of the run, with the learning rate: what a user checks first."""
    config = program.config
    num_tokens = config.batch.rows_per_step * config.data.max_row_tokens
    text = format_count(program.num_steps, "step")
    if inputs.start.step:
        text += f" ({len(inputs.schedule):,} remaining)"
    text += f" of {format_count(num_tokens, 'token')}"
    steps_per_epoch = summary.num_steps_per_epoch(inputs.train_set, config)
    if steps_per_epoch is not None:
        epochs = f"{program.num_steps / steps_per_epoch:.3g} epochs"
        if config.run.epochs is not None:
            epochs = format_count(config.run.epochs, "epoch")
        text += f"; {epochs} of {format_count(steps_per_epoch, 'step')}"
    return f"{text}; learning rate {config.optimizer.learning_rate:g}"


def _describe_optimizer(program: StepSpec) -> BannerEntry:
    config = program.config.optimizer
    num_warmup_steps = config.num_warmup_steps(program.num_steps)
    short = (
        f"{config.name}, {schedules.describe(config, program.num_steps)}, "
        f"{format_count(num_warmup_steps, 'warmup step')}"
    )
    if num_warmup_steps >= program.num_steps:
        short += " (the run ends during warmup)"
    text = short
    if config.max_grad_norm:
        text += f", gradients clipped to norm {config.max_grad_norm:g}"
    num_shards = device_mesh.num_shards(program.mesh)
    params = jax.tree.leaves(program.table)
    state = sum(optimizer.state_bytes(config, param, num_shards).total for param in params)
    if state:
        text += f", {units.format_bytes(state)} of state per device"
    groups = param_groups.describe(config, program.table)
    return BannerEntry("optimizer", "; ".join([text, *groups]), short="; ".join([short, *groups]))


def _describe_evaluation(program: RunSpec, inputs: RunInputs) -> str:
    if not inputs.eval_sets:
        return ""
    run = program.config.run
    times = []
    if run.eval_at_start and not inputs.start.is_resume_in(run_paths.local_dir(run)):
        times.append("before the first step")
    if run.eval_every == "epoch":
        times.append("after every epoch")
    elif run.eval_every is not None:
        times.append(f"every {format_count(run.eval_every, 'step')}")
    text = " and ".join(filter(None, (", ".join(times), "after the last step")))
    eval_sets = [f"{data.name} ({describe_documents(data)})" for data in inputs.eval_sets]
    text += f": {', '.join(eval_sets)}"
    if run.early_stopping_patience is not None:
        patience = format_count(run.early_stopping_patience, "evaluation")
        text += f"; the run stops after {patience} without improvement"
    return text


def describe_documents(data: PackedDataset) -> str:
    """Describes the size of a data set, and what is left out of it."""
    num_tokens = format_count(int(data.documents.segments.length.sum()), "token")
    text = f"{format_count(len(data.documents.lengths), 'document')}, {num_tokens}"
    exclusions = summary.describe_exclusions(data.documents.sources)
    return f"{text}; {exclusions}" if exclusions else text


def describe_rope(program: StepSpec) -> str:
    """Describes RoPE where the config changes it, or it depends on the length of rows."""
    ropes = collections.Counter(layer.rope.description for layer in program.model.layers)
    has_choice = any(description.startswith("longrope") for description in ropes)
    if program.config.model.rope is None and not has_choice:
        return ""
    if len(ropes) == 1:
        return next(iter(ropes))
    return "; ".join(
        f"{description} in {format_count(count, 'layer')}" for description, count in ropes.items()
    )


def _describe_long_documents(program: RunSpec, inputs: RunInputs) -> str:
    """Reports rows and documents longer than the model's range; all are trained on."""
    return context_range.describe_excess(
        inputs.hf_config,
        row_tokens=program.config.data.max_row_tokens,
        longest_document=int(inputs.train_set.documents.lengths.max()),
    )


def _describe_stop(inputs: RunInputs) -> str:
    if not inputs.stop_tokens:
        return ""
    return f"{inputs.stop_tokens}; the export has eos_token_id {inputs.hf_config['eos_token_id']}"


def _describe_output(program: RunSpec, inputs: RunInputs) -> BannerEntry:
    config = program.config
    names = ["config.yaml", "banner.txt", "starts.jsonl", "metrics.jsonl"]
    if inputs.eval_sets:
        names.append("eval.jsonl")
    if "tensorboard" in config.logging.trackers:
        names.append("tensorboard/")
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[0] > inputs.start.step:
        names.append("profile/")
    times = "at the end"
    if config.run.save_every == "epoch":
        times = "after every epoch"
    elif config.run.save_every is not None:
        interval = format_count(config.run.save_steps or 0, "step")
        if config.run.save_interval is not None:
            interval = durations.to_text(config.run.save_interval)
        times = f"every {interval} and at the end"
    names += ["model/", f"checkpoints/ ({times})"]
    directory = config.run.directory
    return BannerEntry(
        "output",
        f"{directory}: {', '.join(names)}",
        short=f"{directory}, with a checkpoint {times}; details: {directory}/banner.txt",
    )


def _describe_trackers(program: RunSpec) -> str:
    """Describes trackers that are not files of the run; only process 0 has trackers."""
    if jax.process_index() > 0:
        return ""
    run = TrackedRun(program.config, from_step=0, is_resume=False)
    return registry.describe(run, program.config.logging.trackers)
