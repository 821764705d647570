"""Cache of compiled programs that later runs reuse."""

import os

import jax

from jaxsp.core import paths, urls
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import GIB
from jaxsp.system import distributed, hardware, jax_platform

MAX_BYTES = 5 * GIB
"""Size of the folder from which on JAX deletes the programs that were not used for longest."""

MIN_CPU_RELEASE = (0, 12, 0)
"""First release of JAX in which `auto` keeps programs for CPUs. Before, JAX prints two errors of
1,000 columns for each kernel that it reads (jax issue 38445)."""


def enable(setting: str | None, *, num_processes: int = 1) -> None:
    """Sets JAX's compilation cache. Call it before JAX compiles anything.

    Args: setting: run.compilation_cache.
    Raises: UserError for a folder that cannot be written.
    """
    if setting is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if setting == "auto":
        has_gpu = hardware.count_gpus(os.environ) > 0
        # Only process 0 writes programs. Without a shared home folder it would read a program that
        # the others compile, while XLA expects all of them to divide the timing of kernels
        is_own = has_gpu and jax_platform.has_own_autotuning(num_processes)
        has_cache = has_gpu or jax.__version_info__ >= MIN_CPU_RELEASE
        is_automatic = is_own or (num_processes == 1 and has_cache)
        if os.environ.get("JAX_COMPILATION_CACHE_DIR") or not is_automatic:
            return
    try:
        if setting == "auto":
            folder = paths.cache_dir() / "programs"
        else:
            with at("run.compilation_cache", setting):
                if urls.is_url(setting):
                    raise UserError("must be a folder of this machine. Use auto.")
                folder = paths.expand_user(setting)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        if setting == "auto" or not isinstance(error, OSError):
            distributed.log(f"run.compilation_cache: compiled programs are not kept: {error}")
            return
        raise UserError(
            f"run.compilation_cache = {setting}: cannot be written: {error.strerror}. "
            "Name another folder, or null for none."
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
