"""Builds a run from a config: everything is checked and read before anything is computed."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_count
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.mixing import RowSchedule
from jaxsp.evaluation import long_ppl
from jaxsp.hf import token_ids
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.planning import candidates, memory_problems
from jaxsp.run import (
    config_file,
    data_sets,
    initial_weights,
    model_files,
    resume,
    stop_tokens,
    task_samples,
)
from jaxsp.run.config_file import Config
from jaxsp.run.run import PreparedModel, Run, StartPoint
from jaxsp.system import device_mesh
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """Checkpoint that a run resumes from."""

    path: pathlib.Path
    meta: CheckpointMeta
    model_dir: pathlib.Path | None
    """The run's own copy of the model's small files; None if the config names another model."""


def build_training(
    config: Config, *, devices: list[jax.Device], skip: Sequence[pathlib.Path] = ()
) -> Run:
    """Builds a run; writes nothing except caches.

    Args: skip: damaged checkpoints, which the run must not resume from.
    Raises:
        DamagedCheckpointError: the checkpoint to resume from is damaged.
        UserError: all problems at once; those of the data's contents only if the rest is right.
    """
    problems = ProblemCollector()
    checkpoint = _find_checkpoint(config, skip, problems)
    model_dir = checkpoint.model_dir if checkpoint else None
    # Raises the problems collected so far together with its own
    prepared = prepare_model(
        _with_saved_adapter(config, checkpoint),
        devices=devices,
        problems=problems,
        hf_config=checkpoint.meta.model if checkpoint and model_dir else None,
        model_dir=model_dir,
    )
    rows = config.batch.rows_per_microbatch
    choices = {"mesh.seq": config.mesh.seq, "batch.rows_per_microbatch": rows}
    config = prepared.config
    train_set = prepared.train_set
    assert train_set is not None, "prepared for training"
    start = StartPoint()
    if checkpoint is not None:
        start = resume.make_start_point(
            checkpoint.meta,
            checkpoint.path,
            config,
            model=prepared.spec.model,
            data=train_set,
        )
    schedule = _make_schedule(config, train_set, start)
    spec = dataclasses.replace(prepared.spec, num_steps=start.step + len(schedule))
    start = _with_rate_change(start, checkpoint, config, spec.num_steps, train_set)
    # A checkpoint has all weights except the frozen ones, which come from the model
    needs_model = checkpoint is None or config.step.has_frozen_weights
    weights = initial_weights.open_sources(
        spec,
        prepared.model_folder if needs_model else None,
        prepared.adapter_folder if checkpoint is None else None,
    )
    stop_ids = stop_tokens.list_stop_ids(
        prepared.hf_config, prepared.small_files, prepared.tokenizer
    )
    values = vars(prepared) | {"spec": spec, "train_set": train_set}
    return Run(
        **values,
        schedule=schedule,
        start=start,
        weights=weights,
        stop_ids=stop_ids,
        automatic_fields=frozenset(field for field, value in choices.items() if value == "auto"),
    )


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
    # the run's own copy is enough: the model's source may be gone or out of reach
    is_same_model = config_file.parse(meta.config).model == config.model
    model_dir = resume.find_model_dir(path) if is_same_model else None
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
        config.batch.rows_per_step,
        consumed=start.rows_consumed,
        num_steps=num_steps,
        epochs=run.epochs,
    )
    last_step = start.step + len(schedule)
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[1] > last_step:
        raise UserError(
            f"logging.profile_steps = {list(profiled)}: the run has only {last_step} steps. "
            "Use earlier ones, or null to profile none."
        )
    return schedule


def _with_rate_change(
    start: StartPoint,
    checkpoint: RunCheckpoint | None,
    config: Config,
    num_steps: int,
    train_set: PackedDataset,
) -> StartPoint:
    """The start, whose changes name the next step's learning rate if it differs from the
    checkpoint's schedule."""
    if checkpoint is None:
        return start
    saved = config_file.parse(checkpoint.meta.config)
    saved_steps = saved.run.steps
    if saved_steps is None:
        rows = train_set.make_schedule(
            saved.batch.rows_per_step, consumed=start.rows_consumed, epochs=saved.run.epochs
        )
        saved_steps = start.step + len(rows)
    before, now = (
        f"{float(optimizer.make_rate(steps)(jnp.int32(start.step))):.3g}"
        for optimizer, steps in ((saved.optimizer, saved_steps), (config.optimizer, num_steps))
    )
    if before == now:
        return start
    change = f"learning rate of step {start.step + 1:,} {before} -> {now}"
    return dataclasses.replace(start, config_changes=(change, *start.config_changes))


def prepare_model(
    config: Config,
    *,
    devices: list[jax.Device],
    problems: ProblemCollector,
    for_training: bool = True,
    hf_config: dict[str, Any] | None = None,
    model_dir: pathlib.Path | None = None,
) -> PreparedModel:
    """Reads the model and the data sets of a config, and chooses the mesh.

    Args:
        problems: problems found before.
        for_training: also read data.train, and require steps that divide into microbatches.
        hf_config: fields of the model's config.json from a checkpoint, instead of model.source.
        model_dir: the run's copy of the model's small files; its tokenizer is used first.
    Raises: UserError with all problems at once; those of the data's contents only if the rest is
        right.
    """
    with problems.collect():
        config = data_sets.inline_chat_template(config)
    with problems.collect():
        if config.eval.long_ppl:
            long_ppl.check(config.data.row_tokens)
    files = model_files.read_model(config, hf_config, problems)
    opened = data_sets.open_sources(config, for_training=for_training, problems=problems)
    tokenizer = model_files.load_checked_tokenizer(config, files, opened, model_dir, problems)
    spec = _resolve_mesh(config.step, files.config, devices, problems, for_training=for_training)
    problems.raise_if_any()
    # what is missing has reported a problem
    assert files.config is not None
    assert files.adapter is not None
    assert spec is not None
    config = config.with_fields(
        mesh={"seq": spec.config.mesh.seq},
        batch={"rows_per_microbatch": spec.config.rows_per_microbatch},
    ).model_copy(update={"adapter": files.adapter.config})
    assert files.hf_config is not None
    train, evals = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=files.config.vocab_size, for_training=for_training
    )
    rows_per_step = config.batch.rows_per_step
    num_split_pairs = 0 if train is None else train.num_split_pairs
    if num_split_pairs and rows_per_step % 2:
        raise UserError(
            f"batch.rows_per_step = {rows_per_step}: must be even, because "
            f"{format_count(num_split_pairs, 'pair')} of documents "
            f"{'is' if num_split_pairs == 1 else 'are'} in two rows each, which must be in "
            f"one step. Use {rows_per_step + 1}, or a data.row_tokens that holds both documents."
        )
    stops = stop_tokens.find(opened, config, tokenizer)
    return PreparedModel(
        config=config,
        spec=dataclasses.replace(
            spec,
            config=config.step,
            num_steps=config.run.steps or 1,
            has_split_pairs=num_split_pairs > 0,
        ),
        hf_config=stops.add_to(token_ids.add(files.hf_config, tokenizer)),
        model_folder=files.folder,
        adapter_folder=files.adapter.folder,
        model_dir=model_dir,
        tokenizer=tokenizer,
        stop_tokens=stops,
        train_set=train,
        eval_sets=evals,
        task_samples=task_samples.make(config, tokenizer),
    )


def _resolve_mesh(
    config: StepConfig,
    model: ModelConfig | None,
    devices: list[jax.Device],
    problems: ProblemCollector,
    *,
    for_training: bool,
) -> StepSpec | None:
    """Chooses the mesh, the rows of a microbatch and the attention, and checks the step.

    Returns: None if there are problems.
    """
    spec = None
    if model is not None:
        with problems.collect():
            config = candidates.resolve(config, model, devices=devices, with_training=for_training)
    if config.mesh.seq != "auto":
        config = config.with_one_row_for_auto()  # if the model is unknown
        if model is not None:
            with problems.collect():
                spec = make_spec(config, model, devices=devices)
        problems += memory_problems.find_problems(config, platform=devices[0].platform, model=model)
        with problems.collect():
            problems += find_division_problems(
                config,
                device_mesh.resolve_axis_sizes(config.mesh, len(devices)),
                layout=None if spec is None else spec.attention.strategy.layout,
                with_training=for_training,
            )
        if for_training and model is not None:
            problems += param_groups.find_problems(config.optimizer, decoder.param_table(model))
    return spec
