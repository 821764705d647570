"""Writes the arrays of a checkpoint with orbax, and describes why a write failed."""

import asyncio
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxsp.checkpoint import reader
from jaxsp.runtime import run_paths

MIN_SLICED_BYTES = 2**20
"""Minimum bytes per device for a replicated array to be written in slices, one from each device.

orbax compiles a program that slices the array, for each shape and device. The small weights of 2
layers on 8 virtual devices needed 56 programs, and the first checkpoint waited 5.7 s for them
(2 shared CPU cores, 2026-11-23).
"""


class ArrayWriter:
    """Writes items of a checkpoint; all processes write their shards.

    orbax's handlers are used without its CheckpointManager, whose barriers would block the other
    processes for minutes after one has failed.
    """

    def __init__(self, *, has_separate_folders: bool) -> None:
        """Args: has_separate_folders: processes may write to folders of their own, whose files are
        put together later. orbax's OCDBT format needs one process that reads the files of all.
        """
        arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=MIN_SLICED_BYTES
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        self._handlers = {
            name: ocp.PyTreeCheckpointHandler(
                type_handler_registry=registry,
                use_ocdbt=not has_separate_folders,
                # Otherwise, on GPUs, the copies of all arrays are in XLA's pool of pinned host
                # memory, whose limit leaves room only for what a step offloads
                enable_pinned_host_transfer=False,
            )
            for name in (run_paths.MASTER, run_paths.OPT)
        }
        reader.silence_orbax_errors()

    def copy(
        self, folder: pathlib.Path, items: dict[str, Any]
    ) -> tuple[list[Any], list[Exception]]:
        """Copies the arrays to the host, and starts to write the copies.

        The next step may reuse the arrays' memory after that.

        Returns: the writes that were started ("commits"), and the error that prevented the others,
            if any: both for `wait_for_commits`.
        """
        commits: list[Any] = []

        async def copy_items() -> None:
            for name, item in items.items():  # an error leaves the commits of those before it
                args = ocp.args.PyTreeSave(item)
                futures = await self._handlers[name].async_save(
                    epath.Path(folder / name), args=args
                )
                commits.extend(futures or [])

        try:
            asyncio.run(copy_items())
        except Exception as error:  # wait_for_commits raises it, after the started ones have ended
            return commits, [error]
        return commits, []

    def finalize(self, folder: pathlib.Path) -> None:
        """Completes the items, after all processes have written their shards."""
        for name, handler in self._handlers.items():
            if (folder / name).is_dir():
                handler.finalize(epath.Path(folder / name))

    def close(self) -> None:
        """Closes orbax's handlers."""
        for handler in self._handlers.values():
            handler.close()


def wait_for_commits(commits: Sequence[Any], copy_errors: Sequence[Exception]) -> None:
    """Waits for all commits, even if one fails: only then can their files be removed.

    Raises: the first error of the commits, or of the copies.
    """
    failures = []
    for commit in commits:
        try:
            commit.result()
        except Exception as error:  # raised after all commits have ended
            failures.append(error)
    for failure in (*failures, *copy_errors):
        raise failure


def describe_failure(error: BaseException) -> str:
    """Describes why a write failed. tensorstore puts the system's error code after long paths."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else reader.describe_error(error)
