"""Asynchronous, atomic checkpoints, written while training continues."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, reader, retention, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta, EarlyStoppingState
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.run_storage import Uploads
from jaxsp.core import files, units
from jaxsp.core.errors import UserError
from jaxsp.system import device_memory, distributed
from jaxsp.system.watchdog import RunStatus, read_bytes_written
from jaxsp.training import train_state
from jaxsp.training.train_state import TrainState

MIN_SLICED_BYTES = 2**20
"""Minimum bytes per device for a replicated array to be written in slices, one from each device.
orbax compiles a program that slices the array, for each shape and device: 56 programs in 5.7 s for
the small weights of 2 layers on 8 virtual devices (2 shared CPU cores, 2026-11-23)."""

POLL_S = 5.0  # seconds between two checks of a write that several processes wait for

_RUNNING, _DONE, _FAILED = range(3)


def make_handler(*, has_separate_folders: bool) -> ocp.PyTreeCheckpointHandler:
    """Makes orbax's writer of arrays; all processes write their shards.

    Args: has_separate_folders: processes may write to folders of their own, whose files are put
        together later. orbax's OCDBT format needs one process that reads the files of all.
    """
    reader.silence_orbax_errors()
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICED_BYTES)
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_ocdbt=not has_separate_folders,
        # Otherwise, on GPUs, the copies of all arrays are in XLA's pool of pinned host memory,
        # whose limit leaves room only for what a step offloads
        enable_pinned_host_transfer=False,
    )


def start_writes(
    handler: ocp.PyTreeCheckpointHandler, folder: pathlib.Path, items: dict[str, Any]
) -> list[Any]:
    """Copies the arrays of a checkpoint to the host, and starts to write the copies.

    The next step may reuse the arrays' memory after that.

    Returns: the started writes ("commits") for `wait_for_commits`. After an error, the last one
        raises it.
    """
    commits: list[Any] = []
    try:
        for name, item in items.items():
            args = ocp.args.PyTreeSave(item)
            commits += asyncio.run(handler.async_save(epath.Path(folder / name), args=args)) or []
    except Exception as error:
        commits.append(Future())
        commits[-1].set_exception(error)
    return commits


def wait_for_commits(commits: Sequence[Any]) -> None:
    """Waits for all commits, even if one fails: only then can their files be removed.
    Raises: the first error."""
    with contextlib.ExitStack() as stack:  # calls all, the first one last
        for commit in commits:
            stack.callback(commit.result)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """Result of a write."""

    step: int
    failure: str | None
    """Reason of the failure; None if the checkpoint is complete."""
    upload_failure: str | None = None
    """Reason why a complete checkpoint is not in the run's object store."""


@dataclasses.dataclass(kw_only=True)
class _PendingWrite:
    """Write that has not ended."""

    step: int
    stages: Iterator[Future | None]
    future: Future | None = None
    """Background work of this process in this stage."""
    error: BaseException | None = None
    is_uploading: bool = False


@dataclasses.dataclass(eq=False)
class CheckpointWriter:
    """Writes the checkpoints of a run, `directory/STEP`; the latest and the best are kept.

    All processes write one checkpoint together, and call the same methods between the same steps.
    In these calls they agree on the state of the write: a disk that fails for one process fails for
    all, and none waits for a process that has given up. With orbax's CheckpointManager, the others
    would wait at a barrier for up to 20 minutes (0.12.8).
    """

    directory: pathlib.Path
    _: dataclasses.KW_ONLY
    table: layers.Weights
    config: CheckpointConfig
    status: RunStatus = dataclasses.field(default_factory=RunStatus)
    before_write: Callable[[], None] = lambda: None
    """Called before each checkpoint; if it raises, the write fails."""
    eval_set: dict[str, str] | None = None
    """Name and digest of the eval set that ranks checkpoints for `keep_best`."""
    is_writer: bool = False
    """This process writes folders and metadata, as process 0 always does."""
    has_separate_folders: dataclasses.InitVar[bool] = False
    """See `make_handler`."""
    uploads: Uploads | None = None
    write_s: float | None = dataclasses.field(default=None, init=False)
    """Duration of the last write, without the waits for steps between its stages."""

    def __post_init__(self, has_separate_folders: bool) -> None:
        self.directory = self.directory.absolute()
        self._trained = train_state.select_trained(self.table, self.table)
        self._num_bytes = 0  # of a checkpoint's arrays; known from the first `save`
        self._progress = 0
        """MiB that all processes have written, or progress of their uploads, at the last poll."""
        self._pending: _PendingWrite | None = None
        self._pool = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._handler = make_handler(has_separate_folders=has_separate_folders)
        self.is_writer |= jax.process_index() == 0
        if self.is_writer:
            self.directory.mkdir(parents=True, exist_ok=True)
            retention.remove_unfinished(self.directory)

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints in the directory, the oldest first."""
        return run_paths.list_steps(self.directory)

    @property
    def is_uploading(self) -> bool:
        """True while a checkpoint that is complete locally is uploaded. The same in all processes.
        The next one is written after that, so that an upload finds the files that it needs."""
        return self._pending is not None and self._pending.is_uploading

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after an exception here, the other processes would not come to an agreement
        can_wait = kind is None or jax.process_count() == 1
        if can_wait:
            self.poll(wait=True)
            self._handler.close()
        self._pool.shutdown(wait=can_wait)

    def save(self, state: TrainState, meta: CheckpointMeta) -> WriteOutcome | None:
        """Starts to write a checkpoint, and returns when training may continue.

        Arrays in host memory are written before this returns: orbax writes them from their own
        memory, which the next step reuses. Arrays on devices are only copied.

        Returns: the outcome if it is known already, as `poll` does.
        """
        began = time.monotonic()
        assert self._pending is None, "the previous write has not ended"
        assert meta.step not in self.steps, f"there is a checkpoint of step {meta.step} already"
        items = reader.list_items(state, self.table)
        self._num_bytes = sum(x.nbytes for x in jax.tree.leaves(items))
        unpadded = checksums.unpadded_shapes(self._trained, items)
        arrays = checksums.name_leaves(items)
        with self.status.compiling("checksums"):  # takes time before the first checkpoint
            checksums.compile_programs(arrays, unpadded)
        digests = checksums.compute_on_devices(arrays, unpadded)
        described = {
            name: {"digest": digests[name], "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
            for name, leaf in unpadded.items()
        }
        stages = self._write(items, dataclasses.replace(meta, arrays=described), began)
        self._pending = _PendingWrite(step=meta.step, stages=stages)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(items)}
        return self.poll(wait=device_memory.MEMORY_KIND in kinds)

    def record_eval(
        self, step: int, loss: float | None, *, early_stopping: EarlyStoppingState | None
    ) -> None:
        """Records an evaluation after the checkpoint was written. A failure is only printed."""
        if not self.is_writer:
            return
        fields: dict[str, Any] = {"eval_loss": loss, "eval_set": self.eval_set}
        fields |= {"early_stopping": early_stopping, "has_pending_evaluation": False}
        try:
            self.before_write()
            path = self.directory / str(step)
            reader.write_meta(path, dataclasses.replace(reader.read_meta(path), **fields))
        except (OSError, UserError) as error:
            reason = reader.describe_error(error)
            distributed.log(f"checkpoint {step}: its loss could not be recorded: {reason}")

    def poll(self, *, wait: bool = False) -> WriteOutcome | None:
        """Returns the outcome of the write once, in all processes, when it has ended.
        Moves: with several processes, 8 bytes between all of them while a write is pending."""
        while (write := self._pending) is not None:
            if wait and write.future is not None:
                is_watched = jax.process_count() == 1 and not self.is_uploading
                timeout = None if is_watched else POLL_S
                futures.wait([write.future], timeout=timeout)
            statuses = self._gather_statuses(write).tolist()
            if _RUNNING in statuses:
                if wait:
                    continue
                return None
            if _FAILED in statuses:
                self._pending = None
                return self._end_failed(write, statuses.index(_FAILED))
            write.future = None
            try:
                write.future = next(write.stages)
            except StopIteration:
                self._pending = None
                return WriteOutcome(step=write.step, failure=None)
            except Exception as error:  # _end_failed reports it
                write.error = error
        return None

    def _gather_statuses(self, write: _PendingWrite) -> np.ndarray:
        """Returns the status of the stage in each process.
        Progress of any process in writing or uploading counts for all that wait for it."""
        is_running = write.future is not None and not write.future.done()
        if write.future is not None and not is_running:
            write.error = write.future.exception()
        status = _DONE if write.error is None else _FAILED
        status = _RUNNING if is_running else status
        uploads = self.uploads if write.is_uploading else None
        progress = read_bytes_written() // 2**20 if uploads is None else uploads.store.progress
        own = np.array([status, progress % 2**20], np.int32)
        statuses, all_progress = multihost_utils.process_allgather(own).T
        added = int(all_progress.sum()) - self._progress
        self._progress += added
        is_writing = self.status.activity.is_writing and added > 1  # a progress bar writes less
        if (uploads is None and is_writing) or (uploads is not None and added != 0):
            self.status.heartbeat()
        return statuses

    def _write(
        self, items: dict[str, Any], meta: CheckpointMeta, began: float
    ) -> Iterator[Future | None]:
        """Writes a checkpoint in stages. Each starts after all processes have finished the last.

        Args: began: time of the call of `save` (time.monotonic).
        Yields: background work of this process in each stage, the same number in all processes.
        """
        step = meta.step
        partial = self._partial_path(step)
        self.before_write()
        if self.is_writer:
            shutil.rmtree(partial, ignore_errors=True)
            for name in (*items, run_paths.META):
                (partial / name).mkdir(parents=True)
        yield None
        commits = start_writes(self._handler, partial, items)
        del items

        def finish_writing() -> None:
            wait_for_commits(commits)
            if self.uploads is not None and step in self.uploads.complete:
                self.uploads.delete(step)  # the run repeats this step
            self.write_s = time.monotonic() - began

        yield from self._submit(finish_writing, lambda: self._finalize(meta))
        if (uploads := self.uploads) is not None:
            assert self._pending is not None
            self._pending.is_uploading = True
            yield from self._submit(
                uploads.claim, lambda: uploads.upload_shards(step), lambda: uploads.finish(step)
            )

    def _submit(self, *functions: Callable[[], None]) -> Iterator[Future]:
        """Yields stages that call functions in the background.
        A single process needs one stage for all of them, and no poll between two."""
        if jax.process_count() == 1:
            yield self._pool.submit(lambda: [function() for function in functions])
            return
        for function in functions:
            yield self._pool.submit(function)

    def _finalize(self, meta: CheckpointMeta) -> None:
        """Completes a checkpoint that all processes have written, and deletes superseded ones."""
        if not self.is_writer:
            return
        began = time.monotonic()
        partial = self._partial_path(meta.step)
        for item in (run_paths.MASTER, run_paths.OPT):
            if (partial / item).is_dir():
                self._handler.finalize(epath.Path(partial / item))
        reader.write_meta(partial, meta)
        partial.rename(self.directory / str(meta.step))
        # from here on the checkpoint is complete, whatever happens to older ones
        try:
            files.sync_dir(self.directory)  # its name survives a power failure
            last = self.directory.parent / run_paths.LAST_CHECKPOINT_FILE
            files.write_json(last, {"step": meta.step})
            retention.delete_superseded(self.directory, self.config, self.eval_set)
        except OSError as error:
            distributed.log(
                f"checkpoint {meta.step} is complete, but it could not be recorded, or an older "
                f"one could not be deleted: {reader.describe_error(error)}"
            )
        self.write_s = (self.write_s or 0.0) + time.monotonic() - began

    def _end_failed(self, write: _PendingWrite, first: int) -> WriteOutcome:
        """Removes what a failed write left. Args: first: index of the first failed process."""
        step = write.step
        verb = "upload" if write.is_uploading else "write"
        reason = f"process {first} could not {verb} its part"
        if write.is_uploading:
            self.uploads = None
            return WriteOutcome(step=step, failure=None, upload_failure=str(write.error or reason))
        if write.error is not None:
            # TensorStore puts the system's error code after long paths
            code = re.search(r"os_error_code='(\d+)'", str(write.error))
            reason = os.strerror(int(code[1])) if code else reader.describe_error(write.error)
            if jax.process_index() > 0:
                distributed.log(f"checkpoint {step}: {reason}")
        if self.is_writer:
            # the next write removes what cannot be removed now
            shutil.rmtree(self._partial_path(step), ignore_errors=True)
            free = retention.free_bytes(self.directory)
            if free is not None and free < self._num_bytes:
                needed = units.format_bytes(self._num_bytes)
                reason += f" ({needed} needed, {units.format_bytes(free)} free)"
        return WriteOutcome(step=step, failure=reason)

    def _partial_path(self, step: int) -> pathlib.Path:
        return self.directory / f"{step}{files.PARTIAL_SUFFIX}"
