"""Limits of JAX's memory that are set before it initializes its devices, with simulated GPUs."""

import types

import pytest

from jaxsp.core.units import GIB
from jaxsp.planning import estimate
from jaxsp.run import jax_limits
from jaxsp.sharding import host_offload
from jaxsp.system import hardware
from jaxsp.system.device_memory import MemoryLimit
from tests.training import runs

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture
def environ(monkeypatch):
    """An environment without limits."""
    environ = {}
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2000 * GIB)
    return environ


def set_gpus(monkeypatch, spec, *, count, memory_gib=79.1):
    """Simulates a node with these GPUs, and a folder with the step's model."""
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: count)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: int(memory_gib * GIB))
    monkeypatch.setattr(jax_limits.model_config, "read_fields", lambda config: ({}, "config.json"))
    monkeypatch.setattr(jax_limits.model_config, "parse_model_config", lambda *_, **__: spec.model)


def config_of(spec):
    """The parts of a whole config that the limits depend on; the model is not read."""
    step = spec.config
    data = types.SimpleNamespace(row_tokens=step.row_tokens)
    sections = {"adapter": step.adapter, "mesh": step.mesh}
    return types.SimpleNamespace(model=None, data=data, step=step, **sections)


def test_the_pool_is_sized_by_the_config_before_jax_sees_its_devices(monkeypatch, environ):
    """The size equals that of the step, which needs devices: 4 GPUs of one process."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    spec = runs.make_spec(
        {"offload_activations": "layer_inputs", "offload_optimizer": "state"}, sizes=(1, 2, 2)
    )
    set_gpus(monkeypatch, spec, count=4)
    needed = estimate.pool_bytes(estimate.step_offloaded_bytes(spec))
    model = spec.model
    assert jax_limits.estimate_pool_bytes(spec.config, model, 4) == needed > 2 * GIB
    assert jax_limits.estimate_pool_bytes(runs.make_spec({}).config, model, 4) is None
    assert jax_limits.estimate_pool_bytes(spec.config, None, 4) is None
    automatic = spec.config.change(rows_per_microbatch="auto")
    assert jax_limits.estimate_pool_bytes(automatic, model, 4) is None
    jax_limits.choose_platform(config_of(spec))
    assert hardware.pinned_pool_limit(environ) == 3 * GIB


@pytest.mark.parametrize("memory_gib", [23.5, 44.5, 79.1])
@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)])
def test_jaxs_part_of_a_gpu_leaves_what_cuda_and_nccl_need_and_the_step_gets_that_part(
    monkeypatch, environ, sizes, memory_gib
):
    spec = runs.make_spec({}, sizes=sizes)
    set_gpus(monkeypatch, spec, count=8, memory_gib=memory_gib)
    memory = hardware.gpu_memory_bytes()
    planned = MemoryLimit(hardware.gpu_memory_fraction({}) * memory, 200 * GIB)
    room = estimate.subtract_reserves(spec, planned)
    jax_limits.choose_platform(config_of(spec))
    part = hardware.gpu_memory_fraction(environ) * memory
    assert part <= 0.92 * memory
    outside = estimate.outside_bytes(spec)
    assert memory - part >= outside - 1
    assert part == pytest.approx(min(0.92 * memory, memory - outside))
    in_run = estimate.subtract_reserves(spec, MemoryLimit(part, 200 * GIB))
    assert in_run.device == pytest.approx(room.device) == pytest.approx(0.978 * part)
