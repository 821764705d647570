"""Checkpoints written while training goes on: whole or not at all, the newest and the best kept."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from jaxsp.checkpoint import checksums, disk_space, reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.config.run_schema import CheckpointConfig
from jaxsp.core.errors import UserError
from jaxsp.model import layers
from jaxsp.runtime import distributed, run_paths
from jaxsp.runtime.run_status import RunStatus, read_bytes_written
from jaxsp.training import host_offload
from jaxsp.training.train_step import TrainState

PARTIAL_SUFFIX, DELETING_SUFFIX = ".partial", ".deleting"
"""Behind the step, in the name of a checkpoint that is being written, or deleted."""

MIN_SLICED_BYTES = 2**20
"""Minimum bytes that each device must write of a replicated array for its devices to share the work.

orbax slices such arrays and compiles a program for each shape and device. For the small weights of
2 layers on 8 virtual devices these were 56 programs, and the first checkpoint waited 5.7 s for them
(2 shared CPU cores, 2026-11-23).
"""

POLL_S = 5.0
"""Between two looks at a write that several processes wait for."""

_RUNNING, _DONE, _FAILED = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """How a write ended."""

    step: int
    failure: str | None
    """None: the checkpoint is whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingWrite:
    """A checkpoint on its way to the disk."""

    meta: CheckpointMeta
    future: concurrent.futures.Future
    """What this process does."""
    next_stage: Callable[[], concurrent.futures.Future] | None = None
    """Begins what follows when all processes have done their job; None: the checkpoint is whole then."""


class CheckpointWriter:
    """The checkpoints of a run, `directory/STEP`.

    With several processes all of them make one, and call the same methods between the same steps: there they agree how the
    write goes, so that a disk that fails under one process fails for all, and nobody waits for one that has given up. (That
    is why orbax's handlers are used here without its CheckpointManager, whose barriers would hold the others for minutes.)
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        table: layers.Weights,
        retention: CheckpointConfig,
        status: RunStatus | None = None,
        before_write: Callable[[], None] = lambda: None,
        eval_set: dict[str, str] | None = None,
    ):
        """Args:
        first: is done before each checkpoint; where it fails, none is written.
        loss_set: the data set whose loss ranks checkpoints for keep.keep_best.
        """
        self._directory, self._table, self._retention, self._status = (
            directory.absolute(),
            table,
            retention,
            status or RunStatus(),
        )
        self._before_write, self._eval_set = before_write, eval_set
        self._num_bytes = 0
        """Bytes of a checkpoint's arrays; known from the first save on."""
        self._written_mib = 0
        """MiB that all processes have written, when they last agreed."""
        self._pending: _PendingWrite | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=MIN_SLICED_BYTES
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        self._handlers = {
            name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
            for name in (run_paths.MASTER, run_paths.OPT)
        }
        self._compiling: concurrent.futures.Future | None = None
        self.compile_s = 0.0
        """Seconds that the last `save` waited for the checksums to be compiled."""
        reader.silence_orbax_errors()
        self.write_s: float | None = None
        """What the last checkpoint took until it was whole, waiting for steps between its parts left out."""
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in filter(_is_unfinished, self._directory.glob("*")):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are there, the oldest first."""
        return run_paths.list_steps(self._directory)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after a failure, the other processes would not come to agree on anything
        ends = kind is None or jax.process_count() == 1
        if ends:
            self.poll(wait=True)
            for handler in self._handlers.values():
                handler.close()
        self._pool.shutdown(wait=ends)

    def compile_ahead(self, state: TrainState) -> None:
        """Compiles the checksums while the first steps run, so that the first `save` need not wait for it."""
        to_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        like = jax.tree.map(to_shape, _items(state))  # the first step takes the arrays' memory
        shapes = {name: leaf.shape for name, leaf in self._unpadded_shapes(state).items()}
        self._compiling = self._pool.submit(
            checksums.compile_programs, checksums.name_leaves(like), shapes
        )

    def save(self, state: TrainState, meta: CheckpointMeta) -> WriteOutcome | None:
        """Begins to write a step; returns when training may go on: with a state in host memory, when it is written.

        The outcome is that of `poll`, where it is known at once.
        """
        began = time.monotonic()
        assert self._pending is None, "one at a time"
        assert meta.step not in self.steps, f"step {meta.step} is there already"
        items = _items(state)
        self._num_bytes = disk_space.tree_bytes(items)
        meta = dataclasses.replace(meta, arrays=self._checksum_arrays(state))
        partial, alone = self._partial_path(meta.step), jax.process_count() == 1

        def write() -> concurrent.futures.Future:
            # copied before this returns, since the next step takes the memory, and written while that runs
            begun: list[Any] = []
            copied = _run_as_future(lambda: asyncio.run(self._copy(partial, items, begun)))

            def rest() -> None:
                parts = [*(_run_as_future(future.result) for future in begun), copied]
                if failed := [part for part in parts if part.exception()]:
                    failed[0].result()  # when all have ended: what they wrote is removed then
                if alone:
                    self._finalize(meta)
                self.write_s = time.monotonic() - began

            return self._pool.submit(rest)

        def finish_all() -> None:
            began = time.monotonic()
            self._finalize(meta)
            self.write_s = (self.write_s or 0.0) + time.monotonic() - began

        finish = lambda: (
            self._pool.submit(finish_all)
            if jax.process_index() == 0
            else _run_as_future(lambda: None)
        )

        def begin() -> None:
            self._before_write()
            _make_dirs(partial, items)

        make = _run_as_future(begin)
        if (
            outcome := self._advance(_PendingWrite(meta=meta, future=make, next_stage=write))
        ) is not None:
            return outcome
        assert self._pending is not None
        self._pending = dataclasses.replace(self._pending, next_stage=None if alone else finish)
        # orbax writes what is in host memory out of that memory, which the next step takes for the new state
        return self.poll(
            wait=any(
                leaf.sharding.memory_kind == host_offload.MEMORY_KIND
                for leaf in jax.tree.leaves(items)
            )
        )

    def record_eval(
        self, step: int, loss: float | None, *, early_stopping: dict[str, Any] | None
    ) -> None:
        """Records the loss of a checkpoint that was evaluated after it was written. Process 0 does it for all.

        Args: early_stopping: fields of `early_stopping.State` after that evaluation.

        A failure is printed: the checkpoint is then ranked as one without a loss.
        """
        if jax.process_index() > 0:
            return
        try:
            self._before_write()
            path = self._directory / str(step)
            meta = reader.read_meta(path)
            meta = dataclasses.replace(
                meta,
                eval_loss=loss,
                eval_set=self._eval_set,
                has_pending_evaluation=False,
                early_stopping=early_stopping,
            )
            _write_meta(path, meta)
        except (OSError, UserError) as error:
            distributed.log(
                f"checkpoint {step}: its loss could not be recorded: {reader.describe_error(error)}"
            )

    def poll(self, *, wait: bool = False) -> WriteOutcome | None:
        """How the write ended, once, when it has; before that, and where there is none, None. All processes hear the same.

        Moves: with several processes, 8 bytes between all of them while a write is under way.
        """
        while (write := self._pending) is not None:
            if wait:
                concurrent.futures.wait(
                    [write.future], timeout=None if jax.process_count() == 1 else POLL_S
                )
            outcome = self._advance(write)
            if outcome is not None or (self._pending is write and not wait):
                return outcome
        return None

    def _advance(self, write: _PendingWrite) -> WriteOutcome | None:
        """Ends the write if it has failed somewhere or is whole; else begins its next part if all have done this one."""
        own = (
            _RUNNING if not write.future.done() else _FAILED if write.future.exception() else _DONE
        )
        of_all = np.array([own])
        if jax.process_count() > 1:
            told = multihost_utils.process_allgather(
                np.array([own, read_bytes_written() // 2**20], np.int32)
            )
            of_all, of_all_mib = told[:, 0], int(told[:, 1].sum())
            if (
                of_all_mib > self._written_mib + 1 and self._status.activity.is_writing
            ):  # more than a progress bar's
                self._status.heartbeat()  # what another writes is a sign of life of all that wait for it
            self._written_mib = of_all_mib
        if (of_all == _RUNNING).any():
            return None
        self._pending = None
        if (of_all == _FAILED).any():
            return WriteOutcome(
                step=write.meta.step,
                failure=self._clean_up_failure(write, int(np.argmax(of_all == _FAILED))),
            )
        if write.next_stage is None:
            return WriteOutcome(step=write.meta.step, failure=None)
        self._pending = _PendingWrite(meta=write.meta, future=write.next_stage())
        return None

    def _clean_up_failure(self, write: _PendingWrite, first: int) -> str:
        """What went wrong; what was written so far is removed, for the room that it takes."""
        index, error = jax.process_index(), write.future.exception()
        reason = (
            f"process {first} could not write its part"
            if error is None
            else _describe_failure(error)
        )
        if error is not None and index > 0:
            distributed.log(f"checkpoint {write.meta.step}: {reason}")
        if index == 0:
            # what cannot be removed now is when the next is written
            shutil.rmtree(self._partial_path(write.meta.step), ignore_errors=True)
            reason += disk_space.describe_shortage(self._directory, self._num_bytes)
        return reason

    def _partial_path(self, number: int) -> pathlib.Path:
        return self._directory / f"{number}{PARTIAL_SUFFIX}"

    def _unpadded_shapes(self, state: TrainState) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the state's arrays without padding, by name."""
        whole = checksums.unpadded_shapes(self._table, state.master, state.opt_state)
        return checksums.name_leaves({item: whole[item] for item in _items(state)})

    def _checksum_arrays(self, state: TrainState) -> dict[str, dict[str, Any]]:
        like, arrays = self._unpadded_shapes(state), checksums.name_leaves(_items(state))
        shapes = {name: leaf.shape for name, leaf in like.items()}
        began = time.monotonic()
        with (
            self._status.compiling("digests") if self.write_s is None else contextlib.nullcontext()
        ):
            if self._compiling is not None:
                self._compiling.result()
            checksums.compile_programs(arrays, shapes)
        self.compile_s = time.monotonic() - began
        found = checksums.compute_on_devices(arrays, shapes)
        return {
            name: {"digest": found[name], "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
            for name, leaf in like.items()
        }

    async def _copy(self, partial: pathlib.Path, items: dict[str, Any], begun: list[Any]) -> None:
        for name, item in items.items():
            args = ocp.args.PyTreeSave(item)
            begun += (
                await self._handlers[name].async_save(epath.Path(partial / name), args=args) or []
            )

    def _finalize(self, meta: CheckpointMeta) -> None:
        """Makes a checkpoint of what all processes have written, and deletes those that are not to be kept."""
        partial, final = self._partial_path(meta.step), self._directory / str(meta.step)
        for name, handler in self._handlers.items():
            if (partial / name).is_dir():
                handler.finalize(epath.Path(partial / name))
        _write_meta(partial, meta)
        partial.rename(final)
        # it is whole from here on, whatever becomes of others
        try:
            _sync_dir(self._directory)
            for number in self._steps_to_delete():
                # under another name first: a checkpoint that has its own is whole
                leaving = self._directory / f"{number}{DELETING_SUFFIX}"
                (self._directory / str(number)).rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)  # else at the next start
        except OSError as error:
            distributed.log(
                f"checkpoint {meta.step} is whole, but an older one could not be deleted: {reader.describe_error(error)}"
            )

    def _steps_to_delete(self) -> list[int]:
        policies = checkpoint_managers
        latest, best = policies.LatestN(self._retention.keep_latest), self._retention.keep_best
        policy: Any = latest
        if best:
            lowest = policies.BestN(
                get_metric_fn=float, reverse=True, n=best, keep_checkpoints_without_metrics=False
            )
            policy = policies.AnyPreservationPolicy([latest, lowest])
        # a folder that is called like a step and is none of ours stays
        ours = [
            path
            for number in self.steps
            if ((path := self._directory / str(number)) / run_paths.META / "metadata").is_file()
        ]
        infos = [_PolicyInfo.read(path, self._eval_set) for path in ours]
        kept = policy.should_preserve(infos, context=policies.PreservationContext())
        return [info.step for info, keeps in zip(infos, kept, strict=True) if not keeps]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PolicyInfo:
    """What orbax's policies look at."""

    step: int
    time: datetime.datetime
    metrics: float | None

    @classmethod
    def read(cls, path: pathlib.Path, loss_set: dict[str, str] | None) -> "_PolicyInfo":
        """Reads a checkpoint's loss. One without a loss on this data set is never among the best; LatestN decides."""
        loss = None
        with contextlib.suppress(UserError):
            meta = reader.read_meta(path)
            if (
                loss_set is not None
                and meta.eval_set is not None
                and meta.eval_set["digest"] == loss_set["digest"]
            ):
                loss = meta.eval_loss
        return cls(
            step=int(path.name),
            time=datetime.datetime.fromtimestamp(path.stat().st_mtime),
            metrics=loss,
        )


def leftover_bytes(directory: pathlib.Path) -> int:
    """Bytes of unfinished checkpoints in a folder, which the next Store deletes."""
    files = (
        file for path in filter(_is_unfinished, directory.glob("*")) for file in path.rglob("*")
    )
    return sum(file.stat().st_size for file in files if file.is_file())


def _describe_failure(error: BaseException) -> str:
    """Says why a write failed. tensorstore puts the operating system's code at the end of several paths."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else reader.describe_error(error)


def _is_unfinished(path: pathlib.Path) -> bool:
    """Whether a folder is of a run that was killed while it wrote or deleted a checkpoint."""
    number, _, ending = path.name.partition(".")
    ours = {run_paths.MASTER, run_paths.OPT, run_paths.META}
    return (
        number.isdecimal()
        and f".{ending}" in (PARTIAL_SUFFIX, DELETING_SUFFIX)
        and {child.name for child in path.iterdir()} <= ours
    )


def _items(state: TrainState) -> dict[str, Any]:
    """Items of a checkpoint; a run without optimizer state (sgd) has one."""
    return {run_paths.MASTER: state.master} | (
        {run_paths.OPT: state.opt_state} if jax.tree.leaves(state.opt_state) else {}
    )


def _make_dirs(partial: pathlib.Path, items: dict[str, Any]) -> None:
    """The folders of a checkpoint. Process 0 makes them for all."""
    if jax.process_index() > 0:
        return
    if partial.exists():  # of a write that failed
        shutil.rmtree(partial)
    for name in (*items, run_paths.META):
        (partial / name).mkdir(parents=True)


def _write_meta(path: pathlib.Path, meta: CheckpointMeta) -> None:
    """Writes a checkpoint's metadata: after a crash at any moment, the old or the new file is there."""
    folder = path / run_paths.META
    partial = folder / f"metadata{PARTIAL_SUFFIX}"
    with partial.open("w", encoding="utf-8") as file:
        file.write(reader.to_json(meta))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / "metadata")
    _sync_dir(folder)


def _run_as_future(do: Callable[[], Any]) -> concurrent.futures.Future:
    """What a function gives, or raises, as a future."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    try:
        future.set_result(do())
    except Exception as error:  # whoever asks for the result raises it
        future.set_exception(error)
    return future


def _sync_dir(folder: pathlib.Path) -> None:
    """Makes new names in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(
            OSError
        ):  # some file systems cannot, and keep names safe by themselves
            os.fsync(handle)
    finally:
        os.close(handle)
