"""Messages of JAX's CUDA plugin on a machine without a GPU."""

from tests import commands


def test_without_a_gpu_jax_starts_without_messages():
    """With the extra `plan`, `import jax` and the first use of a device print 8 lines."""
    program = "import jaxsp, jax; jax.config.update('jax_platforms', 'cpu'); print(jax.devices())"
    done = commands.run_python("-c", program, env={"JAX_PLATFORMS": ""})
    assert (done.stdout, done.stderr) == ("[CpuDevice(id=0)]\n", "")
