"""Weights on disk: orbax, atomic, readable on any mesh."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxsp.core import errors
from jaxsp.model import layers
from jaxsp.training import sharding


def _manager(directory: pathlib.Path) -> ocp.CheckpointManager:
    handlers = {"master": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(directory.absolute(), item_handlers=handlers)


def save(directory: pathlib.Path, step: int, *, master: layers.Weights, meta: dict[str, Any]) -> None:
    """Writes the weights of a step as `directory/step`, with a JSON item beside them; whole or not at all."""
    args = ocp.args.Composite(master=ocp.args.StandardSave(master), meta=ocp.args.JsonSave(meta))
    with _manager(directory) as manager:
        saved = manager.save(step, args=args)
        manager.wait_until_finished()  # an error of an asynchronous write surfaces here
    assert saved, f"{directory} has step {step} already"


def latest(directory: pathlib.Path) -> pathlib.Path:
    """The newest checkpoint of a run's checkpoints/, or of the run. Raises: UserError where there is none."""
    for folder in (directory / "checkpoints", directory):
        steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit() and (path / "master").is_dir()]
        if steps:
            return folder / str(max(steps))
    if (directory / "master").is_dir():
        return directory
    raise errors.UserError(f"{directory}: holds no run and no checkpoint. Give the run.directory of a finished run.")


def read_meta(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The JSON item of a checkpoint."""
    with _manager(checkpoint.parent) as manager:
        return manager.restore(int(checkpoint.name), args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]


def read_weights(checkpoint: pathlib.Path, table: layers.Weights) -> layers.Weights:
    """Whole master weights in host memory, float32, without the zeros they were stored with."""
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    with _manager(checkpoint.parent) as manager:
        step = int(checkpoint.name)
        stored = manager.item_metadata(step)["master"].tree
        abstract = jax.tree.map(lambda _, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), table, stored)
        master = manager.restore(step, args=ocp.args.Composite(master=ocp.args.StandardRestore(abstract)))["master"]
    return jax.tree.map(lambda row, stored: sharding.cut(row, np.asarray(stored)), table, master)
