"""Builds a run from a config: everything is checked and read before anything is computed."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxsp.attention import AttentionChoice
from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_count
from jaxsp.data.chat import chat_template
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule
from jaxsp.evaluation import long_ppl
from jaxsp.evaluation.retrieval import Samples
from jaxsp.hf import model_config, other_parts
from jaxsp.hf.folder import ModelFolder
from jaxsp.memory import memory_problems, microbatch_rows, row_meshes
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.runtime import run_paths
from jaxsp.setup import (
    data_sets,
    initial_weights,
    model_files,
    resume,
    stop_tokens,
    task_samples,
)
from jaxsp.setup.initial_weights import InitialWeights
from jaxsp.setup.stop_tokens import StopTokens
from jaxsp.training.inputs import RunInputs, StartPoint
from jaxsp.training.specs import RunSpec

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Model, mesh and data of a config."""

    run_spec: RunSpec
    hf_config: dict[str, Any]
    model_folder: ModelFolder | None
    adapter_folder: ModelFolder | None
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    stop_tokens: StopTokens
    train: PackedDataset | None
    """None unless it was resolved for training."""
    evals: tuple[PackedDataset, ...]
    task_samples: Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """Checkpoint that a run resumes from."""

    path: pathlib.Path
    meta: CheckpointMeta
    model_dir: pathlib.Path | None
    """The run's own copy of the model's small files; None if the config names another model."""


def build_training(
    config: Config, *, devices: list[jax.Device], skip: Sequence[pathlib.Path] = ()
) -> tuple[RunSpec, RunInputs]:
    """Builds the steps and the inputs of a run; writes nothing except caches.

    Args: skip: damaged checkpoints, which the run must not resume from.
    Raises:
        DamagedCheckpointError: the checkpoint to resume from is damaged.
        UserError: all problems at once; those of the data's contents only if the rest is right.
    """
    problems = ProblemCollector()
    checkpoint = _find_checkpoint(config, skip, problems)
    model_dir = checkpoint.model_dir if checkpoint else None
    # Raises the problems collected so far together with its own
    resolved = resolve_config(
        _with_saved_adapter(config, checkpoint),
        devices=devices,
        problems=problems,
        hf_config=checkpoint.meta.model if checkpoint and model_dir else None,
        run_model_dir=model_dir,
    )
    automatic_fields = _list_automatic_fields(config)
    config = resolved.run_spec.config
    train_set = resolved.train
    assert train_set is not None, "resolved for training"
    start = _find_start(checkpoint, resolved)
    schedule = _make_schedule(config, train_set, start)
    run_spec = resolved.run_spec.replace(num_steps=start.step + len(schedule))
    reference = initial_weights.Reference(run_spec.longest)
    weights = _open_weights(resolved, is_resume=checkpoint is not None)
    inputs = RunInputs(
        train_set=train_set,
        eval_sets=resolved.evals,
        task_samples=resolved.task_samples,
        tokenizer=resolved.tokenizer,
        stop_ids=_list_stop_ids(resolved, model_dir),
        start=start,
        schedule=schedule,
        hf_config=resolved.hf_config,
        weights_origin=_describe_origin(run_spec, weights, checkpoint),
        automatic_fields=automatic_fields,
        make_weights=weights.make,
        make_frozen_weights=weights.make_frozen,
        make_reference_weights=reference.make,
        reference_identity=reference.identify,
        stop_tokens=_describe_stop(resolved),
        missing_parts=_describe_missing_parts(resolved, model_dir),
        write_model=functools.partial(_save_model_files, resolved, model_dir),
    )
    return run_spec, inputs


def _find_start(checkpoint: RunCheckpoint | None, resolved: ResolvedConfig) -> StartPoint:
    """Point to start from: that of a checkpoint, or the beginning."""
    if checkpoint is None:
        return StartPoint()
    assert resolved.train is not None, "resolved for training"
    return resume.make_start_point(
        checkpoint.meta,
        checkpoint.path,
        resolved.run_spec.config,
        model=resolved.run_spec.longest.model,
        data=resolved.train,
    )


def _open_weights(resolved: ResolvedConfig, *, is_resume: bool) -> InitialWeights:
    """Weights of step 0. A checkpoint has all except the frozen ones, which come from the model."""
    spec = resolved.run_spec.longest
    needs_model = not is_resume or resolved.run_spec.config.has_frozen_weights
    return initial_weights.open_sources(
        spec,
        resolved.model_folder if needs_model else None,
        None if is_resume else resolved.adapter_folder,
    )


def _list_automatic_fields(config: Config) -> frozenset[str]:
    """The fields that are `auto`, of those that are replaced before anything is compiled."""
    values = {
        "mesh.seq": config.mesh.seq,
        "batch.rows_per_microbatch": config.batch.rows_per_microbatch,
    }
    return frozenset(field for field, value in values.items() if value == "auto")


def _find_checkpoint(
    config: Config, skip: Sequence[pathlib.Path], problems: ProblemCollector
) -> RunCheckpoint | None:
    """Checkpoint to resume from; None for a new run. All processes must call it together."""
    path = None
    with problems.collect():
        path = resume.find_checkpoint(config.run, skip=skip)
    resume.check_same_checkpoint(config.run, path, problems)
    if path is None:
        return None
    meta = reader.raise_on_all_processes(path, functools.partial(reader.read_meta, path))
    model_dir = None
    if config_file.parse(meta.config).model == config.model:
        # the run's own copy is enough: the model's source may be gone or out of reach
        model_dir = resume.find_model_dir(path)
    return RunCheckpoint(path=path, meta=meta, model_dir=model_dir)


def _with_saved_adapter(config: Config, checkpoint: RunCheckpoint | None) -> Config:
    """The config with the adapter of a checkpoint, whose source may be gone, if it is the same."""
    if checkpoint is None:
        return config
    saved = config_file.parse(checkpoint.meta.config).adapter
    given = config.adapter.model_dump(exclude_unset=True)
    if saved.model_copy(update=given) != saved:
        return config
    return config.model_copy(update={"adapter": saved})


def _make_schedule(config: Config, train_set: PackedDataset, start: StartPoint) -> RowSchedule:
    """Rows of the remaining steps. Raises: UserError if profile_steps are not in the run."""
    run = config.run
    num_steps = None if run.steps is None else max(run.steps - start.step, 0)
    schedule = train_set.make_schedule(
        config, consumed=start.rows_consumed, num_steps=num_steps, epochs=run.epochs
    )
    last_step = start.step + len(schedule)
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[1] > last_step:
        raise UserError(
            f"logging.profile_steps = {list(profiled)}: the run has only {last_step} steps. "
            "Use earlier ones, or null to profile none."
        )
    return schedule


def _describe_origin(
    run_spec: RunSpec, weights: InitialWeights, checkpoint: RunCheckpoint | None
) -> str:
    """Describes where the weights of the first step come from."""
    config = run_spec.config
    if checkpoint is not None:
        return f"step {checkpoint.meta.step} of {checkpoint.path}"
    if weights.reader is None:
        origin = f"random weights, seed {config.run.seed}"
    else:
        origin = f"weights of {config.model.source}"
        if weights.left_out:
            origin += f": {weights.left_out}"
    if config.adapter.source is not None:
        origin += f"; adapters of {config.adapter.source}"
    if (run_paths.local_dir(config.run) / run_paths.CONFIG_FILE).is_file():
        origin += "; the run in this directory has no checkpoint and starts again"
    return origin


def _describe_stop(resolved: ResolvedConfig) -> str:
    """Describes the tokens that end the turns of chats; empty without chats."""
    description = resolved.stop_tokens.description
    if not description:
        return ""
    return f"{description}; the export has eos_token_id {resolved.hf_config['eos_token_id']}"


def _list_stop_ids(resolved: ResolvedConfig, model_dir: pathlib.Path | None) -> list[int]:
    """Tokens at which generation stops. Args: model_dir: of a resumed run."""
    if model_dir is None and resolved.model_folder is not None:
        model_dir = resolved.model_folder.path
    return stop_tokens.list_stop_ids(resolved.hf_config, model_dir, resolved.tokenizer)


def _describe_missing_parts(resolved: ResolvedConfig, model_dir: pathlib.Path | None) -> str:
    """Describes the parts that an export of the run needs. Args: model_dir: of a resumed run."""
    if model_dir is None and resolved.model_folder is not None:
        model_dir = resolved.model_folder.path
    return other_parts.describe_missing(resolved.hf_config, model_dir)


def resolve_config(
    config: Config,
    *,
    devices: list[jax.Device],
    problems: ProblemCollector,
    for_training: bool = True,
    hf_config: dict[str, Any] | None = None,
    run_model_dir: pathlib.Path | None = None,
) -> ResolvedConfig:
    """Resolves the model, the mesh and the data sets of a config.

    Args:
        problems: problems found before.
        for_training: also read data.train, and require steps that divide into microbatches.
        hf_config: fields of the model's config.json from a checkpoint, instead of model.source.
        run_model_dir: the run's copy of the model's small files; its tokenizer is used first.
    Raises: UserError with all problems at once; those of the data's contents only if the rest is
        right.
    """
    with problems.collect():
        config = _inline_chat_template(config)
    with problems.collect():
        long_ppl.check(config)
    files = model_files.read_model(config, hf_config, problems)
    opened = data_sets.open_sources(config, for_training=for_training, problems=problems)
    tokenizer = model_files.load_checked_tokenizer(config, files, opened, run_model_dir, problems)
    config, choices = _resolve_mesh(
        config, files.config, devices, problems, for_training=for_training
    )
    problems.raise_if_any()
    # what is missing has reported a problem
    assert files.config is not None
    assert files.adapter is not None
    config = config.model_copy(update={"adapter": files.adapter.config})
    assert files.hf_config is not None
    assert choices is not None
    train, evals = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=files.config.vocab_size, for_training=for_training
    )
    run_spec = row_meshes.make_run_spec(
        config, files.config, choices, devices=devices, num_steps=config.run.steps or 1
    )
    has_split_pairs = train is not None and train.num_split_pairs > 0
    if train is not None:
        _check_split_pairs(train, config)
    run_spec = run_spec.replace(has_split_pairs=has_split_pairs)
    stops = stop_tokens.find(opened, config, tokenizer)
    return ResolvedConfig(
        run_spec=run_spec,
        hf_config=stops.add_to(model_config.add_token_ids(files.hf_config, tokenizer)),
        model_folder=files.folder,
        adapter_folder=files.adapter.folder,
        tokenizer=tokenizer,
        stop_tokens=stops,
        train=train,
        evals=evals,
        task_samples=task_samples.make(config, tokenizer),
    )


def _check_split_pairs(train: PackedDataset, config: Config) -> None:
    """Checks that a step has both rows of a pair. Raises: UserError if it might not."""
    rows_per_step = config.batch.rows_per_step
    if train.num_split_pairs and rows_per_step % 2:
        raise UserError(
            f"batch.rows_per_step = {rows_per_step}: must be even, because "
            f"{format_count(train.num_split_pairs, 'pair')} of documents "
            f"{'is' if train.num_split_pairs == 1 else 'are'} in two rows each, which must be in "
            f"one step. Use {rows_per_step + 1}, or a data.row_tokens that holds both documents."
        )


def _resolve_mesh(
    config: Config,
    model: ModelConfig | None,
    devices: list[jax.Device],
    problems: ProblemCollector,
    *,
    for_training: bool,
) -> tuple[Config, dict[int, AttentionChoice] | None]:
    """Chooses the mesh, the rows of a microbatch and the attention of each row length, and checks
    the step."""
    choices = None
    if model is not None:
        with problems.collect():
            config = row_meshes.resolve_degrees(
                config, model, devices=devices, with_training=for_training
            )
    if config.mesh.seq != "auto":
        config = microbatch_rows.resolve_rows(config, model, devices=devices)
        if model is not None:
            with problems.collect():
                choices = row_meshes.choose_attention(config, model, devices=devices)
        _check_step(config, model, choices, devices, problems, for_training=for_training)
    return config, choices


def _check_step(
    config: Config,
    model: ModelConfig | None,
    choices: Mapping[int, AttentionChoice] | None,
    devices: list[jax.Device],
    problems: ProblemCollector,
    *,
    for_training: bool,
) -> None:
    """Checks meshes, memory options, batch and groups."""
    platform = devices[0].platform
    found = [
        memory_problems.find_problems(row_config, platform=platform, model=model)
        for row_config in config.row_configs.values()
    ]
    problems += dict.fromkeys(itertools.chain(*found))
    problems += row_meshes.find_division_problems(
        config, len(devices), choices, with_training=for_training
    )
    if for_training and model is not None:
        problems += param_groups.find_problems(config.optimizer, decoder.param_table(model))


def _save_model_files(
    resolved: ResolvedConfig, model_dir: pathlib.Path | None, directory: pathlib.Path
) -> None:
    """Writes the model's small files (config, tokenizer) into a run directory."""
    has_own_tokenizer = resolved.run_spec.config.model.tokenizer is None
    model_files.write_small_files(
        directory,
        run_model_dir=model_dir,
        source=resolved.model_folder if has_own_tokenizer else None,
        tokenizer=resolved.tokenizer,
    )
    resolved.stop_tokens.add_to_file(directory, default=resolved.hf_config["eos_token_id"])


def _inline_chat_template(config: Config) -> Config:
    """Replaces the file name of a chat template by its text, so that a run contains all it needs.

    Raises: UserError if the template cannot be read.
    """
    if config.data.chat_template is None:
        return config
    template = chat_template.resolve_template(config.data.chat_template)
    data = config.data.model_copy(update={"chat_template": template})
    return config.model_copy(update={"data": data})
