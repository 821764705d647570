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
from jaxsp.config import schema
from jaxsp.core import errors
from jaxsp.model import layers
from jaxsp.runtime import distributed, run_paths
from jaxsp.runtime.run_status import Pace, written
from jaxsp.training import host_offload, train_step

PARTIAL, DELETING = ".partial", ".deleting"
"""Behind the step, in the name of a checkpoint that is being written, or deleted."""

SLICED_BYTES = 2**20
"""Minimum bytes that each device must write of a replicated array for its devices to share the work.

orbax slices such arrays and compiles a program for each shape and device. For the small weights of
2 layers on 8 virtual devices these were 56 programs, and the first checkpoint waited 5.7 s for them
(2 shared CPU cores, 2026-11-23).
"""

LOOK_S = 5.0
"""Between two looks at a write that several processes wait for."""

_RUNNING, _DONE, _FAILED = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a write ended."""

    step: int
    failure: str | None
    """None: the checkpoint is whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Write:
    """A checkpoint on its way to the disk."""

    meta: reader.Meta
    job: concurrent.futures.Future
    """What this process does."""
    then: Callable[[], concurrent.futures.Future] | None = None
    """Begins what follows when all processes have done their job; None: the checkpoint is whole then."""


class Store:
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
        keep: schema.Checkpoint,
        pace: Pace | None = None,
        first: Callable[[], None] = lambda: None,
        loss_set: dict[str, str] | None = None,
    ):
        """Args:
        first: is done before each checkpoint; where it fails, none is written.
        loss_set: the data set whose loss ranks checkpoints for keep.keep_best.
        """
        self._directory, self._table, self._keep, self._pace = directory.absolute(), table, keep, pace or Pace()
        self._first, self._loss_set = first, loss_set
        self._num_bytes = 0
        """Bytes of a checkpoint's arrays; known from the first save on."""
        self._mib = 0
        """MiB that all processes have written, when they last agreed."""
        self._write: _Write | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICED_BYTES)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        self._handlers = {
            name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in (run_paths.MASTER, run_paths.OPT)
        }
        self._compiling: concurrent.futures.Future | None = None
        self.compile_s = 0.0
        """Seconds that the last `save` waited for the checksums to be compiled."""
        reader.hush()
        self.write_s: float | None = None
        """What the last checkpoint took until it was whole, waiting for steps between its parts left out."""
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in filter(_is_left, self._directory.glob("*")):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are there, the oldest first."""
        return run_paths.steps(self._directory)

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._write is not None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after a failure, the other processes would not come to agree on anything
        ends = kind is None or jax.process_count() == 1
        if ends:
            self.poll(wait=True)
            for handler in self._handlers.values():
                handler.close()
        self._pool.shutdown(wait=ends)

    def compile_ahead(self, state: train_step.State) -> None:
        """Compiles the checksums while the first steps run, so that the first `save` need not wait for it."""
        to_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        like = jax.tree.map(to_shape, _items(state))  # the first step takes the arrays' memory
        shapes = {name: leaf.shape for name, leaf in self._logical(state).items()}
        self._compiling = self._pool.submit(checksums.compile_programs, checksums.by_name(like), shapes)

    def save(self, state: train_step.State, meta: reader.Meta) -> Outcome | None:
        """Begins to write a step; returns when training may go on: with a state in host memory, when it is written.

        The outcome is that of `poll`, where it is known at once.
        """
        began = time.monotonic()
        assert self._write is None, "one at a time"
        assert meta.step not in self.steps, f"step {meta.step} is there already"
        items = _items(state)
        self._num_bytes = disk_space.num_bytes(items)
        meta = dataclasses.replace(meta, leaves=self._leaves(state))
        partial, alone = self._partial(meta.step), jax.process_count() == 1

        def write() -> concurrent.futures.Future:
            # copied before this returns, since the next step takes the memory, and written while that runs
            begun: list[Any] = []
            copied = _now(lambda: asyncio.run(self._copy(partial, items, begun)))

            def rest() -> None:
                parts = [*(_now(future.result) for future in begun), copied]
                if failed := [part for part in parts if part.exception()]:
                    failed[0].result()  # when all have ended: what they wrote is removed then
                if alone:
                    self._finish(meta)
                self.write_s = time.monotonic() - began

            return self._pool.submit(rest)

        def finish_all() -> None:
            began = time.monotonic()
            self._finish(meta)
            self.write_s = (self.write_s or 0.0) + time.monotonic() - began

        finish = lambda: self._pool.submit(finish_all) if jax.process_index() == 0 else _now(lambda: None)

        def begin() -> None:
            self._first()
            _make(partial, items)

        make = _now(begin)
        if (outcome := self._agree(_Write(meta=meta, job=make, then=write))) is not None:
            return outcome
        assert self._write is not None
        self._write = dataclasses.replace(self._write, then=None if alone else finish)
        # orbax writes what is in host memory out of that memory, which the next step takes for the new state
        return self.poll(wait=any(leaf.sharding.memory_kind == host_offload.KIND for leaf in jax.tree.leaves(items)))

    def record_loss(self, number: int, loss: float | None, *, early_stopping: dict[str, Any] | None) -> None:
        """Records the loss of a checkpoint that was evaluated after it was written. Process 0 does it for all.

        Args: early_stopping: fields of `early_stopping.State` after that evaluation.

        A failure is printed: the checkpoint is then ranked as one without a loss.
        """
        if jax.process_index() > 0:
            return
        try:
            self._first()
            path = self._directory / str(number)
            meta = reader.read_meta(path)
            meta = dataclasses.replace(
                meta, loss=loss, loss_set=self._loss_set, owes_evaluation=False, early_stopping=early_stopping
            )
            _write_meta(path, meta)
        except (OSError, errors.UserError) as error:
            distributed.say(f"checkpoint {number}: its loss could not be recorded: {reader.line(error)}")

    def poll(self, *, wait: bool = False) -> Outcome | None:
        """How the write ended, once, when it has; before that, and where there is none, None. All processes hear the same.

        Moves: with several processes, 8 bytes between all of them while a write is under way.
        """
        while (write := self._write) is not None:
            if wait:
                concurrent.futures.wait([write.job], timeout=None if jax.process_count() == 1 else LOOK_S)
            outcome = self._agree(write)
            if outcome is not None or (self._write is write and not wait):
                return outcome
        return None

    def _agree(self, write: _Write) -> Outcome | None:
        """Ends the write if it has failed somewhere or is whole; else begins its next part if all have done this one."""
        own = _RUNNING if not write.job.done() else _FAILED if write.job.exception() else _DONE
        of_all = np.array([own])
        if jax.process_count() > 1:
            told = multihost_utils.process_allgather(np.array([own, written() // 2**20], np.int32))
            of_all, of_all_mib = told[:, 0], int(told[:, 1].sum())
            if of_all_mib > self._mib + 1 and self._pace.now.writes:  # more than a progress bar's
                self._pace.alive()  # what another writes is a sign of life of all that wait for it
            self._mib = of_all_mib
        if (of_all == _RUNNING).any():
            return None
        self._write = None
        if (of_all == _FAILED).any():
            return Outcome(step=write.meta.step, failure=self._failure(write, int(np.argmax(of_all == _FAILED))))
        if write.then is None:
            return Outcome(step=write.meta.step, failure=None)
        self._write = _Write(meta=write.meta, job=write.then())
        return None

    def _failure(self, write: _Write, first: int) -> str:
        """What went wrong; what was written so far is removed, for the room that it takes."""
        index, error = jax.process_index(), write.job.exception()
        reason = f"process {first} could not write its part" if error is None else _reason(error)
        if error is not None and index > 0:
            distributed.say(f"checkpoint {write.meta.step}: {reason}")
        if index == 0:
            # what cannot be removed now is when the next is written
            shutil.rmtree(self._partial(write.meta.step), ignore_errors=True)
            reason += disk_space.shortage(self._directory, self._num_bytes)
        return reason

    def _partial(self, number: int) -> pathlib.Path:
        return self._directory / f"{number}{PARTIAL}"

    def _logical(self, state: train_step.State) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the state's arrays without padding, by name."""
        whole = checksums.logical(self._table, state.master, state.opt)
        return checksums.by_name({item: whole[item] for item in _items(state)})

    def _leaves(self, state: train_step.State) -> dict[str, dict[str, Any]]:
        like, arrays = self._logical(state), checksums.by_name(_items(state))
        shapes = {name: leaf.shape for name, leaf in like.items()}
        began = time.monotonic()
        with self._pace.compiles("digests") if self.write_s is None else contextlib.nullcontext():
            if self._compiling is not None:
                self._compiling.result()
            checksums.compile_programs(arrays, shapes)
        self.compile_s = time.monotonic() - began
        found = checksums.on_devices(arrays, shapes)
        return {
            name: {"digest": found[name], "dtype": str(leaf.dtype), "shape": list(leaf.shape)} for name, leaf in like.items()
        }

    async def _copy(self, partial: pathlib.Path, items: dict[str, Any], begun: list[Any]) -> None:
        for name, item in items.items():
            args = ocp.args.PyTreeSave(item)
            begun += await self._handlers[name].async_save(epath.Path(partial / name), args=args) or []

    def _finish(self, meta: reader.Meta) -> None:
        """Makes a checkpoint of what all processes have written, and deletes those that are not to be kept."""
        partial, final = self._partial(meta.step), self._directory / str(meta.step)
        for name, handler in self._handlers.items():
            if (partial / name).is_dir():
                handler.finalize(epath.Path(partial / name))
        _write_meta(partial, meta)
        partial.rename(final)
        # it is whole from here on, whatever becomes of others
        try:
            _sync(self._directory)
            for number in self._to_delete():
                # under another name first: a checkpoint that has its own is whole
                leaving = self._directory / f"{number}{DELETING}"
                (self._directory / str(number)).rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)  # else at the next start
        except OSError as error:
            distributed.say(f"checkpoint {meta.step} is whole, but an older one could not be deleted: {reader.line(error)}")

    def _to_delete(self) -> list[int]:
        policies = checkpoint_managers
        latest, best = policies.LatestN(self._keep.keep_latest), self._keep.keep_best
        policy: Any = latest
        if best:
            lowest = policies.BestN(get_metric_fn=float, reverse=True, n=best, keep_checkpoints_without_metrics=False)
            policy = policies.AnyPreservationPolicy([latest, lowest])
        # a folder that is called like a step and is none of ours stays
        ours = [
            path for number in self.steps if ((path := self._directory / str(number)) / run_paths.META / "metadata").is_file()
        ]
        infos = [_Info.of(path, self._loss_set) for path in ours]
        kept = policy.should_preserve(infos, context=policies.PreservationContext())
        return [info.step for info, keeps in zip(infos, kept, strict=True) if not keeps]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Info:
    """What orbax's policies look at."""

    step: int
    time: datetime.datetime
    metrics: float | None

    @classmethod
    def of(cls, path: pathlib.Path, loss_set: dict[str, str] | None) -> "_Info":
        """Reads a checkpoint's loss. One without a loss on this data set is never among the best; LatestN decides."""
        loss = None
        with contextlib.suppress(errors.UserError):
            meta = reader.read_meta(path)
            if loss_set is not None and meta.loss_set is not None and meta.loss_set["digest"] == loss_set["digest"]:
                loss = meta.loss
        return cls(step=int(path.name), time=datetime.datetime.fromtimestamp(path.stat().st_mtime), metrics=loss)


def leftover_bytes(directory: pathlib.Path) -> int:
    """Bytes of unfinished checkpoints in a folder, which the next Store deletes."""
    files = (file for path in filter(_is_left, directory.glob("*")) for file in path.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _reason(error: BaseException) -> str:
    """Says why a write failed. tensorstore puts the operating system's code at the end of several paths."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else reader.line(error)


def _is_left(path: pathlib.Path) -> bool:
    """Whether a folder is of a run that was killed while it wrote or deleted a checkpoint."""
    number, _, ending = path.name.partition(".")
    ours = {run_paths.MASTER, run_paths.OPT, run_paths.META}
    return number.isdecimal() and f".{ending}" in (PARTIAL, DELETING) and {child.name for child in path.iterdir()} <= ours


def _items(state: train_step.State) -> dict[str, Any]:
    """Items of a checkpoint; a run without optimizer state (sgd) has one."""
    return {run_paths.MASTER: state.master} | ({run_paths.OPT: state.opt} if jax.tree.leaves(state.opt) else {})


def _make(partial: pathlib.Path, items: dict[str, Any]) -> None:
    """The folders of a checkpoint. Process 0 makes them for all."""
    if jax.process_index() > 0:
        return
    if partial.exists():  # of a write that failed
        shutil.rmtree(partial)
    for name in (*items, run_paths.META):
        (partial / name).mkdir(parents=True)


def _write_meta(path: pathlib.Path, meta: reader.Meta) -> None:
    """Writes a checkpoint's metadata: after a crash at any moment, the old or the new file is there."""
    folder = path / run_paths.META
    partial = folder / f"metadata{PARTIAL}"
    with partial.open("w", encoding="utf-8") as file:
        file.write(reader.to_json(meta))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / "metadata")
    _sync(folder)


def _now(do: Callable[[], Any]) -> concurrent.futures.Future:
    """What a function gives, or raises, as a future."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    try:
        future.set_result(do())
    except Exception as error:  # whoever asks for the result raises it
        future.set_exception(error)
    return future


def _sync(folder: pathlib.Path) -> None:
    """Makes new names in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot, and keep names safe by themselves
            os.fsync(handle)
    finally:
        os.close(handle)
