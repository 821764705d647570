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
import re
from collections.abc import Iterator

from jaxsp.core import files
from jaxsp.runtime import hardware

_PLUGINS = (
    "jax_cuda12_plugin",
    "jax_cuda13_plugin",
    "jax_plugins.xla_cuda12",
    "jax_plugins.xla_cuda13",
)

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

_NO_GPU = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\n"
    rb"|I\d{4} .*cudart_stub\.cc:\d+\] Could not find cuda drivers .*\n"
)


def load_quietly() -> None:
    """Loads the plugin's libraries, on a machine without NVIDIA GPUs that has the plugin.

    Call it before `import jax`. What goes wrong is reported when JAX loads them itself.
    """
    if hardware.count_gpus(os.environ) > 0:
        return
    paths = [*_list_libraries()]
    if not paths:
        return
    level = os.environ.get(_LOG_LEVEL)
    # They read it when they are loaded. Without GPUs only jaxsp.plan uses them, which sets it too
    os.environ.setdefault(_LOG_LEVEL, "3")
    with _filter_stderr():
        for path in paths:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
    if level is None:
        del os.environ[_LOG_LEVEL]


def _list_libraries() -> Iterator[pathlib.Path]:
    for name in _PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):  # jax_plugins
            spec = importlib.util.find_spec(name)
            if spec is None:
                continue
            for folder in spec.submodule_search_locations or ():
                yield from sorted(pathlib.Path(folder).glob("[_x]*.so"))


@contextlib.contextmanager
def _filter_stderr() -> Iterator[None]:
    """Removes the plugin's messages from what is written to file descriptor 2 meanwhile."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    file = files.open_scratch()
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        output = _NO_GPU.sub(b"", os.pread(file, os.fstat(file).st_size, 0))
        os.close(file)
        with contextlib.suppress(OSError):
            os.write(2, output)
