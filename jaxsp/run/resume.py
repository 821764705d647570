"""Resuming: which checkpoint a run continues from, and whether the config still fits it."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader, run_paths, run_storage
from jaxsp.checkpoint.reader import CheckpointMeta, DamagedCheckpointError, EarlyStoppingState
from jaxsp.config import yaml_io
from jaxsp.core import errors, files
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.data import dataset
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.packing import RowSchedule
from jaxsp.hf import model_config
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.run import config_file
from jaxsp.run.config_file import Config, RunConfig
from jaxsp.system import run_lock

_TOKEN_FIELDS = tuple(
    "data.train data.eval_fraction data.chat_template model.tokenizer model.source".split()
)
"""Prefixes of fields that change the tokens."""

_UNREPORTED_FIELDS = ("run.directory", "run.staging", "run.resume", "run.on_data_change")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Step and state of the data that a run starts from."""

    checkpoint: pathlib.Path | None = None
    """Checkpoint to resume from; None for a new run."""
    step: int = 0
    """Number of steps before the start."""
    rows_consumed: int = 0
    num_tokens: int = 0
    """Number of tokens in these steps."""
    has_pending_evaluation: bool = False
    """True if a stop skipped an evaluation that was due at `step`."""
    early_stopping: EarlyStoppingState | None = None
    config_changes: tuple[str, ...] = ()
    """Config fields that differ from the checkpoint's, with both values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """Checkpoint that a run resumes from."""

    path: pathlib.Path
    meta: CheckpointMeta
    config: Config
    """Config of the checkpoint's run."""


def open_checkpoint(
    run: RunConfig, skip: Sequence[pathlib.Path], problems: ProblemCollector
) -> RunCheckpoint | None:
    """Opens the checkpoint to resume from, unless it is in `skip`; all processes call it.

    Raises: UserError if processes see different checkpoints. Other problems go to `problems`.
    """
    path = None
    with problems.collect():
        path = find_checkpoint(run, skip=skip)
    if jax.process_count() > 1:
        problems.raise_if_any()  # which ends the processes that wait here
        name = "0" if path is None else path.name
        steps = multihost_utils.process_allgather(np.int32(name if name.isdecimal() else -1))
        different = np.unique(steps).tolist()
        if len(different) > 1:
            raise UserError(
                f"run.directory = {run.directory}: processes would begin at steps "
                f"{errors.format_choices(different)}, because they see different checkpoints. "
                "Name a folder that all nodes share."
            )
    if path is None:
        return None
    meta = reader.raise_on_all_processes(path, functools.partial(reader.read_meta, path))
    return RunCheckpoint(path=path, meta=meta, config=config_file.parse(meta.config))


def find_checkpoint(run: RunConfig, *, skip: Sequence[pathlib.Path] = ()) -> pathlib.Path | None:
    """Finds the checkpoint that a run resumes from, unless it is in `skip`; None for a new run."""
    directory = run.local_dir
    if run.resume not in ("auto", "never") and not files.is_url(run.resume):
        with at("run.resume", run.resume):
            files.check_folder(pathlib.Path(run.resume))
    has_files = directory.is_dir() and any(
        path.name not in run_lock.BOOKKEEPING_FILES for path in directory.iterdir()
    )
    origin = "auto"  # the checkpoint of another run that this one started from
    saved = directory / run_paths.CONFIG_FILE
    with contextlib.suppress(UserError):  # another version wrote it
        origin = config_file.load(saved, []).run.resume if saved.exists() else "auto"
    # the same command again resumes the run, also one that started from another run's checkpoint
    if run.resume == "auto" or run.resume == origin != "never":
        checkpoint = run_paths.find_latest_in_run(directory, exclude=skip)
        with at("run.directory", run.directory):
            if has_files and not saved.is_file():
                raise UserError(
                    "contains files that are not a run's. Name a folder that is new or empty."
                )
            if checkpoint is not None:
                return checkpoint
            checkpoints = directory / run_paths.CHECKPOINTS_DIR
            damaged = directory / run_paths.DAMAGED_DIR
            elsewhere = f"or start again in another folder: run.directory={run.directory}-2."
            if damaged.is_dir():
                raise UserError(
                    f"all its checkpoints are damaged; they are in {damaged}. Put a copy of one "
                    f"into {checkpoints}, {elsewhere}"
                )
            last = files.read_json(directory / run_paths.LAST_CHECKPOINT_FILE)
            if last is not None:
                raise UserError(
                    f"this run has written a checkpoint after step {last.get('step')}, but "
                    f"{checkpoints} has none. Put it back (is its disk mounted?), {elsewhere}"
                )
            if run.resume == "auto" and origin not in ("auto", "never"):
                raise UserError(
                    f"this run started from {origin} and ended before it wrote a checkpoint. "
                    f"Start it again from there: run.resume={origin}."
                )
        if run.resume == "auto":
            return None
    elif has_files:
        raise UserError(
            f"run.directory = {run.directory}: is not empty. Remove it, name another folder "
            f"(run.directory={run.directory}-2), or resume with run.resume=auto."
        )
    if run.resume == "never":
        return None
    with at("run.resume", run.resume):
        checkpoint = run_paths.find_latest(run_storage.make_local(run.resume), exclude=skip)
        if checkpoint is None:
            raise UserError(
                "contains no checkpoint. Use a run's directory, a folder in its checkpoints/, auto "
                "or never."
            )
        return checkpoint


def skip_damaged(run: RunConfig, damage: DamagedCheckpointError) -> str:
    """Lets a run resume from the checkpoint before a damaged one, and returns a line for the user.

    A damaged checkpoint of the run itself is moved away; another run's stays where it is.

    Raises: DamagedCheckpointError if run.resume names this checkpoint.
    """
    problem = f"{damage.path} IS DAMAGED: {damage.reason}."
    if run_paths.find_run_dir(damage.path) == run.local_dir.resolve():
        moved = set_aside(damage.path, is_writer=run.is_writer)
        return f"{problem} It was moved to {moved}; the run resumes from the checkpoint before it."
    with at("run.resume", run.resume):
        source = run_storage.make_local(run.resume)
    if run_paths.find_latest(source) == pathlib.Path(source).resolve():
        raise damage
    return f"{problem} It was not moved; the run resumes from the checkpoint before it."


def set_aside(checkpoint: pathlib.Path, *, is_writer: bool) -> pathlib.Path:
    """Moves a damaged checkpoint to damaged/; all processes must call it. Returns: its new path."""
    folder = checkpoint.parent.parent / run_paths.DAMAGED_DIR
    names = (f"{checkpoint.name}{f'-{x}' if x > 1 else ''}" for x in itertools.count(1))
    target = next(path for name in names if not (path := folder / name).exists())
    multihost_utils.sync_global_devices("all have chosen the same target")
    if is_writer:
        folder.mkdir(exist_ok=True)
        checkpoint.rename(target)
    multihost_utils.sync_global_devices("the checkpoint is moved")
    return target


def find_model_dir(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """Folder with the model's small files in the run of a checkpoint; None outside of a run."""
    directory = run_paths.find_run_dir(checkpoint)
    if directory is None or not (directory / "model").is_dir():
        return None
    return directory / "model"


def make_start_point(
    checkpoint: RunCheckpoint, config: Config, *, model: ModelConfig, data: PackedDataset
) -> StartPoint:
    """Builds the starting point. Raises: UserError for another model, optimizer or data."""
    meta = checkpoint.meta
    saved = checkpoint.config
    path = checkpoint.path
    differences = _list_model_differences(checkpoint, config, model)
    if saved.optimizer.state_kind != config.optimizer.state_kind:
        field = "name" if saved.optimizer.name != config.optimizer.name else "momentum"
        differences.append(
            f"optimizer.{field}: {path} has the state of {saved.optimizer.state_kind}."
        )
    params = jax.tree.leaves(decoder.param_table(model))
    frozen, saved_frozen = (
        {param.hf_name for param in params if param_groups.is_frozen(each.optimizer, param)}
        for each in (config, saved)
    )
    if changed := sorted(frozen ^ saved_frozen):
        state = "frozen" if changed[0] in saved_frozen else "trained"
        differences.append(f"optimizer.groups: {changed[0]} is {state} in {path}.")
    merge = " --merge" if saved.adapter.type != "none" else ""
    problems = [
        f"{difference} Undo the change, or start a new run with these weights: jaxsp export "
        f"{path} FOLDER{merge}, then run.directory=NEW model.source=FOLDER."
        for difference in differences
    ]
    consumed = meta.rows_consumed
    changes = _list_changes(saved, config)
    fingerprint = data.fingerprint(config.data, seed=config.run.seed)
    if text := "; ".join(dataset.describe_changes(meta.data, fingerprint)):
        has_same_length = saved.data.row_tokens == config.data.row_tokens
        effect = f"skips as many new rows as were consumed of the old ones ({consumed:,})"
        match config.run.on_data_change:
            case "error":
                fields = [x for x in changes if x.startswith(_TOKEN_FIELDS)]
                reason = f" (changed: {', '.join(fields)})" if fields else ""
                alternative = " or continue (skip as many new rows)" if has_same_length else ""
                problems.append(
                    f"{text}{reason}: the rows are not those that {path} has consumed "
                    f"({consumed:,} rows of {saved.data.row_tokens:,} tokens). Undo the "
                    "change, or set run.on_data_change=restart (start with the first of the new "
                    f"rows){alternative}."
                )
            case "continue" if not has_same_length:
                problems.append(
                    f"{text}: run.on_data_change = continue: must have the same data.row_tokens as "
                    "before. Use restart."
                )
            case "restart":
                effect = "starts with the first of the new rows"
                consumed = 0
        changes.append(f"{text}: {effect}")
    if problems:
        raise UserError(problems)
    return StartPoint(
        checkpoint=path,
        step=meta.step,
        rows_consumed=consumed,
        num_tokens=meta.num_tokens_total,
        has_pending_evaluation=meta.has_pending_evaluation,
        early_stopping=meta.early_stopping,
        config_changes=tuple(changes),
    )


def make_schedule(config: Config, start: StartPoint, data: PackedDataset) -> RowSchedule:
    """Rows of the steps of a config after a start."""
    steps = config.run.steps
    return data.make_schedule(
        config.batch.rows_per_step,
        consumed=start.rows_consumed,
        num_steps=None if steps is None else max(steps - start.step, 0),
        epochs=config.run.epochs,
    )


def _list_changes(saved: Config, config: Config) -> list[str]:
    """Changed fields with both values."""
    before, now = (dict(yaml_io.flatten(each.model_dump(mode="json"))) for each in (saved, config))
    changes = []
    for field in before | now:
        values = (before.get(field), now.get(field))
        if values[0] != values[1] and field not in _UNREPORTED_FIELDS:
            # a template has pages
            old, new = (yaml_io.shorten(yaml_io.format_value(value), 60) for value in values)
            changes.append(f"{field} {old} -> {new}")
    return changes


def _list_model_differences(
    checkpoint: RunCheckpoint, config: Config, model: ModelConfig
) -> list[str]:
    """Differences between the model and adapter of a checkpoint and those of the config."""
    now = vars(config.adapter)
    before = vars(checkpoint.config.adapter)
    if now["type"] != before["type"]:
        now = {"type": now["type"]}
    lines = [
        f"adapter.{name} = {yaml_io.format_value(value)}: is {yaml_io.format_value(before[name])}"
        for name, value in now.items()
        if name != "source" and value != before[name]
    ]
    with at("model.config"):
        saved = model_config.parse_model_config(
            checkpoint.meta.model, row_tokens=checkpoint.config.data.row_tokens
        )
    fields, saved_fields = map(describe_model, (model, saved))
    lines += [
        f"model: {name} = {fields.get(name)}: is {saved_fields.get(name)}"
        for name in fields | saved_fields
        if fields.get(name) != saved_fields.get(name)
    ]
    return [f"{line} in {checkpoint.path}." for line in lines]


def describe_model(model: ModelConfig) -> dict[str, object]:
    """Fields of a model by name, without those that may change from step to step: the dtype of
    products, kernels, and losses of routers. Equal layers in a row are counted."""
    left_out = ("linear_dtype", "lora", "teacher", "layers")
    names = (field.name for field in dataclasses.fields(model))
    fields: dict[str, object] = {x: getattr(model, x) for x in names if x not in left_out}
    if model.experts is not None:
        fields["experts"] = dataclasses.replace(
            model.experts, kernel="xla", aux_loss_coef=0.0, z_loss_coef=0.0
        )
    if model.delta_net is not None:
        fields["delta_net"] = dataclasses.replace(model.delta_net, kernel="xla")
    for name in ("mixer", "feed_forward", "window", "rope"):
        groups = itertools.groupby(getattr(layer, name) for layer in model.layers)
        fields[f"{name} of layers"] = [(value, len([*group])) for value, group in groups]
    return fields
