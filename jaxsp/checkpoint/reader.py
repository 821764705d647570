"""Weights and optimizer state read from disk, onto any mesh; what is damaged is noticed."""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxsp.checkpoint import checksums
from jaxsp.core.errors import UserError
from jaxsp.model import layers
from jaxsp.runtime import run_paths
from jaxsp.training import sharding
from jaxsp.training.train_step import TrainState

_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, None)
"""What reading answers to files that are missing or not what they were; anything else says that a machine is not well."""

_MACHINE_ERRORS = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""In what tensorstore says then."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says of itself, in JSON."""

    config: dict[str, Any]
    """The run's config, every field."""
    model: dict[str, Any]
    """Fields of the model's config.json."""
    data: dict[str, Any]
    """What decides the rows and their order."""
    step: int
    rows_consumed: dict[str, int]
    """Rows consumed, by their length: with `data`, the whole state of the data."""
    num_tokens_total: int
    eval_loss: float | None = None
    """Loss on the data set `loss_set`; None if it was not evaluated, or is not finite."""
    eval_set: dict[str, str] | None = None
    """Name and digest of the data set of `loss`, as evaluator.identity gives them. Losses of two checkpoints are compared
    only if the digests are equal."""
    has_pending_evaluation: bool = False
    """True if a stop skipped an evaluation that was due."""
    early_stopping: dict[str, Any] | None = None
    """Fields of `early_stopping.State`."""
    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Digest, dtype and logical shape of each array, by its path."""


class DamagedCheckpointError(UserError):
    """A checkpoint that is not what was written."""

    def __init__(self, path: pathlib.Path, reason: str):
        self.path, self.reason = path, reason
        older = run_paths.find_previous(path)
        way_out = "Name another checkpoint."
        if older:
            way_out = f"Name the one before it: {older}. Or move this one away, and the train command goes on from there."
        super().__init__(f"{path}: the checkpoint is damaged: {reason}. {way_out}")


def to_json(meta: CheckpointMeta) -> str:
    """The text of a checkpoint's JSON item, with a digest of all that it says."""
    fields = dataclasses.asdict(meta)
    return json.dumps({"digest": _checksum(fields), **fields}, allow_nan=False)


def read_meta(checkpoint: pathlib.Path) -> CheckpointMeta:
    """The JSON item of a checkpoint. Raises: Damaged where it is not what was written."""
    path = checkpoint / run_paths.META / "metadata"
    try:
        # not through orbax, which would make JAX count its devices before the config says how many there are
        fields = json.loads(path.read_bytes())
        digest = fields.pop("digest", None)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpointError(checkpoint, f"{run_paths.META}/metadata is missing") from None
    except (ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            checkpoint, f"{run_paths.META}/metadata is no JSON: {describe_error(error)}"
        ) from None
    if digest is None and "num_tokens_total" in fields:
        raise UserError(
            f"{checkpoint}: cannot be read: it is of an earlier version, which kept no digests. Go on with the version that "
            "wrote it, or export its weights with that and begin from them: model.source=FOLDER."
        )
    if digest != _checksum(fields):
        raise DamagedCheckpointError(
            checkpoint, f"{run_paths.META}/metadata says other things than were written"
        )
    try:
        return CheckpointMeta(**fields)
    except TypeError:
        raise UserError(
            f"{checkpoint}: cannot be read: it is of a later version, which says more of a checkpoint. Go on with that one."
        ) from None


def read_weights(checkpoint: pathlib.Path, table: layers.Weights) -> layers.Weights:
    """Whole master weights in host memory, float32, without the zeros they were stored with. Raises: Damaged."""
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), table)
    stored = _read_item(checkpoint, run_paths.MASTER, ocp.args.PyTreeRestore(restore_args=on_host))
    whole = jax.tree.map(sharding.remove_padding, table, stored)
    found = {
        name: checksums.compute_on_host(array)
        for name, array in checksums.name_leaves({run_paths.MASTER: whole}).items()
    }
    _check_arrays(checkpoint, found, checksums.name_leaves({run_paths.MASTER: whole}))
    return whole


def restore_weights(
    checkpoint: pathlib.Path, like: layers.Weights, *, table: layers.Weights
) -> layers.Weights:
    """Master weights, laid out like these shapes with shardings, whatever mesh they were saved on. Raises: Damaged."""
    return _restore_items(checkpoint, {run_paths.MASTER: like}, table)[run_paths.MASTER]


def restore(
    checkpoint: pathlib.Path, like: TrainState, *, table: layers.Weights, num_steps: int
) -> TrainState:
    """The whole state, laid out like these shapes, after `num_steps` steps. Raises: Damaged, in all processes."""
    items = {run_paths.MASTER: like.master} | (
        {run_paths.OPT: like.opt_state} if jax.tree.leaves(like.opt_state) else {}
    )
    found = _restore_items(checkpoint, items, table)
    return TrainState(
        master=found[run_paths.MASTER],
        opt_state=found.get(run_paths.OPT, like.opt_state),
        step=jax.device_put(np.int32(num_steps), like.step.sharding),
    )


def set_aside(checkpoint: pathlib.Path) -> pathlib.Path:
    """Moves a damaged checkpoint of a run out of the way, and returns where it is now. Process 0 does it for all."""
    aside = checkpoint.parent.parent / run_paths.DAMAGED_DIR
    taken = {path.name for path in aside.glob("*")}
    name = next(
        name
        for name in (checkpoint.name, *map(f"{checkpoint.name}-{{}}".format, range(2, 10**6)))
        if name not in taken
    )
    raise_on_all_processes(checkpoint, lambda: None)  # nobody reads it any more
    if jax.process_index() == 0:
        aside.mkdir(exist_ok=True)
        checkpoint.rename(aside / name)
    raise_on_all_processes(checkpoint, lambda: None)
    return aside / name


def raise_on_all_processes(checkpoint: pathlib.Path, function: Callable[[], _T]) -> _T:
    """What a function returns. Raises: Damaged in all processes where it does in one of them."""
    result, damage = None, None
    try:
        result = function()
    except DamagedCheckpointError as error:
        damage = error
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(damage is not None)))
        if failed.size and damage is None:
            damage = DamagedCheckpointError(checkpoint, f"process {failed[0]} cannot read it")
    if damage is not None:
        raise damage
    return result  # type: ignore[return-value]  # it was set, or there is damage


def _restore_items(
    checkpoint: pathlib.Path, items: dict[str, Any], table: layers.Weights
) -> dict[str, Any]:
    """Items that are laid out like these, and that are what was written."""

    def read() -> dict[str, Any]:
        # not strict: the zeros that fill up a dim that does not divide are more or fewer on another mesh
        place = lambda x: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=False
        )
        to = {
            item: ocp.args.PyTreeRestore(item=like, restore_args=jax.tree.map(place, like))
            for item, like in items.items()
        }
        return {item: _read_item(checkpoint, item, args) for item, args in to.items()}

    found = raise_on_all_processes(checkpoint, read)
    whole = checksums.unpadded_shapes(
        table, found[run_paths.MASTER], found.get(run_paths.OPT, jax.tree.map(lambda _: (), table))
    )
    expected = checksums.name_leaves({item: whole[item] for item in items})
    # all processes have read their parts: the sums travel between them
    sums = checksums.compute_on_devices(
        checksums.name_leaves(found), {name: like.shape for name, like in expected.items()}
    )
    raise_on_all_processes(checkpoint, lambda: _check_arrays(checkpoint, sums, expected))
    return found


def _check_arrays(checkpoint: pathlib.Path, found: dict[str, str], arrays: dict[str, Any]) -> None:
    """Raises: Damaged where arrays are not those that the JSON item has the digests of."""
    written = read_meta(checkpoint).arrays
    for name, array in arrays.items():
        if name not in written:
            raise DamagedCheckpointError(checkpoint, f"{name} was not written")
        one = written[name]
        if (one["dtype"], tuple(one["shape"])) != (str(array.dtype), array.shape):
            raise DamagedCheckpointError(
                checkpoint,
                f"{name} was written as {one['dtype']}{one['shape']}, not {array.dtype}{list(array.shape)}",
            )
    if wrong := [name for name, digest in found.items() if digest != written[name]["digest"]]:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        one, was = written[wrong[0]]["digest"], found[wrong[0]]
        raise DamagedCheckpointError(
            checkpoint, f"{wrong[0]}{more}: bits have changed (digest {was}, and was {one})"
        )


def _read_item(checkpoint: pathlib.Path, item: str, args: ocp.args.PyTreeRestore) -> Any:
    """An item as it lies there. The handler alone waits for no other process."""
    if not (checkpoint / item).is_dir():
        raise DamagedCheckpointError(checkpoint, f"{item} is missing")
    try:
        silence_orbax_errors()
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            return handler.restore(epath.Path(checkpoint / item), args=args)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever a flipped bit makes of a file's structure
        if (isinstance(error, OSError) and error.errno not in _DAMAGE_ERRNOS) or any(
            word in str(error) for word in _MACHINE_ERRORS
        ):
            raise
        raise DamagedCheckpointError(checkpoint, f"{item}: {describe_error(error)}") from error


@functools.cache
def silence_orbax_errors() -> None:
    """From now on, what orbax raises is not printed too: tracebacks of its threads, and of reads that nobody waits for.

    When one of many reads fails, it closes the event loop that the others report to: hundreds of lines. All else is printed
    as ever.
    """
    hook = sys.unraisablehook

    def without_loops(error: "sys.UnraisableHookArgs") -> None:
        code = getattr(error.object, "cr_code", None)
        if str(error.exc_value) != "Event loop is closed" and (
            code is None or "orbax" not in code.co_filename
        ):
            hook(error)

    sys.unraisablehook = without_loops
    logging.getLogger("absl").addFilter(
        lambda record: "orbax" not in pathlib.Path(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def describe_error(error: BaseException) -> str:
    """The first line of an error of orbax, without the places in its source."""
    lines = str(error).split(" [")[0].splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
