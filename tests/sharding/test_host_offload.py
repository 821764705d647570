"""The pool of pinned host memory is one region, reserved between compiling and loading weights."""

import threading

import jax
import jax.numpy as jnp
import pytest

from jaxsp.core import host_memory
from jaxsp.planning import absent
from jaxsp.sharding import host_offload


def test_reserved_memory_is_one_array_on_the_host_and_takes_none_of_the_device():
    """300 GiB, for an H100 that is absent."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    (gpu,) = absent.make_devices("h100-80gb", 1)
    num_bytes = 300 * 2**30 + 1
    run = host_offload.build_allocator(gpu, num_bytes).lower().compile()
    taken = run.memory_analysis()
    assert num_bytes <= taken.host_output_size_in_bytes <= num_bytes + 2**20
    on_device = ("argument", "output", "temp")
    assert [getattr(taken, f"{kind}_size_in_bytes") for kind in on_device] == [0, 0, 0]
    assert taken.host_temp_size_in_bytes == 0
    assert len(jax.tree.leaves(run.out_info)) == 1


@pytest.mark.skipif(
    jax.__version_info__ < host_offload.MIN_RELEASE,
    reason="on CPUs, arrays in host memory need jax 0.11.1",
)
def test_all_devices_reserve_memory_at_the_same_time_and_give_it_back_to_their_pools(monkeypatch):
    """One after another, eight pools of 206 GiB would take ten minutes."""
    results = []
    wait = jax.block_until_ready
    both = threading.Barrier(2, timeout=10)

    def watch(array):
        both.wait()
        results.append(wait(array))
        return array

    monkeypatch.setattr(jax, "block_until_ready", watch)
    devices = jax.devices()[:2]
    host_offload.reserve_pool(devices, 3 * 2**20 + 1)
    places = [array.sharding.device_set for array in results]
    assert len(places) == 2
    assert set().union(*places) == set(devices)
    assert {array.sharding.memory_kind for array in results} == {host_memory.MEMORY_KIND}
    assert {(array.shape, array.dtype) for array in results} == {((4, 2**20), jnp.dtype("uint8"))}
    assert all(array.is_deleted() for array in results)
