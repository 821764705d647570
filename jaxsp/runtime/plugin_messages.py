"""Loads JAX's CUDA plugin without its messages that this machine has no GPU.

Four of its libraries print two lines each when they are loaded, at `import jax` and when JAX looks
for devices. No setting of JAX, absl or TensorFlow prevents it. Libraries that are loaded already
print nothing then. This takes 25 ms, most of which JAX saves later.
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib

from jaxsp.processes import hardware

_PLUGINS = (
    *("jax_cuda12_plugin", "jax_cuda13_plugin"),
    *("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
)

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def load_quietly() -> None:
    """Loads the plugin's libraries, on a machine without NVIDIA GPUs that has the plugin.

    Call it before `import jax`. What goes wrong is reported when JAX loads them itself.
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
    # They read it when they are loaded. Without GPUs only jaxsp.plan uses them, which sets it too
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
