"""Weights on disk: orbax, atomic, readable on any mesh."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxsp.core import errors
from jaxsp.model import layers
from jaxsp.training import sharding


def save(directory: pathlib.Path, step: int, *, master: layers.Weights, meta: dict[str, Any]) -> None:
    """Writes the weights of a step as `directory/step`, with a JSON item beside them; whole or not at all."""
    handlers = {"master": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    args = ocp.args.Composite(master=ocp.args.StandardSave(master), meta=ocp.args.JsonSave(meta))
    with ocp.CheckpointManager(directory.absolute(), item_handlers=handlers) as manager:
        saved = manager.save(step, args=args)
        manager.wait_until_finished()  # an error of an asynchronous write surfaces here
    assert saved, f"{directory} has step {step} already"


def latest(name: str) -> pathlib.Path:
    """The newest checkpoint of a run, or the one that is named. Raises: UserError where there is none."""
    directory = pathlib.Path(name).resolve()
    if (directory / "master").is_dir():
        return directory
    for folder in (directory / "checkpoints", directory):
        steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit() and (path / "master").is_dir()]
        if steps:
            return folder / str(max(steps))
    raise errors.UserError(
        f"{name}: holds no checkpoint; a run writes one at its end. Give the run.directory of a finished run."
    )


def read_meta(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The JSON item of a checkpoint."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(checkpoint / "meta")


def read_weights(checkpoint: pathlib.Path, table: layers.Weights) -> layers.Weights:
    """Whole master weights in host memory, float32, without the zeros they were stored with."""
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), table)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.restore(checkpoint / "master", args=ocp.args.PyTreeRestore(restore_args=on_host))
    return jax.tree.map(sharding.cut, table, stored)
