"""Messages of JAX's CUDA plugin without GPUs, and errors of XLA's allocator."""

import jax
import pytest

from jaxsp.system import cuda_plugin, hardware
from tests import commands
from tests.messages import assert_names

NO_DEVICE = (
    "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA"
)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 11811160064 bytes."


@pytest.mark.parametrize(
    ("version", "is_wsl", "text", "cause"),
    [
        ((0, 12, 0), False, NO_DEVICE, "XLA_FLAGS=--xla_gpu_experimental_vmm_disabled=true"),
        ((0, 11, 2), False, NO_DEVICE, "vGPU"),
        ((0, 11, 2), True, OUT_OF_MEMORY, "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async"),
        ((0, 11, 2), False, OUT_OF_MEMORY, None),
        ((0, 10, 1), True, OUT_OF_MEMORY, None),
        ((0, 10, 1), False, NO_DEVICE, None),
        ((0, 12, 0), True, "INVALID_ARGUMENT: shapes", None),
    ],
)
def test_an_error_that_another_allocator_avoids_names_it(
    monkeypatch, tmp_path, version, is_wsl, text, cause
):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(hardware, "WSL_DEVICE", tmp_path if is_wsl else tmp_path / "dxg")
    message = cuda_plugin.explain(RuntimeError(text))
    assert (message is None) == (cause is None)
    if cause is not None:
        assert_names(message, cause, "jax 0.10.1", start=text)


def test_without_a_gpu_jax_starts_without_messages():
    """With the extra `plan`, `import jax` and the first use of a device print 8 lines."""
    program = "import jaxsp, jax; jax.config.update('jax_platforms', 'cpu'); print(jax.devices())"
    done = commands.run_python("-c", program, env={"JAX_PLATFORMS": ""})
    assert (done.stdout, done.stderr) == ("[CpuDevice(id=0)]\n", "")
