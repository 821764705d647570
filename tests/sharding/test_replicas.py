"""Replica 0 reads weights and checkpoints, and the others receive the same bits."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core import axes
from jaxsp.sharding import sharding
from jaxsp.system import device_memory
from jaxsp.training.train_state import TrainState
from tests import batches, two_processes
from tests.checkpoint.test_writer import make_meta
from tests.training import runs

SHAPES = {
    "sharded": ((8, 3), PartitionSpec(axes.SHARDS)),
    "sharded along the second dim": ((3, 8), PartitionSpec(None, axes.SHARDS)),
    "whole": ((3, 5), PartitionSpec()),
    "a scalar": ((), PartitionSpec()),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_all_replicas_have_the_bits_of_the_first(name, dtype):
    """Also of -0.0, which a sum with 0.0 changes, and of NaN."""
    shape, spec = SHAPES[name]
    size = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = np.random.default_rng(0).integers(0, np.iinfo(size).max, shape, size, endpoint=True)
    whole = np.asarray(bits).view(jnp.dtype(dtype))
    if whole.size > 1 and jnp.issubdtype(dtype, jnp.floating):
        whole.flat[:2] = (-0.0, np.nan)
    place = NamedSharding(batches.mesh(2, 2, 2), spec)
    expected = jax.device_put(whole, place)
    first = [shard.data for shard in expected.addressable_shards if shard.device.id < 4]
    actual = sharding.broadcast(expected, place, first)
    assert (actual.shape, actual.dtype, actual.sharding) == (shape, whole.dtype, place)
    for shard in actual.addressable_shards:
        assert (
            np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()
        )


@runs.NEEDS_HOST
def test_arrays_in_host_memory_stay_there():
    place = NamedSharding(batches.mesh(2, 2, 2), PartitionSpec(axes.SHARDS))
    place = place.with_memory_kind(device_memory.MEMORY_KIND)
    expected = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3), place)
    first = [shard.data for shard in expected.addressable_shards if shard.device.id < 4]
    actual = sharding.broadcast(expected, place, first)
    assert actual.sharding == place
    assert batches.is_bitwise_equal(actual, expected)


def test_a_checkpoint_is_read_by_the_first_replica(tmp_path, monkeypatch):
    table = {"a": Parameter(shape=(16, 3), hf_name="a")}
    place = NamedSharding(batches.mesh(2, 2, 2), PartitionSpec(axes.SHARDS))
    weight = {"a": jax.device_put(np.arange(48, dtype=np.float32).reshape(16, 3), place)}
    opt = {"a": {"mu": weight["a"] + 1, "nu": -0.0 * weight["a"]}}
    step = jax.device_put(np.int32(1), NamedSharding(place.mesh, PartitionSpec()))
    state = TrainState(master=weight, opt_state=opt, step=step)
    with CheckpointWriter(tmp_path, table=table, config=CheckpointConfig()) as store:
        store.save(state, make_meta(1))
    monkeypatch.setattr(sharding, "find_readers", lambda mesh: {*mesh.devices[0].flat})
    placed = []
    read_item = reader._read_item

    def record(checkpoint, item, args):
        placed.extend(each.sharding for each in jax.tree.leaves(args.restore_args))
        return read_item(checkpoint, item, args)

    monkeypatch.setattr(reader, "_read_item", record)
    restored = reader.restore(tmp_path / "1", state, table=table, num_steps=1)
    assert {device for each in placed for device in each.device_set} == {
        *place.mesh.devices[0].flat
    }
    for actual, expected in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
        assert actual.sharding == expected.sharding
        assert batches.is_bitwise_equal(actual, expected)


TWO_PROCESSES = """
import json, os, pathlib, sys
import jax, numpy as np
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.system import device_memory, device_mesh, distributed, jax_platform
from jaxsp.training import train_state
from jaxsp.training.train_state import TrainState
from tests.checkpoint.test_writer import make_meta

process = distributed.detect_process(os.environ)
jax_platform.choose_platform(virtual_cpu_devices=4, num_processes=2)
distributed.initialize(process)
table = {
    "a": Parameter(shape=(512, 256), hf_name="a"),
    "b": Parameter(shape=(3,), hf_name="b"),
    "c": Parameter(shape=(16, 8), hf_name="c", layers=(0, 1), frozen_as="int8"),
}
whole = {name: np.random.default_rng(0).random(512 * 256, np.float32) - 0.5 for name in table}
reads = []

def read_slice(param, layer, index):
    reads.append(param.hf_name)
    return whole[param.hf_name][: np.prod(param.shape)].reshape(param.shape)[index]

def to_bytes(tree):
    return [
        [np.asarray(shard.data).tobytes().hex()[:64] for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]

mesh = device_mesh.make_mesh({"replica": 2, "data": 1, "seq": 2})
weights = train_state.load_weights(table, mesh, read_slice)
trained = {name: table[name] for name in ("a", "b")}
step = jax.device_put(np.int32(1), jax.NamedSharding(mesh, jax.P()))
master = {name: weights[name] for name in trained}
state = TrainState(master=master, opt_state={}, step=step)
folder = pathlib.Path(sys.argv[1])
with CheckpointWriter(folder, table=trained, config=CheckpointConfig()) as store:
    store.save(state, make_meta(1))
read_item = reader._read_item
items = []
reader._read_item = lambda path, item, args: items.append(item) or read_item(path, item, args)
restored = reader.restore(folder / "1", state, table=trained, num_steps=1)
lines = {"reads": reads, "items": items}
lines |= {"weights": to_bytes(weights), "restored": to_bytes(restored)}
(folder / f"{process.index}.json").write_text(json.dumps(lines))
distributed.shutdown()
"""


@pytest.mark.e2e
def test_a_process_of_another_replica_reads_nothing(tmp_path):
    environment = {"XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    jobs = two_processes.start("-c", TWO_PROCESSES, tmp_path, env=environment)
    outputs = two_processes.wait(jobs, timeout=120)
    assert [job.returncode for job in jobs] == [0, 0], outputs
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (len(first["reads"]), second["reads"]) == (2 + 1 + 2, [])
    assert (first["items"], second["items"]) == (["master"], [])
    for name in ("weights", "restored"):
        assert first[name] == second[name]
    assert first["restored"][:2] == first["weights"][:2]
