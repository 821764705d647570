"""Memory through which arrays are written to a checkpoint and read from it on GPUs."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint._src.serialization import replica_slices

from jaxsp.checkpoint import reader, run_paths, writer
from jaxsp.system.device_memory import MEMORY_KIND


@pytest.mark.parametrize("memory_kind", ["device", MEMORY_KIND])
def test_no_copy_of_a_checkpoint_is_in_the_pool_for_offloaded_arrays(
    tmp_path, monkeypatch, memory_kind
):
    """On GPUs, orbax by default copies all arrays of an item into pinned host memory at once."""
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
    weight = jax.device_put(np.arange(6, dtype=np.float32), sharding)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    transferred = []
    transfer = replica_slices.transfer_arrays_to_host

    def spy_on_transfer(arrays, *args, **kwargs):
        transferred.append((len(arrays), kwargs["enable_pinned_host_transfer"]))
        return transfer(arrays, *args, **kwargs)

    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", spy_on_transfer)
    handler = writer.make_handler(has_separate_folders=False)
    commits = writer.start_writes(handler, tmp_path, {run_paths.MASTER: {"a": weight}})
    writer.wait_for_commits(commits)
    handler.finalize(tmp_path / run_paths.MASTER)
    handler.close()
    assert transferred == [(1, False)]

    kinds = []
    put = jax.device_put

    def spy_on_put(x, place):
        kinds.append(getattr(place, "sharding", place).memory_kind)
        return put(x, place)

    monkeypatch.setattr(jax, "device_put", spy_on_put)
    to = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(6,), dtype=np.float32)
    args = ocp.args.PyTreeRestore(item={"a": weight}, restore_args={"a": to})
    restored = reader._read_item(tmp_path, run_paths.MASTER, args)["a"]
    assert kinds == [memory_kind], "a restored array goes straight to its own memory"
    assert restored.sharding.memory_kind == memory_kind
    assert np.array_equal(restored, np.arange(6))
