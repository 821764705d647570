"""Messages of JAX's CUDA plugin: hides those on a machine without GPUs, and explains errors."""

import contextlib
import ctypes
import importlib.util
import os
import pathlib

from jaxsp.system import hardware

# jax is imported in functions: load_quietly comes before

_PLUGINS = (
    *("jax_cuda12_plugin", "jax_cuda13_plugin"),
    *("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
)

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def load_quietly() -> None:
    """Loads the plugin's libraries, on a machine without NVIDIA GPUs that has the plugin.

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
    level = os.environ.get(_LOG_LEVEL)
    # They read it when they are loaded. Without GPUs only plans use them, which sets it too
    os.environ.setdefault(_LOG_LEVEL, "3")
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # stderr may be closed
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        for library in libraries:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))
        os.dup2(stderr, 2)
        os.close(stderr)
    if level is None:
        del os.environ[_LOG_LEVEL]


def explain(error: BaseException) -> str | None:
    """Message for an error that another allocator may avoid; None for other errors.

    From jax 0.11 on, XLA uses CUDA's virtual memory management. WSL2 fails with arrays of 4 GiB and
    more, such as the memory that JAX allocates at start (openxla/xla issue 48979), and fractional
    vGPUs do not have it (issue 49252).
    """
    import jax

    text = str(error)
    if jax.__version_info__ < (0, 11):
        return None
    if "no supported devices found for platform CUDA" in text:
        cause = "a fractional vGPU does not have. Install jax 0.10.1 (Python 3.11)"
        if jax.__version_info__ >= (0, 12):
            cause += ", or set XLA_FLAGS=--xla_gpu_experimental_vmm_disabled=true"
    elif hardware.WSL_DEVICE.exists() and (
        "RESOURCE_EXHAUSTED" in text or "CUDA_ERROR_OUT_OF_MEMORY" in text
    ):
        cause = (
            "WSL2 limits to allocations of less than 4 GiB. Set "
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, or install jax 0.10.1 (Python 3.11)"
        )
    else:
        return None
    return (
        f"{text.splitlines()[0]} A possible cause: jax {jax.__version__} allocates memory of GPUs "
        f"with CUDA's virtual memory management, which {cause}."
    )
