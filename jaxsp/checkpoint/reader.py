"""Reads checkpoints onto any mesh, and detects damage."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, run_paths
from jaxsp.checkpoint.run_paths import META_FILE
from jaxsp.core import errors, files
from jaxsp.core.errors import UserError
from jaxsp.sharding import sharding
from jaxsp.training import train_state
from jaxsp.training.train_state import TrainState

_MACHINE_ERRORS = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingState:
    """Result of the evaluations so far. A checkpoint stores it as JSON."""

    data: str
    """Name of the eval set."""
    digest: str
    """Digest of the eval set's tokens. Losses on other tokens are not compared."""
    metric: str = "loss"
    """run.early_stopping_metric."""
    best_value: float | None = None
    """Lowest loss, or highest value of another metric; None before the first finite one."""
    best_step: int | None = None
    num_since_best: int = 0
    """Number of evaluations since the best."""
    is_due: bool = False
    """True if the next evaluation counts. Unscheduled evaluations, such as that of a checkpoint
    written by a stop, do not count: otherwise a run that is stopped more often would end earlier.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """Metadata of a checkpoint, stored as JSON beside its arrays."""

    config: dict[str, Any]
    model: dict[str, Any]
    """Fields of the model's config.json."""
    data: dict[str, Any]
    """Fingerprint of everything that determines the rows and their order."""
    step: int
    rows_consumed: int
    """Rows consumed since step 0: with `data`, the state of the data loader."""
    num_tokens_total: int
    eval_loss: float | None = None
    """Loss on the eval set `eval_set`; None if not evaluated or not finite."""
    eval_set: dict[str, str] | None = None
    """Name and digest of the eval set of `eval_loss`. Only losses with one digest are compared."""
    has_pending_evaluation: bool = False
    """True if a stop skipped an evaluation that was due."""
    early_stopping: EarlyStoppingState | None = None
    base: dict[str, str] = dataclasses.field(default_factory=dict)
    """Checksums of the frozen weights, which the checkpoint does not contain."""
    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Checksum ("digest"), dtype and unpadded shape of each array, by its path in the state."""


class DamagedCheckpointError(UserError):
    """Checkpoint whose contents are not those that were written."""

    def __init__(self, path: pathlib.Path, reason: str):
        self.path = path
        self.reason = reason
        suggestion = "Use another checkpoint."
        steps = run_paths.list_steps(path.parent) if path.name.isdecimal() else []
        if earlier := [step for step in steps if step < int(path.name)]:
            suggestion = (
                f"Use the previous one, {path.parent / str(earlier[-1])}. To resume training from "
                "that one, move the damaged one away."
            )
        super().__init__(f"{path}: the checkpoint is damaged: {reason}. {suggestion}")


def write_meta(checkpoint: pathlib.Path, meta: CheckpointMeta) -> None:
    """Writes a checkpoint's metadata atomically, with a checksum of its fields."""
    fields = dataclasses.asdict(meta)
    text = json.dumps({"digest": _checksum(fields), **fields}, allow_nan=False)
    files.write_atomic(checkpoint / META_FILE, text)


def read_meta(checkpoint: pathlib.Path) -> CheckpointMeta:
    """Reads the metadata of a checkpoint.
    Raises: DamagedCheckpointError; UserError for the fields of another version of jaxsp."""
    # Not with orbax: it would initialize JAX before the config sets the number of devices
    fields = files.read_json(checkpoint / META_FILE)
    if fields is None:
        is_file = (checkpoint / META_FILE).is_file()
        reason = f"{META_FILE} is {'not a JSON object' if is_file else 'missing, or not a file'}"
        raise DamagedCheckpointError(checkpoint, reason)
    if fields.pop("digest", None) != _checksum(fields):
        raise DamagedCheckpointError(checkpoint, f"the contents of {META_FILE} have changed")
    try:
        if fields.get("early_stopping"):
            fields["early_stopping"] = EarlyStoppingState(**fields["early_stopping"])
        return CheckpointMeta(**fields)
    except TypeError:
        raise UserError(
            f"{checkpoint}: {META_FILE} has other fields than this version of jaxsp writes. Use "
            "the version that wrote it."
        ) from None


def read_weights(checkpoint: pathlib.Path, table: layers.Weights) -> layers.Weights:
    """Reads the trained weights, float32, without padding. Raises: DamagedCheckpointError."""
    table = train_state.select_trained(table, table)
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), table)
    stored = _read_item(checkpoint, run_paths.MASTER, ocp.args.PyTreeRestore(restore_args=on_host))
    master = jax.tree.map(sharding.remove_padding, table, stored)
    arrays = checksums.name_leaves({run_paths.MASTER: master})
    _check_arrays(checkpoint, {x: checksums.compute_on_host(arrays[x]) for x in arrays}, arrays)
    return master


def restore_weights(
    checkpoint: pathlib.Path, like: layers.Weights, *, table: layers.Weights, frozen: layers.Weights
) -> layers.Weights:
    """Restores weights like `restore`."""
    items = {run_paths.MASTER: train_state.select_trained(table, like)}
    return train_state.merge(frozen, _restore_items(checkpoint, items, table)[run_paths.MASTER])


def restore(
    checkpoint: pathlib.Path,
    like: TrainState,
    *,
    table: layers.Weights,
    num_steps: int,
    frozen: layers.Weights | None = None,
) -> TrainState:
    """Restores the state after `num_steps` steps, with shapes and shardings of `like`, on any mesh.

    Args: frozen: the frozen weights (`select_frozen`), which checkpoints do not contain.
    Raises: DamagedCheckpointError in all processes.
    """
    restored = _restore_items(checkpoint, list_items(like, table), table)
    opt_state = like.opt_state
    if run_paths.OPT in restored:
        no_state = train_state.select_frozen(table, jax.tree.map(lambda _: None, table))
        opt_state = train_state.merge(no_state, restored[run_paths.OPT])
    return TrainState(
        master=train_state.merge(frozen or {}, restored[run_paths.MASTER]),
        opt_state=opt_state,
        step=jax.device_put(np.int32(num_steps), like.step.sharding),
    )


def check_base(checkpoint: pathlib.Path, found: dict[str, str]) -> None:
    """Compares checksums of the frozen weights with a checkpoint's, those of a teacher only if
    both have one. Raises: UserError."""
    written = read_meta(checkpoint).base
    names = {*found, *written}
    of_teacher = {name for name in names if name.startswith("base/teacher/")}
    if of_teacher.isdisjoint(found) or of_teacher.isdisjoint(written):
        names -= of_teacher
    changed = [name for name in sorted(names) if found.get(name) != written.get(name)]
    if changed:
        name = changed[0].partition("/")[2]
        differ = f"and {len(changed) - 1} more differ" if len(changed) > 1 else "differs"
        raise UserError(
            f"{checkpoint}: was trained on another base: {name} {differ}. Use the model, "
            "model.compute_dtype, adapter, objective and run.seed of that run."
        )


def list_items(state: TrainState, table: layers.Weights) -> dict[str, Any]:
    """Returns the items of a checkpoint: trained weights, and their optimizer state if any."""
    items = {run_paths.MASTER: train_state.select_trained(table, state.master)}
    if jax.tree.leaves(state.opt_state):
        items[run_paths.OPT] = train_state.select_trained(table, state.opt_state)
    return items


def raise_on_all_processes(checkpoint: pathlib.Path, function: Callable[[], Any]) -> Any:
    """Calls a function. Raises: DamagedCheckpointError in all processes if one raises it."""
    damage = None
    try:
        result = function()
    except DamagedCheckpointError as error:
        damage = error
    is_damaged = multihost_utils.process_allgather(np.int32(damage is not None))
    if is_damaged.any():
        reason = f"process {is_damaged.argmax()} cannot read it"
        raise damage or DamagedCheckpointError(checkpoint, reason)
    return result


def _restore_items(
    checkpoint: pathlib.Path, items: dict[str, Any], table: layers.Weights
) -> dict[str, Any]:
    """Restores items with these shapes and shardings, and checks their checksums."""
    mesh = jax.tree.leaves(items)[0].sharding.mesh
    is_broadcast = sharding.is_broadcast(mesh)

    def read() -> dict[str, Any]:
        restored: dict[str, Any] = {}
        if sharding.find_readers(mesh).isdisjoint(mesh.local_devices):
            return restored
        for item, like in items.items():
            # Not strict, because the stored shapes differ: the padding depends on the mesh
            to = jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(
                    sharding=sharding.on_first_replica(x.sharding) if is_broadcast else x.sharding,
                    global_shape=x.shape,
                    dtype=x.dtype,
                    strict=False,
                ),
                like,
            )
            args = ocp.args.PyTreeRestore(item=like, restore_args=to)
            restored[item] = _read_item(checkpoint, item, args)
        return restored

    restored = raise_on_all_processes(checkpoint, read)
    if is_broadcast:
        # With orbax's SingleReplicaArrayHandler, other processes wait forever if a file is damaged
        def receive(like: Any, array: Any = None) -> Any:
            shards = [] if array is None else [x.data for x in array.addressable_shards]
            result = sharding.broadcast(like, like.sharding, shards)
            if array is not None:
                array.delete()
            return result

        restored = jax.tree.map(receive, items, *([restored] if restored else []))
    expected = checksums.unpadded_shapes(train_state.select_trained(table, table), restored)
    # Computing checksums is collective. It cannot hang, because every process has read its shards
    found = checksums.compute_on_devices(checksums.name_leaves(restored), expected)
    raise_on_all_processes(checkpoint, lambda: _check_arrays(checkpoint, found, expected))
    return restored


def _check_arrays(checkpoint: pathlib.Path, found: dict[str, str], arrays: dict[str, Any]) -> None:
    """Compares checksums, shapes and dtypes with the metadata. Raises: DamagedCheckpointError."""
    written = read_meta(checkpoint).arrays
    for name, array in arrays.items():
        if name not in written:
            raise DamagedCheckpointError(checkpoint, f"{name} was not written")
        before = "{dtype}{shape}, checksum {digest}".format_map(written[name])
        now = f"{array.dtype}{[*array.shape]}, checksum {found[name]}"
        if before != now:
            reason = f"{name} was written as {before}, and is {now}"
            raise DamagedCheckpointError(checkpoint, reason)


def _read_item(checkpoint: pathlib.Path, item: str, args: ocp.args.PyTreeRestore) -> Any:
    """Reads an item. orbax's handler, unlike its CheckpointManager, waits for no other process."""
    if not (checkpoint / item).is_dir():
        raise DamagedCheckpointError(checkpoint, f"{item} is missing")
    silence_orbax_errors()
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            return handler.restore(epath.Path(checkpoint / item), args=args)
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # orbax and TensorStore have no common class of errors
        if not files.is_damage(error) or any(code in str(error) for code in _MACHINE_ERRORS):
            raise
        raise DamagedCheckpointError(checkpoint, f"{item}: {describe_error(error)}") from error


@functools.cache
def silence_orbax_errors() -> None:
    """Stops orbax from also printing its errors: hundreds of lines if one of many writes fails."""
    logging.getLogger("absl").addFilter(
        lambda record: "orbax" not in pathlib.Path(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )


def describe_error(error: BaseException) -> str:
    """Returns the first line of an orbax error, without the source locations at its end."""
    return errors.first_line(error).partition(" [")[0][:200].rstrip(".")


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
