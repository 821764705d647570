"""The device mesh: replica x data x seq."""

import math
import os
from collections.abc import Mapping, MutableMapping

import jax

from jaxsp.config.schema import Config, MeshConfig
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError
from jaxsp.runtime import cluster

GPU_MEMORY_FRACTION = 0.92
"""Of a GPU's memory, what JAX takes when it starts, unless XLA_CLIENT_MEM_FRACTION says otherwise; its own default is 0.75. The
rest, 6 GiB of an H100's 79, is for CUDA and NCCL."""

DEVICES_PER_NODE = 8
"""GPUs of a node, unless the user gives another number."""

PROCESS_OVERHEAD_BYTES = 6 * 2**30
"""Host memory of a process beside its arrays: Python, CUDA, NCCL, staging of copies and autotuning."""

OS_RESERVED_BYTES = 8 * 2**30
"""Host memory of a node for the operating system."""

COLLECTIVE_TIMEOUTS = (
    "xla_cpu_collective_call_terminate_timeout_seconds",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "xla_cpu_collective_timeout_seconds",
)
"""XLA's limits for how long a CPU device waits in a collective for the others: 40 s until it aborts
the process, 20 s until it prints a warning, and 30 minutes between processes. jaxlib 0.10.1 to
0.12.0.1 have all three."""

COLLECTIVE_TIMEOUT_S = 86_400
"""Replaces these limits. Groups of devices differ in attention work, by minutes with long documents
on slow cores. The watchdog ends a step that hangs, and prints the stacks of all threads."""


_PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def choose_platform(
    *,
    virtual_cpu_devices: int | None,
    num_processes: int = 1,
    num_local_processes: int = 1,
    max_pool_bytes: int | None = None,
) -> None:
    """Where there is no NVIDIA GPU, takes the CPU, split into so many devices. Call before JAX counts devices.

    Args:
        virtual_cpu_devices: of all processes together, so that a config means the same mesh however it is launched.
        num_local: processes on this node.
        pool_bytes: limit for the pinned host memory of each GPU's arrays; None: all that is
            available.
    Raises: UserError if the processes cannot share them.
    """
    _raise_memory_limits(
        os.environ, num_local_processes=num_local_processes, max_pool_bytes=max_pool_bytes
    )
    no_gpu = cluster.count_gpus(os.environ) == 0
    if no_gpu and not os.environ.get("JAX_PLATFORMS"):
        # an installed CUDA plugin would look for a GPU, and print a traceback when it finds none
        jax.config.update("jax_platforms", "cpu")
    if no_gpu:
        _raise_collective_timeouts(os.environ)
    if virtual_cpu_devices is None:
        return
    own, rest = divmod(virtual_cpu_devices, num_processes)
    if no_gpu and rest:
        above = (own + 1) * num_processes
        near = errors.format_choices([above - num_processes, above] if own else [above])
        raise UserError(
            f"mesh.virtual_cpu_devices = {virtual_cpu_devices}: cannot be shared equally by {num_processes} processes. "
            f"Use {near}."
        )
    jax.config.update("jax_num_cpu_devices", max(own, 1))


def collective_timeout_flags() -> list[str]:
    """Flags that raise XLA's limits for collectives of CPU devices."""
    return [f"--{name}={COLLECTIVE_TIMEOUT_S}" for name in COLLECTIVE_TIMEOUTS]


def _raise_collective_timeouts(environ: MutableMapping[str, str]) -> None:
    """Adds the limits that the user has not set to XLA_FLAGS.

    XLA reads the variable once, when the first device is used. It holds flags or the name of a file
    of flags, never both, so a file is left as it is.
    """
    flags = environ.get("XLA_FLAGS", "")
    if flags.strip() and not flags.strip().startswith("-"):
        return
    given = {flag.lstrip("-").partition("=")[0] for flag in flags.split()}
    ours = zip(COLLECTIVE_TIMEOUTS, collective_timeout_flags(), strict=True)
    missing = [flag for name, flag in ours if name not in given]
    environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


def _raise_memory_limits(
    environ: MutableMapping[str, str], *, num_local_processes: int, max_pool_bytes: int | None
) -> None:
    """Raises JAX's limits to the available memory. Its default for pinned host memory is 64 GiB per
    device."""
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & environ.keys():
        environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_MEMORY_FRACTION)
    if _PINNED_LIMIT_VARIABLE not in environ:
        room = host_bytes_per_device(
            num_processes=num_local_processes,
            num_devices=max(1, cluster.count_gpus(environ) // num_local_processes),
        )
        limit = int(room / 2**30)
        if max_pool_bytes is not None:
            limit = min(limit, math.ceil(max_pool_bytes / 2**30))
        environ[_PINNED_LIMIT_VARIABLE] = str(max(1, limit))
    # Otherwise JAX preallocates its staging buffers for copies, as much memory again
    environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "false")


def gpu_memory_fraction(environ: Mapping[str, str]) -> float:
    """Fraction of a GPU's memory that is JAX's."""
    return float(
        environ.get(
            "XLA_CLIENT_MEM_FRACTION",
            environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION),
        )
    )


def pinned_pool_limit(environ: Mapping[str, str]) -> float:
    """Bytes of pinned host memory that XLA's pool may hold for each device; infinite if nothing limits it."""
    return (
        float(environ[_PINNED_LIMIT_VARIABLE]) * 2**30
        if _PINNED_LIMIT_VARIABLE in environ
        else math.inf
    )


def host_bytes_per_device(*, num_processes: int, num_devices: int) -> float:
    """Host memory available for the arrays of one device, in bytes.

    Args: num_processes: on the node, each with `num_devices` devices.
    """
    return usable_host_bytes(cluster.host_memory_bytes(), num_processes=num_processes) / (
        num_processes * num_devices
    )


def usable_host_bytes(total_bytes: int | float, *, num_processes: int) -> float:
    """Memory of a node available for arrays, in bytes."""
    return max(0.0, float(total_bytes) - OS_RESERVED_BYTES - num_processes * PROCESS_OVERHEAD_BYTES)


def pinned_pool_size(needed: int | float, limit: int | float) -> float:
    """Size of XLA's pool of pinned host memory, in bytes, if it holds `needed` bytes in one block.

    Its regions are powers of two and never joined, so the first request must be for everything:
    `training.host_offload.reserve`.
    Source: BFCAllocator::Extend, openxla/xla xla/tsl/framework/bfc_allocator.cc.
    """
    return float(min(2.0 ** math.ceil(math.log2(max(needed, 2**21))), limit))


def resolve_axis_sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Size of each axis, with data = -1 filled in. Raises: UserError if the mesh does not fit the devices."""
    inner = mesh.replica * mesh.seq
    data = num_devices // inner if mesh.data == -1 else mesh.data
    if data < 1 or data * inner != num_devices:
        asked = f"mesh.replica = {mesh.replica}, mesh.data = {mesh.data}, mesh.seq = {mesh.seq}"
        needed = f"a multiple of {inner}" if mesh.data == -1 else f"{mesh.data * inner}"
        replica = mesh.replica if num_devices % mesh.replica == 0 else 1
        left = num_devices // replica
        degrees = errors.format_choices(seq for seq in range(1, left + 1) if left % seq == 0)
        raise UserError(
            f"{asked}: uses {needed} devices, and JAX sees {num_devices}. "
            f"Use mesh.replica={replica} mesh.data=-1 and mesh.seq={degrees}, or, with virtual CPU devices (where there is no "
            f"accelerator, or with JAX_PLATFORMS=cpu), mesh.virtual_cpu_devices={inner * max(mesh.data, 1)}."
        )
    return {axes.REPLICA: mesh.replica, axes.DATA: data, axes.SEQ: mesh.seq}


def find_division_problems(
    config: Config, sizes: dict[str, int], *, degree: int | None, with_training: bool = True
) -> list[str]:
    """What is wrong with sharing a config's rows and their tokens on a mesh of these sizes; empty when nothing is.

    Args: degree: of the rows' layout, core/layout.py; None: not known, so that what is named has to serve all.
    """
    found = []
    seq = sizes[axes.SEQ]
    for row_tokens in config.data.row_lengths:
        parts, what = (
            (2 * seq, "parts, two for each device (mesh.seq)")
            if (degree or 1) > 1
            else (seq, "shares (mesh.seq)")
        )
        if row_tokens % parts:
            near = errors.format_choices(
                _nearest_multiples(row_tokens, parts if degree else 2 * seq)
            )
            found.append(
                f"data.row_tokens = {row_tokens}: cannot be cut into {parts} equal {what}. Use {near}."
            )
    per_step, at_once = config.batch.rows_per_step, config.batch.rows_per_microbatch
    groups = sizes[axes.REPLICA] * sizes[axes.DATA]
    if with_training and per_step % (groups * at_once):
        near = errors.format_choices(_nearest_multiples(per_step, groups * at_once))
        found.append(
            f"batch.rows_per_step = {per_step}: is no whole number of turns of {groups * at_once} rows "
            f"({groups} groups, {at_once} row{'s' * (at_once > 1)} at once). Use {near}."
        )
    return found


def _nearest_multiples(number: int, divisor: int) -> list[int]:
    """The multiples of `of` on both sides of a number."""
    below = number // divisor * divisor
    return [below, below + divisor] if below else [divisor]


def make_mesh(sizes: dict[str, int], devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh of these axis sizes; devices that share rows are neighbours, so that `seq` stays within a node."""
    lengths = tuple(sizes[axis] for axis in axes.ALL)
    # jax.make_mesh makes Explicit axes unless told otherwise
    types = (jax.sharding.AxisType.Auto,) * len(axes.ALL)
    return jax.make_mesh(lengths, axes.ALL, axis_types=types, devices=devices)


def num_groups(mesh: jax.sharding.Mesh) -> int:
    """Groups of devices that each work on rows of their own."""
    return mesh.shape[axes.REPLICA] * mesh.shape[axes.DATA]


def num_shards(mesh: jax.sharding.Mesh) -> int:
    """Parts that a sharded weight is cut into."""
    return mesh.shape[axes.DATA] * mesh.shape[axes.SEQ]
