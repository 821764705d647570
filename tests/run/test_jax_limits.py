"""Limits of JAX's memory that are set before it initializes its devices, with simulated GPUs."""

import ctypes

import pytest

from jaxsp.core.units import GIB
from jaxsp.memory import available_memory, memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.processes import hardware
from jaxsp.processes.cluster import Process
from jaxsp.run import jax_limits
from jaxsp.runtime import memory_limits
from jaxsp.sharding import host_offload
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


def test_the_pool_is_sized_by_the_config_before_jax_sees_its_devices(monkeypatch, environ):
    """The size equals that of the step, which needs devices: 4 GPUs of one process."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    spec = runs.make_spec(
        {"offload_activations": "layer_inputs", "offload_optimizer": "state"}, sizes=(1, 2, 2)
    )
    set_gpus(monkeypatch, spec, count=4)
    needed = memory_formula.pool_bytes(memory_formula.step_offloaded_bytes(spec))
    model = spec.model
    assert jax_limits.estimate_pool_bytes(spec.config, model, 4) == needed > 2 * GIB
    assert jax_limits.estimate_pool_bytes(runs.make_spec({}).config, model, 4) is None
    assert jax_limits.estimate_pool_bytes(spec.config, None, 4) is None
    batch = spec.config.batch.model_copy(update={"rows_per_microbatch": "auto"})
    automatic = spec.config.model_copy(update={"batch": batch})
    assert jax_limits.estimate_pool_bytes(automatic, model, 4) is None
    jax_limits.choose_platform(spec.config)
    assert memory_limits.pinned_pool_limit(environ) == 3 * GIB


@pytest.mark.parametrize("memory_gib", [23.5, 44.5, 79.1])
@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)])
def test_jaxs_part_of_a_gpu_leaves_what_cuda_and_nccl_need_and_the_step_gets_that_part(
    monkeypatch, environ, sizes, memory_gib
):
    spec = runs.make_spec({}, sizes=sizes)
    set_gpus(monkeypatch, spec, count=8, memory_gib=memory_gib)
    memory = hardware.gpu_memory_bytes()
    planned = MemoryLimit(memory_limits.gpu_memory_fraction({}) * memory, 200 * GIB)
    room = available_memory.subtract_reserves(spec, planned)
    jax_limits.choose_platform(spec.config)
    part = memory_limits.gpu_memory_fraction(environ) * memory
    assert part <= 0.92 * memory
    outside = available_memory.outside_bytes(spec)
    assert memory - part >= outside - 1
    assert part == pytest.approx(min(0.92 * memory, memory - outside))
    in_run = available_memory.subtract_reserves(spec, MemoryLimit(part, 200 * GIB))
    assert in_run.device == pytest.approx(room.device) == pytest.approx(0.978 * part)


def test_meshes_that_auto_may_choose_and_unknown_models_leave_enough_for_nccl(monkeypatch, environ):
    spec = runs.make_spec({}, sizes=(1, 1, 8))
    config = spec.config
    ulysses = jax_limits.estimate_outside_bytes(config, spec.model, 8)
    assert jax_limits.estimate_outside_bytes(config, None, 8) == ulysses
    automatic = config.model_copy(update={"mesh": config.mesh.model_copy(update={"seq": "auto"})})
    assert jax_limits.estimate_outside_bytes(automatic, spec.model, 8) >= ulysses
    batch = config.batch.model_copy(update={"rows_per_microbatch": "auto"})
    automatic = config.model_copy(update={"batch": batch})
    assert jax_limits.estimate_outside_bytes(automatic, spec.model, 8) == ulysses
    assert jax_limits.estimate_outside_bytes(config, spec.model, 7) == GIB, "reported later"


def test_a_larger_part_that_the_user_has_set_stays_with_a_warning(monkeypatch, environ, capfd):
    environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"
    spec = runs.make_spec({}, sizes=(1, 1, 8))
    set_gpus(monkeypatch, spec, count=8, memory_gib=44.5)
    jax_limits.choose_platform(spec.config)
    assert environ["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    assert "XLA_CLIENT_MEM_FRACTION = 0.95: leaves 2.2 GiB" in capfd.readouterr().err
    jax_limits.choose_platform(spec.config, Process(index=1, num_processes=8))
    assert not capfd.readouterr().err


class Nvml:
    """NVIDIA's management library on a node with GPUs of these sizes; None: a broken one."""

    def __init__(self, *totals):
        self.totals = totals

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.totals)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, device, memory):
        total = self.totals[device.value - 1]
        memory._obj.total = total or 0
        return int(total is None)


@pytest.mark.parametrize(
    ("totals", "expected"),
    [((80, 40, 80), 40), ((80, 4, 80), 80), ((80, None), 80), ((None,), None), ((), None)],
)
def test_the_memory_of_the_smallest_gpu_is_read_from_the_driver(monkeypatch, totals, expected):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(*totals))
    assert hardware.gpu_memory_bytes() == expected
