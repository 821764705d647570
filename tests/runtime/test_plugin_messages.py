"""Messages of JAX's CUDA plugin on a machine without a GPU."""

import os

from jaxsp.runtime import plugin_messages
from tests import commands

NO_GPU = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795575988.928572 5754 cudart_stub.cc:31] Could not find cuda drivers on your "
    b"machine, GPU will not be used.\n"
)
ERROR = b"E0000 00:00:1795575988.928572 5754 dso_loader.cc:93] libcudnn.so.9: wrong ELF class\n"


def test_only_the_message_that_there_is_no_gpu_is_removed(capfd):
    with plugin_messages._filter_stderr():
        os.write(2, NO_GPU + ERROR + NO_GPU)
    os.write(2, b"later\n")
    assert capfd.readouterr().err.encode() == ERROR + b"later\n"


def test_without_a_gpu_jax_starts_without_messages():
    """With the extra `plan`, `import jax` and the first use of a device print 8 lines."""
    program = "import jaxsp, jax; jax.config.update('jax_platforms', 'cpu'); print(jax.devices())"
    done = commands.run_python("-c", program, env={"JAX_PLATFORMS": ""})
    assert (done.stdout, done.stderr) == ("[CpuDevice(id=0)]\n", "")
