"""The pool of pinned host memory is one region, reserved between compiling and loading weights."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from jaxsp.planning import absent, fit
from jaxsp.planning.fit import MemoryUse
from jaxsp.run import build, config_file, trainer
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory
from jaxsp.training import train_step
from tests import batches, small_runs
from tests.training import runs


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


@runs.NEEDS_HOST
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
    assert {array.sharding.memory_kind for array in results} == {device_memory.MEMORY_KIND}
    assert {(array.shape, array.dtype) for array in results} == {((4, 2**20), jnp.dtype("uint8"))}
    assert all(array.is_deleted() for array in results)


class Loaded(Exception):
    """Raised instead of loading weights."""


@pytest.mark.parametrize(("is_gpu", "host_bytes"), [(True, 3 * 2**20), (True, 0), (False, 2**20)])
def test_host_memory_is_reserved_between_compiling_and_loading_weights(
    tmp_path, monkeypatch, is_gpu, host_bytes
):
    """Not without offload, and not on CPUs. Nothing is compiled."""
    record = json.dumps({"input_ids": np.arange(64).tolist()})
    (tmp_path / "data.jsonl").write_text(f"{record}\n{record}", encoding="utf-8")
    sections = {
        "run": {"save_every": None},
        "model": {"config": batches.SMALL_LLAMA},
        "batch": {"rows_per_step": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    fields = small_runs.make_fields(tmp_path, "data.jsonl", **sections)
    devices = jax.devices()[:2]
    run = build.build_training(config_file.parse(fields), devices=devices)
    empty = jax.jit(lambda: 0).lower().compile()
    events = []

    def load():
        events.append("load")
        raise Loaded

    def reserve(devices, num_bytes):
        events.append(("reserve", [*devices], num_bytes))

    monkeypatch.setattr(fit, "is_gpu", lambda spec: is_gpu)
    monkeypatch.setattr(train_step, "compile", lambda spec: events.append("compile") or empty)
    monkeypatch.setattr(fit, "read_memory_use", lambda *_, **__: MemoryUse(0, host_bytes))
    monkeypatch.setattr(host_offload, "reserve_pool", reserve)
    weights = types.SimpleNamespace(make=load, reader=None)
    with pytest.raises(Loaded):
        trainer.train(dataclasses.replace(run, weights=weights), rich.console.Console(quiet=True))
    reserved = [("reserve", devices, host_bytes)] if is_gpu and host_bytes else []
    assert events == ["compile", *reserved, "load"]
