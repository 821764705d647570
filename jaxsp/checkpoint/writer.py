"""Asynchronous, atomic checkpoints, written while training continues."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.checkpoint import array_writer, checksums, disk_space, files, reader
from jaxsp.checkpoint.array_writer import ArrayWriter
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core import files as core_files
from jaxsp.core import host_memory
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.runtime.run_status import RunStatus, read_bytes_written
from jaxsp.storage.run_storage import Uploads
from jaxsp.training import trainable
from jaxsp.training.early_stopping import EarlyStoppingState
from jaxsp.training.train_state import TrainState

POLL_S = 5.0
"""Seconds between two checks of a write that several processes wait for."""

_RUNNING = 0
_DONE = 1
_FAILED = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """Result of a write."""

    step: int
    failure: str | None
    """Reason of the failure; None if the checkpoint is complete."""
    upload_failure: str | None = None
    """Reason why a complete checkpoint is not in the object store of the run."""


class WriteStage(enum.Enum):
    """Stages of a write. A stage starts when all processes have finished the one before it."""

    PREPARING = enum.auto()
    """Making folders (process 0)."""
    WRITING = enum.auto()
    """Copying the arrays, then writing them in the background."""
    FINALIZING = enum.auto()
    """Writing metadata, renaming, and deleting old checkpoints (process 0). A single process does
    this at the end of WRITING."""
    UPLOADING = enum.auto()
    """Uploading the shards to the run's object store, if it has one."""
    COMPLETING = enum.auto()
    """Uploading the metadata (process 0)."""


@dataclasses.dataclass(kw_only=True)
class _PendingWrite:
    """Write that has not ended."""

    meta: CheckpointMeta
    items: dict[str, Any]
    began: float
    """Time of the call of `save` (time.monotonic)."""
    stage: WriteStage = WriteStage.PREPARING
    future: concurrent.futures.Future | None = None
    """Background work of this process in this stage."""
    error: BaseException | None = None

    def check_status(self) -> int:
        if self.future is not None and self.error is None:
            if not self.future.done():
                return _RUNNING
            self.error = self.future.exception()
        return _DONE if self.error is None else _FAILED


class CheckpointWriter:
    """Writes the checkpoints of a run, `directory/STEP`; the latest and the best are kept.

    All processes write one checkpoint together, and call the same methods between the same steps.
    In these calls they agree on the state of the write: a disk that fails for one process fails for
    all, and none waits for a process that has given up.
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
        has_separate_folders: bool = False,
        uploads: Uploads | None = None,
    ):
        """Args:
        before_write: called before each checkpoint; if it raises, the write fails.
        eval_set: name and digest of the eval set that ranks checkpoints for `keep_best`.
        has_separate_folders: see ArrayWriter.
        uploads: those of a run in an object store.
        """
        self._directory = directory.absolute()
        self._table = table
        self._trained = trainable.select_trained(table, table)
        self._retention = retention
        self._status = status or RunStatus()
        self._before_write = before_write
        self._eval_set = eval_set
        self._num_bytes = 0
        """Bytes of a checkpoint's arrays; known from the first `save`."""
        self._written_mib = 0
        self._pending: _PendingWrite | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._arrays = ArrayWriter(has_separate_folders=has_separate_folders)
        self._compiling: concurrent.futures.Future | None = None
        self.compile_s = 0.0
        """Seconds that the last `save` waited for the checksum programs to compile."""
        self.write_s: float | None = None
        """Duration of the last write, without the waits for steps between its stages."""
        self._uploads = uploads
        self._is_writer = run_dir.is_writer(self._directory)
        if self._is_writer:
            self._directory.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(self._directory)

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints in the directory, the oldest first."""
        return run_paths.list_steps(self._directory)

    @property
    def is_uploading(self) -> bool:
        """True while a checkpoint that is complete locally is uploaded. The same in all processes.

        The next one is written after that, so that an upload finds the files that it needs.
        """
        stages = (WriteStage.UPLOADING, WriteStage.COMPLETING)
        return self._pending is not None and self._pending.stage in stages

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after an exception here, the other processes would not come to an agreement
        can_wait = kind is None or jax.process_count() == 1
        if can_wait:
            self.poll(wait=True)
            self._arrays.close()
        self._pool.shutdown(wait=can_wait)

    def compile_ahead(self, state: TrainState) -> None:
        """Compiles the checksum programs during the first steps, before the first `save`."""
        # shapes only: the first step reuses the memory of the arrays
        items = jax.tree.map(checksums.to_shape, reader.list_items(state, self._table))
        unpadded = checksums.unpadded_shapes(self._trained, items)
        shapes = {name: leaf.shape for name, leaf in unpadded.items()}
        self._compiling = self._pool.submit(
            checksums.compile_programs, checksums.name_leaves(items), shapes
        )

    def save(self, state: TrainState, meta: CheckpointMeta) -> WriteOutcome | None:
        """Starts to write a checkpoint, and returns when training may continue.

        Arrays in host memory are written before this returns: orbax writes them from their own
        memory, which the next step reuses. Arrays on devices are only copied.

        Returns: the outcome if it is known already, as `poll` does.
        """
        began = time.monotonic()
        assert self._pending is None, "the previous write has not ended"
        assert meta.step not in self.steps, f"there is a checkpoint of step {meta.step} already"
        items = reader.list_items(state, self._table)
        self._num_bytes = disk_space.tree_bytes(items)
        meta = dataclasses.replace(meta, arrays=self._checksum_arrays(items))
        self._pending = _PendingWrite(meta=meta, items=items, began=began)
        self._start_stage(self._pending, WriteStage.PREPARING)
        has_host_arrays = any(
            leaf.sharding.memory_kind == host_memory.MEMORY_KIND for leaf in jax.tree.leaves(items)
        )
        return self.poll(wait=has_host_arrays)

    def record_eval(
        self, step: int, loss: float | None, *, early_stopping: EarlyStoppingState | None
    ) -> None:
        """Records the loss of a checkpoint that was evaluated after it was written.

        Process 0 writes it. A failure is printed; the checkpoint then ranks as one without a loss.

        Args: early_stopping: state after that evaluation.
        """
        if not self._is_writer:
            return
        try:
            self._before_write()
            path = self._directory / str(step)
            meta = dataclasses.replace(
                reader.read_meta(path),
                eval_loss=loss,
                eval_set=self._eval_set,
                has_pending_evaluation=False,
                early_stopping=early_stopping,
            )
            files.write_meta(path, meta)
        except (OSError, UserError) as error:
            reason = reader.describe_error(error)
            distributed.log(f"checkpoint {step}: its loss could not be recorded: {reason}")

    def poll(self, *, wait: bool = False) -> WriteOutcome | None:
        """Returns the outcome of the write once, when it has ended; otherwise None.

        All processes get the same result.
        Moves: with several processes, 8 bytes between all of them while a write is pending.
        """
        while (write := self._pending) is not None:
            stage = write.stage
            if wait and write.future is not None:
                is_watched = jax.process_count() == 1 and not self.is_uploading
                timeout = None if is_watched else POLL_S
                concurrent.futures.wait([write.future], timeout=timeout)
            outcome = self._advance(write)
            if outcome is not None or (write.stage == stage and not wait):
                return outcome
        return None

    def _advance(self, write: _PendingWrite) -> WriteOutcome | None:
        """Starts the next stage if all processes have finished this one.

        Returns: the outcome if that was the last stage, or if a process has failed.
        """
        statuses = self._gather_statuses(write)
        if (statuses == _RUNNING).any():
            return None
        if (statuses == _FAILED).any():
            first = int(np.argmax(statuses == _FAILED))
            if self.is_uploading:
                self._pending = None
                self._uploads = None
                reason = str(write.error or f"process {first} could not upload its part")
                return WriteOutcome(step=write.meta.step, failure=None, upload_failure=reason)
            self._pending = None
            return WriteOutcome(step=write.meta.step, failure=self._clean_up_failure(write, first))
        if write.stage == WriteStage.PREPARING:
            self._start_stage(write, WriteStage.WRITING)
        elif write.stage == WriteStage.WRITING and jax.process_count() > 1:
            self._start_stage(write, WriteStage.FINALIZING)
        elif self._uploads is not None and not self.is_uploading:
            self._start_stage(write, WriteStage.UPLOADING)
        elif write.stage == WriteStage.UPLOADING:
            self._start_stage(write, WriteStage.COMPLETING)
        else:
            self._pending = None
            return WriteOutcome(step=write.meta.step, failure=None)
        return None

    def _gather_statuses(self, write: _PendingWrite) -> np.ndarray:
        """Returns the status of the stage in each process.

        Bytes that any process has written count as progress of all that wait for it.
        """
        own = np.array([write.check_status(), read_bytes_written() // 2**20], np.int32)
        statuses, written_mib = multihost_utils.process_allgather(own).T
        total_mib = int(written_mib.sum())
        has_progress = total_mib > self._written_mib + 1  # a progress bar writes less
        if self.is_uploading or (has_progress and self._status.activity.is_writing):
            self._status.heartbeat()
        self._written_mib = total_mib
        return statuses

    def _start_stage(self, write: _PendingWrite, stage: WriteStage) -> None:
        """Does the part of a stage that training waits for, and starts the rest."""
        write.stage = stage
        write.future = None
        try:
            match stage:
                case WriteStage.PREPARING:
                    self._before_write()
                    if self._uploads is not None and write.meta.step in self._uploads.complete:
                        self._uploads.delete(write.meta.step)
                    if self._is_writer:
                        files.make_dirs(self._partial_path(write.meta.step), write.items)
                case WriteStage.WRITING:
                    partial = self._partial_path(write.meta.step)
                    commits, errors = self._arrays.copy(partial, write.items)
                    write.items = {}
                    write.future = self._pool.submit(self._finish_writing, write, commits, errors)
                case WriteStage.FINALIZING if self._is_writer:
                    write.future = self._pool.submit(self._time_finalize, write.meta)
                case WriteStage.UPLOADING if self._uploads is not None:
                    write.future = self._pool.submit(self._uploads.upload_shards, write.meta.step)
                case WriteStage.COMPLETING if self._uploads is not None:
                    write.future = self._pool.submit(self._uploads.finish, write.meta.step)
        except Exception as error:  # _clean_up_failure reports it
            write.error = error

    def _finish_writing(
        self, write: _PendingWrite, commits: Sequence[Any], errors: list[Exception]
    ) -> None:
        array_writer.wait_for_commits(commits, errors)
        if jax.process_count() == 1:
            self._finalize(write.meta)
        self.write_s = time.monotonic() - write.began

    def _time_finalize(self, meta: CheckpointMeta) -> None:
        began = time.monotonic()
        self._finalize(meta)
        self.write_s = (self.write_s or 0.0) + time.monotonic() - began

    def _finalize(self, meta: CheckpointMeta) -> None:
        """Completes a checkpoint that all processes have written, and deletes superseded ones."""
        partial = self._partial_path(meta.step)
        self._arrays.finalize(partial)
        files.write_meta(partial, meta)
        partial.rename(self._directory / str(meta.step))
        # from here on the checkpoint is complete, whatever happens to older ones
        try:
            files.record_complete(self._directory, meta.step)
            files.delete_superseded(self._directory, self._retention, self._eval_set)
        except OSError as error:
            distributed.log(
                f"checkpoint {meta.step} is complete, but it could not be recorded, or an older "
                f"one could not be deleted: {reader.describe_error(error)}"
            )

    def _clean_up_failure(self, write: _PendingWrite, first: int) -> str:
        """Returns the reason of a failure. Removes what was written, to free its space.

        Args: first: index of the first process that failed.
        """
        step = write.meta.step
        reason = f"process {first} could not write its part"
        if write.error is not None:
            reason = array_writer.describe_failure(write.error)
            if jax.process_index() > 0:
                distributed.log(f"checkpoint {step}: {reason}")
        if self._is_writer:
            # the next write removes what cannot be removed now
            shutil.rmtree(self._partial_path(step), ignore_errors=True)
            reason += disk_space.describe_shortage(self._directory, self._num_bytes)
        return reason

    def _partial_path(self, step: int) -> pathlib.Path:
        return self._directory / f"{step}{core_files.PARTIAL_SUFFIX}"

    def _checksum_arrays(self, items: dict[str, Any]) -> dict[str, dict[str, Any]]:
        unpadded = checksums.unpadded_shapes(self._trained, items)
        arrays = checksums.name_leaves(items)
        shapes = {name: leaf.shape for name, leaf in unpadded.items()}
        began = time.monotonic()
        status: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.write_s is None:  # the first checkpoint
            status = self._status.compiling("checksums")
        with status:
            if self._compiling is not None:
                self._compiling.result()
            checksums.compile_programs(arrays, shapes)
        self.compile_s = time.monotonic() - began
        digests = checksums.compute_on_devices(arrays, shapes)
        return {
            name: {"digest": digests[name], "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
            for name, leaf in unpadded.items()
        }
