"""Platform that JAX runs on, GPUs or virtual CPU devices, and its cache of compiled programs."""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
from collections.abc import MutableMapping, Sequence

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import GIB
from jaxsp.system import distributed, hardware

# jax is imported in functions: load_plugin_quietly comes before

_PLUGINS = (
    *("jax_cuda12_plugin", "jax_cuda13_plugin"),
    *("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
)

CPU_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
)
"""Raise XLA's limits for how long a CPU device waits in a collective for the others: 40 s until it
aborts the process, 20 s until it prints a warning, and 30 minutes between processes.

Groups of devices differ in attention work, by minutes with long documents on slow cores. In
jaxsp.train, the watchdog ends a step that hangs earlier. jaxlib 0.10.1 to 0.12.0.1 have all flags
of this module. An unknown name in XLA_FLAGS ends the process."""

GPU_FLAGS = (
    "--xla_gpu_first_collective_call_terminate_timeout_seconds=600",
    "--xla_gpu_executable_terminate_timeout=600",
)
"""Raise XLA's limits, in seconds, for how long a GPU waits for the others of its process to begin
their first collective (40) and to end a program (30). In jobs of several nodes, connecting all GPUs
takes minutes."""

MAX_SHARED_AUTOTUNING = 128
"""Number of processes up to which they divide the timing of kernels, as XLA does by default. Each
then reads the results of all others from process 0, for each program: a million reads with 1,024
processes."""

OWN_AUTOTUNING_FLAG = "--xla_gpu_shard_autotuning=false"
"""Makes each process time all kernels, as if it was the only one."""

MAX_CACHE_BYTES = 5 * GIB
"""Maximum size of the cache. JAX deletes the least recently used programs to stay below it."""

MIN_CPU_RELEASE = (0, 12, 0)
"""First release of JAX in which `auto` keeps programs for CPUs. Before, JAX prints two errors of
1,000 columns for each kernel that it reads (jax issue 38445)."""


def load_plugin_quietly() -> None:
    """Loads the libraries of JAX's CUDA plugin on a machine without NVIDIA GPUs.

    Four of them print two lines each when they are loaded, at `import jax` and when JAX looks for
    devices. No setting prevents it, and libraries that are loaded already print nothing then. This
    takes 25 ms, most of which JAX saves later. Call it before `import jax`. What goes wrong is
    reported when JAX loads them.
    """
    if hardware.count_gpus(os.environ) > 0:
        return
    libraries: list[pathlib.Path] = []
    for name in _PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):  # jax_plugins
            spec = importlib.util.find_spec(name)
            for folder in (spec and spec.submodule_search_locations) or ():
                libraries += sorted(pathlib.Path(folder).glob("[_x]*.so"))
    if not libraries:
        return
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    # They read it when they are loaded. Without GPUs only plans use them, which sets it too
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # stderr may be closed
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        for library in libraries:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))
        os.dup2(stderr, 2)
        os.close(stderr)
    if level is None:
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]


def choose_platform(
    *,
    virtual_cpu_devices: int | None,
    num_processes: int = 1,
    num_local_processes: int = 1,
    max_pool_bytes: int | None = None,
    outside_bytes: int | float = 0,
) -> None:
    """Selects the CPU where there is no NVIDIA GPU, and sets JAX's limits for memory and time.

    Call it before JAX counts devices.

    Args:
        virtual_cpu_devices: devices of all processes together, so that a config means the same
            mesh however it is launched.
        max_pool_bytes: limit for the pinned host memory of each GPU's arrays; None: all there is.
        outside_bytes: memory of each GPU that CUDA and NCCL need.
    Raises: UserError if the processes cannot have the same number of devices.
    """
    import jax

    has_gpu = hardware.count_gpus(os.environ) > 0
    if not has_gpu:
        if not os.environ.get("JAX_PLATFORMS"):
            # An installed CUDA plugin would look for a GPU and print a traceback
            jax.config.update("jax_platforms", "cpu")
        add_flags(os.environ, CPU_FLAGS)
    else:
        hardware.raise_limits(
            os.environ,
            num_local_processes=num_local_processes,
            max_pool_bytes=max_pool_bytes,
            outside_bytes=outside_bytes,
        )
        if num_processes > num_local_processes:
            add_flags(os.environ, GPU_FLAGS)
            if num_processes > MAX_SHARED_AUTOTUNING:
                add_flags(os.environ, [OWN_AUTOTUNING_FLAG])
    if virtual_cpu_devices is None:
        return
    per_process, remainder = divmod(virtual_cpu_devices, num_processes)
    if remainder and not has_gpu:
        below = per_process * num_processes
        multiples = [below, below + num_processes] if below else [num_processes]
        raise UserError(
            f"mesh.virtual_cpu_devices = {virtual_cpu_devices}: must be a multiple of "
            f"{num_processes}, the number of processes. Use {errors.format_choices(multiples)}."
        )
    jax.config.update("jax_num_cpu_devices", max(per_process, 1))


def add_flags(environ: MutableMapping[str, str], own_flags: Sequence[str]) -> None:
    """Adds the flags that the user has not set to XLA_FLAGS.

    XLA reads the variable once, when the first device is used. It holds flags or the name of a file
    of flags, never both, so a file is left as it is.
    """
    flags = environ.get("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("-"):
        return
    user_names = {flag.lstrip("-").partition("=")[0] for flag in flags}
    flags += [flag for flag in own_flags if flag[2:].partition("=")[0] not in user_names]
    environ["XLA_FLAGS"] = " ".join(flags)


def enable_cache(setting: str | None, *, num_processes: int = 1) -> None:
    """Sets JAX's compilation cache. Call it before JAX compiles anything.

    Args: setting: run.compilation_cache.
    Raises: UserError for a folder that cannot be written.
    """
    import jax

    if setting is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if setting == "auto":
        has_gpu = hardware.count_gpus(os.environ) > 0
        # Only process 0 writes programs. Without a shared home folder it would read a program that
        # the others compile, while XLA expects all of them to divide the timing of kernels
        is_own = has_gpu and num_processes > MAX_SHARED_AUTOTUNING
        has_cache = has_gpu or jax.__version_info__ >= MIN_CPU_RELEASE
        is_automatic = is_own or (num_processes == 1 and has_cache)
        if os.environ.get("JAX_COMPILATION_CACHE_DIR") or not is_automatic:
            return
    else:
        with at("run.compilation_cache", setting):
            if files.is_url(setting):
                raise UserError("must be a folder of this machine. Use auto.")
            folder = files.expand_user(setting)
    try:
        if setting == "auto":
            folder = files.cache_dir() / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        reason = getattr(error, "strerror", error)
        problem = f"run.compilation_cache = {setting}: cannot be written: {reason}"
        if setting == "auto":
            distributed.log(f"{problem}. Compiled programs are not kept")
            return
        raise UserError(f"{problem}. Name another folder, or null for none.") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
