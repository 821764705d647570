"""Where a run goes on: the checkpoint, and whether what is asked now still fits it."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta, DamagedCheckpointError
from jaxsp.config import schema, yaml_io
from jaxsp.config.schema import Config, RunConfig
from jaxsp.core import errors, paths
from jaxsp.core.errors import UserError
from jaxsp.data.packing import dataset
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.hf import families
from jaxsp.model.config import ModelConfig
from jaxsp.runtime import run_dir as lock
from jaxsp.runtime import run_paths
from jaxsp.training.inputs import StartPoint

_TOKEN_FIELDS = (
    "data.train",
    "data.eval_fraction",
    "data.chat_template",
    "model.tokenizer",
    "model.source",
)
"""Fields, or how they begin, that make other tokens."""

_NEUTRAL_FIELDS = (
    *(
        "mesh.",
        "logging.",
        "checkpoint.",
        "memory.",
        "batch.rows_per_microbatch",
        "data.eval.",
        "data.num_workers",
        "attention.head_chunks",
    ),
    *(
        "run.log_every",
        "run.save_every",
        "run.eval_every",
        "run.eval_at_start",
        "run.early_stopping",
        "run.shutdown_grace",
        "run.stop_after",
        "run.step_timeout",
    ),
    "run.deterministic",
)
"""Fields, or how they begin, that alter neither rows nor weights, but for rounding; `memory.grad_reduce_dtype` does."""


_NO_START = -2
"""What a process tells in place of a step."""


def find_checkpoint(run: RunConfig, *, skip: Sequence[pathlib.Path] = ()) -> pathlib.Path | None:
    """The checkpoint that a run goes on from; not one of `without`, which are damaged.

    Raises: UserError where there has to be one, or run.directory cannot be used.
    """
    directory = pathlib.Path(run.directory)
    paths.check_folder(directory, field="run.directory")
    if run.resume not in ("auto", "never"):
        paths.check_folder(pathlib.Path(run.resume), field="run.resume")
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    asked = f"run.directory = {run.directory}"
    if not there.is_dir():
        raise UserError(f"{asked}: {there} is a file. Name a folder that is new or empty.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{asked}: {there} cannot be written. Name another folder: run.directory=runs/a."
        )
    has_files = directory.is_dir() and any(
        path.name not in lock.BOOKKEEPING_FILES for path in directory.iterdir()
    )
    begun_from = _read_first_resume(directory)
    if run.resume in ("auto", begun_from):  # the same command again goes on, wherever it began
        if has_files and not (directory / run_paths.CONFIG_FILE).is_file():
            raise UserError(
                f"{asked}: holds files, but no run. Name a folder that is new or empty."
            )
        found = run_paths.find_latest_in_run(directory, exclude=skip)
        aside = directory / run_paths.DAMAGED_DIR
        if found is None and aside.is_dir():
            raise UserError(
                f"{asked}: none of its checkpoints is whole; the damaged ones lie in {aside}. Put a copy of one into "
                f"{directory / run_paths.CHECKPOINTS_DIR}, or begin anew in another folder: run.directory={run.directory}-2."
            )
        if found is None and run.resume != begun_from is not None:
            raise UserError(
                f"{asked}: the run there was to go on from {begun_from}, and was cut off before a checkpoint of its own. "
                f"Say it again: run.resume={begun_from}."
            )
        if found is not None or run.resume == "auto":
            return found
    elif has_files:
        raise UserError(
            f"{asked}: is not empty. Remove it, name another (run.directory={run.directory}-2), or go on with run.resume=auto."
        )
    if run.resume == "never":
        return None
    found = run_paths.find_latest(run.resume, exclude=skip)
    if found is None:
        raise UserError(
            f"run.resume = {run.resume}: holds no checkpoint. Give a run's directory or a folder in its checkpoints/, or "
            "auto or never."
        )
    return found


def _read_first_resume(directory: pathlib.Path) -> str | None:
    """What run.resume named when the run in a directory began; None where that was no other run's checkpoint."""
    path = directory / run_paths.CONFIG_FILE
    if not path.is_file():
        return None
    try:
        named = schema.load(path, []).run.resume
    except UserError:  # whoever wrote it, it was not this version
        return None
    return None if named in ("auto", "never") else named


def check_same_checkpoint(
    run: RunConfig, found: pathlib.Path | None, problems: Sequence[str]
) -> None:
    """Settles between processes where the run begins. Called by all of them.

    Args:   problems: why this process knows no beginning.
    Raises: UserError where one of them has problems, with its own, and where they see different checkpoints.
    """
    if jax.process_count() == 1:
        return
    own = (
        _NO_START
        if problems
        else 0
        if found is None
        else int(found.name)
        if found.name.isdecimal()
        else -1
    )
    of_all = multihost_utils.process_allgather(np.int32(own))
    if (of_all == _NO_START).any():
        raise UserError(
            problems
            or f"run.directory = {run.directory}: process {of_all.argmin()} says why it does not begin."
        )
    steps = np.unique(of_all)
    if len(steps) > 1:
        raise UserError(
            f"run.directory = {run.directory}: processes would begin at steps {errors.format_choices(steps.tolist())}, because they "
            "see different checkpoints. Name a folder that all nodes share."
        )


def skip_damaged(run: RunConfig, damage: DamagedCheckpointError) -> str:
    """Lets a run go on without a checkpoint that is damaged, and says what becomes of that, for people.

    One of the run itself is moved, which process 0 does for all; another run's stays where it is.

    Raises: Damaged again, where the run was told to go on from that very one.
    """
    said = f"{damage.path} IS DAMAGED: {damage.reason}."
    if run_paths.find_run_dir(damage.path) == pathlib.Path(run.directory).resolve():
        return f"{said} It is set aside, in {reader.set_aside(damage.path)}; the run goes on from the one before it."
    if run_paths.find_latest(run.resume) == pathlib.Path(run.resume).resolve():
        raise damage
    return f"{said} It is left where it is; the run goes on from the one before it."


def find_model_dir(found: pathlib.Path) -> pathlib.Path | None:
    """Where the run of a checkpoint keeps the small files of its model; None for a checkpoint that lies elsewhere."""
    run = run_paths.find_run_dir(found)
    return run / "model" if run is not None and (run / "model").is_dir() else None


def make_start_point(
    meta: CheckpointMeta,
    found: pathlib.Path,
    config: Config,
    *,
    model: ModelConfig,
    data: PackedDataset,
) -> StartPoint:
    """Where a run goes on from a checkpoint. Raises: UserError where that is of another model, or of other rows."""
    way_out = (
        f"Undo that, or begin a run with these weights: python -m jaxsp.export {found} FOLDER, then run.directory=NEW "
        "model.source=FOLDER."
    )
    saved, problems = schema.parse(meta.config), []
    was = families.parse_model_config(meta.model, field="model.config")
    for name in (
        field.name
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(was, field.name)
    ):
        said = f"{name} = {getattr(model, name)}: is {getattr(was, name)} in the model of {found}"
        problems.append(f"model: {said}. {way_out}")
    if saved.optimizer.name != config.optimizer.name:
        problems.append(
            f"optimizer.name: {found} has the state of {saved.optimizer.name}. {way_out}"
        )
    rows, changed = (
        {int(length): count for length, count in meta.rows_consumed.items()},
        _list_changes(saved, config),
    )
    if others := dataset.describe_changes(meta.data, data.fingerprint(config)):
        what, then = "; ".join(others), config.run.on_data_change
        same_lengths = saved.data.row_lengths == config.data.row_lengths
        consumed = " and ".join(
            f"{count:,} rows of {length:,} tokens" for length, count in rows.items()
        )
        if then == "error":
            fields = [change for change in changed if change.startswith(_TOKEN_FIELDS)]
            because = f" (changed: {', '.join(fields)})" if fields else ""
            or_else = " or continue (behind as many of them)" if same_lengths else ""
            problems.append(
                f"{what}{because}: that makes other rows than those that {found} has consumed ({consumed}). Undo that, or set "
                f"run.on_data_change=restart (begin with the first of the new rows){or_else}."
            )
        elif then == "restart":
            rows, changed = {}, (*changed, f"{what}: begins with the first of the new rows")
        elif not same_lengths:
            problems.append(
                f"{what}: run.on_data_change = continue: rows of other lengths cannot be counted on. Use restart."
            )
        else:
            changed = (
                *changed,
                f"{what}: goes on behind as many of the new rows as were consumed of the old ({consumed})",
            )
    if problems:
        raise UserError(problems)
    return StartPoint(
        checkpoint=found,
        step=meta.step,
        rows_consumed=rows,
        num_tokens=meta.num_tokens_total,
        has_pending_evaluation=meta.has_pending_evaluation,
        early_stopping=meta.early_stopping,
        config_changes=changed,
    )


def _list_changes(saved: Config, config: Config) -> tuple[str, ...]:
    """The fields that are not as they were, with both values: those that alter training, then the others, as one."""
    # a checkpoint of an earlier version lacks fields; `saved` has their defaults
    before, now = (dict(_flatten(either.model_dump(mode="json"))) for either in (saved, config))
    not_said = ("run.directory", "run.resume", "run.on_data_change")
    words = {
        field: f"{field} {_shorten(before.get(field))} -> {_shorten(now.get(field))}"
        for field in before | now
        if before.get(field) != now.get(field) and field not in not_said
    }
    others = [
        field
        for field in words
        if field.startswith(_NEUTRAL_FIELDS) and field != "memory.grad_reduce_dtype"
    ]
    altering = tuple(word for field, word in words.items() if field not in others)
    rest = " and ".join(words[field] for field in others)
    return (
        (*altering, f"{rest} (which alter{'s' * (len(others) == 1)} nothing that is learned)")
        if others
        else altering
    )


def _flatten(fields: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested fields, with its name as in `key.path=value`."""
    inner = (
        fields.items()
        if isinstance(fields, dict)
        else enumerate(fields)
        if isinstance(fields, list)
        else ()
    )
    for name, value in inner:
        yield from _flatten(value, f"{field}.{name}" if field else str(name))
    if not isinstance(fields, dict | list):
        yield field, fields


def _shorten(value: Any) -> str:
    """A value in a few words: a chat template is pages."""
    text = yaml_io.format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
