"""Weights and optimizer state on disk: orbax, atomic, written while training goes on, readable on any mesh."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxsp.core import errors
from jaxsp.model import layers
from jaxsp.training import host, sharding, step

CHECKPOINTS = "checkpoints"
"""The folder of a run's directory that they are in."""

MASTER, OPT, META = "master", "opt", "meta"
"""A checkpoint's items; a run without optimizer state (sgd) has no second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a checkpoint says of itself, in JSON."""

    config: dict[str, Any]
    """The run's config, every field."""
    model: dict[str, Any]
    """Fields of the model's config.json."""
    data: dict[str, Any]
    """What decides the rows and their order."""
    step: int
    rows: dict[str, int]
    """Rows consumed, by their length: with `data`, the whole state of the data."""
    num_tokens_total: int


class Store:
    """The checkpoints of a run, `directory/STEP`; written whole or not at all, the newest `keep` of them kept.

    With several processes all of them make one and save together.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True, preservation_policy=checkpoint_managers.LatestN(keep)
        )
        handlers = {MASTER: ocp.StandardCheckpointHandler(), OPT: ocp.StandardCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            directory.absolute(), options=options, item_handlers=handlers | {META: ocp.JsonCheckpointHandler()}
        )

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after a failure, the other processes would not come to the barriers on the way out
        if kind is None or jax.process_count() == 1:
            self._manager.close()

    def save(self, state: step.State, meta: Meta) -> None:
        """Begins to write a step; returns when training may go on: with a state in host memory, when it is written.

        An error of the write before is raised here.
        """
        self._manager.wait_until_finished()
        items: dict[str, Any] = {MASTER: ocp.args.StandardSave(state.master)}
        if jax.tree.leaves(state.opt):
            items[OPT] = ocp.args.StandardSave(state.opt)
        items[META] = ocp.args.JsonSave(dataclasses.asdict(meta))
        saved = self._manager.save(meta.step, args=ocp.args.Composite(**items))
        assert saved, f"step {meta.step} is there already"
        if any(leaf.sharding.memory_kind == host.KIND for leaf in jax.tree.leaves((state.master, state.opt))):
            # orbax writes these out of their own memory, which the next step takes for the new state
            self._manager.wait_until_finished()

    def finish(self) -> None:
        """Waits for the write that is under way. An error of it is raised here."""
        self._manager.wait_until_finished()


def newest(name: str | pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint of a run's directory, or the checkpoint that is named; None where there is none."""
    directory = pathlib.Path(name).resolve()
    if (directory / MASTER).is_dir():
        return directory
    for folder in (directory / CHECKPOINTS, directory):
        # one that was not finished has a longer name
        steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit() and (path / MASTER).is_dir()]
        if steps:
            return folder / str(max(steps))
    return None


def run_of(checkpoint: pathlib.Path) -> pathlib.Path | None:
    """The directory of the run that a checkpoint is in; None for one that lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def read_meta(checkpoint: pathlib.Path) -> Meta:
    """The JSON item of a checkpoint. Raises: UserError where it cannot be read."""
    try:
        # not through orbax, which would make JAX count its devices before the config says how many there are
        fields = json.loads((checkpoint / META / "metadata").read_text(encoding="utf-8"))
        if isinstance(fields.get("rows"), int):
            raise ValueError("it is of an earlier version, which counted rows otherwise")
        return Meta(**fields)
    except (ValueError, OSError, TypeError) as error:
        raise _broken(checkpoint, error) from error


def read_weights(checkpoint: pathlib.Path, table: layers.Weights) -> layers.Weights:
    """Whole master weights in host memory, float32, without the zeros they were stored with. Raises: UserError."""
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), table)
    stored = _read(checkpoint, MASTER, ocp.args.PyTreeRestore(restore_args=on_host))
    return jax.tree.map(sharding.cut, table, stored)


def restore_weights(checkpoint: pathlib.Path, like: layers.Weights) -> layers.Weights:
    """Master weights, laid out like these shapes with shardings, whatever mesh they were saved on. Raises: UserError."""
    return _restore(checkpoint, MASTER, like)


def restore(checkpoint: pathlib.Path, like: step.State, *, num_steps: int) -> step.State:
    """The whole state, laid out like these shapes, after `num_steps` steps. Raises: UserError."""
    opt = _restore(checkpoint, OPT, like.opt) if jax.tree.leaves(like.opt) else like.opt
    return step.State(
        master=restore_weights(checkpoint, like.master),
        opt=opt,
        step=jax.device_put(np.int32(num_steps), like.step.sharding),
    )


def _restore(checkpoint: pathlib.Path, item: str, like: Any) -> Any:
    # not strict: the zeros that fill up a dim that does not divide are more or fewer on another mesh
    places = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=False), like
    )
    return _read(checkpoint, item, ocp.args.PyTreeRestore(item=like, restore_args=places))


def _read(checkpoint: pathlib.Path, item: str, args: ocp.args.PyTreeRestore) -> Any:
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(checkpoint / item, args=args)
    except (ValueError, OSError, KeyError) as error:  # what orbax raises for files that are missing or cut short
        raise _broken(checkpoint, error) from error


def _broken(checkpoint: pathlib.Path, error: Exception) -> errors.UserError:
    reason = str(error).split(" [")[0].splitlines()[0]
    older = f" Remove {checkpoint} to use the one before it." if checkpoint.name.isdigit() else ""
    return errors.UserError(f"{checkpoint}: the checkpoint cannot be read: {reason}.{older}")
