"""Memory limits that jaxsp sets for JAX, and memory that they leave for arrays."""

import pytest

from jaxsp.system import hardware

GIB = 2**30


@pytest.fixture
def node(monkeypatch):
    """2,000 GiB of host memory and 8 GPUs."""
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(hardware, "count_gpus", lambda _: 8)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)


@pytest.mark.parametrize(
    ("num_local", "pool_bytes", "limit"),
    [
        (8, None, "243"),  # (2000 - 8 - 8 * 6) / 8, one process per GPU
        (1, None, "248"),  # (2000 - 8 - 6) / 8
        (8, 100 * GIB + 1, "101"),
        (8, 500 * GIB, "243"),
        (8, 1, "1"),
    ],
)
@pytest.mark.parametrize(
    "environ",
    [{}, {"XLA_CLIENT_MEM_FRACTION": "", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": ""}],
    ids=["unset", "empty"],
)
def test_jax_may_use_most_of_a_gpu_and_the_pinned_memory_that_is_needed(
    node, environ, num_local, pool_bytes, limit
):
    limits = dict(environ)
    hardware.raise_limits(limits, num_local_processes=num_local, max_pool_bytes=pool_bytes)
    assert limits == {
        "XLA_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": limit,
        "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false",
    }


def test_memory_limits_that_the_user_has_set_stay(node):
    user = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"}
    limits = dict(user)
    hardware.raise_limits(limits, num_local_processes=8, max_pool_bytes=100 * GIB)
    assert limits == user | {"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false"}
