"""A checksum is the same on every mesh, and changes if any bit flips."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.checkpoint import checksums
from jaxsp.core import axes
from jaxsp.model import decoder
from jaxsp.system import device_memory
from tests import batches

MESHES = ((1, 1, 1), (1, 2, 4), (1, 8, 1), (2, 2, 2), (1, 1, 2))


def slow_checksum(array):
    """Computes the two sums element by element, in Python integers."""
    sums = []
    for spread, first, second in checksums._SEEDS:
        total = 0
        for index in np.ndindex(array.shape):
            flat_index = 0
            for dim_index in index:
                flat_index = (flat_index * spread + dim_index) % 2**32
            value = int(array[index].view(f"u{array.itemsize}")) ^ flat_index
            value = value * first % 2**32
            value = (value ^ (value >> 15)) * second % 2**32
            total += value ^ (value >> 13)
        sums.append(f"{total % 2**32:08x}")
    return "".join(sums)


def store(array, sizes, dim, memory_kind=None):
    """Shards an array along a dim, which is padded with ones that must not count."""
    num_shards = sizes[1] * sizes[2]
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, -array.shape[dim] % num_shards)
    spec = PartitionSpec(*[None] * dim, axes.SHARDS)
    sharding = NamedSharding(batches.mesh(*sizes), spec, memory_kind=memory_kind)
    return jax.device_put(np.pad(array, widths, constant_values=1), sharding)


def example(shape, dtype="float32"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "int32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 5, 9)])
def test_checksum_is_the_sum_over_elements(shape, dtype):
    array = np.asarray(example(shape, dtype))
    assert checksums.compute_on_host(array) == slow_checksum(array)
    whole = jax.device_put(array, NamedSharding(batches.mesh(1, 1, 1), PartitionSpec()))
    assert checksums.compute_on_devices({"a": whole}, {"a": array}) == {"a": slow_checksum(array)}


@pytest.mark.parametrize("sizes", MESHES)
def test_checksum_is_the_same_on_every_mesh(sizes):
    arrays = {
        "a": (example((2, 9, 16)), 1),
        "b": (example((2, 9, 16)), 2),
        "c": (example((13,)), 0),
    }
    digests = checksums.compute_on_devices(
        {name: store(array, sizes, dim) for name, (array, dim) in arrays.items()},
        {name: array for name, (array, _) in arrays.items()},
    )
    assert digests == {
        name: checksums.compute_on_host(array) for name, (array, _) in arrays.items()
    }


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="jax 0.11.1: arrays in host memory in a program"
)
def test_checksum_is_the_same_in_host_memory():
    array = example((3, 9, 16))
    digests = checksums.compute_on_devices(
        {"a": store(array, (1, 2, 4), 1, device_memory.MEMORY_KIND)}, {"a": array}
    )
    assert digests == {"a": checksums.compute_on_host(array)}


def test_array_mixed_in_blocks_has_the_same_checksum(monkeypatch):
    array = example((11, 6))
    whole = checksums.compute_on_host(array)
    monkeypatch.setattr(checksums, "_BLOCK_ELEMENTS", 25)  # 4 rows of 6
    assert checksums.compute_on_host(array) == whole == slow_checksum(array)


def test_every_single_bit_changes_both_sums():
    array = example((3, 4))
    right = checksums.compute_on_host(array)
    for index in np.ndindex(array.shape):
        for bit in range(32):
            other = array.copy()
            other.view(np.uint32)[index] ^= np.uint32(1 << bit)
            digests = checksums.compute_on_host(other)
            assert digests[:8] != right[:8]
            assert digests[8:] != right[8:]


def test_permuted_elements_change_the_checksum():
    array = example((4, 6))
    others = (array[::-1], array[:, ::-1], array.reshape(6, 4), array.reshape(24))
    actual = {checksums.compute_on_host(x) for x in (array, *others)}
    assert len(actual) == 5


def test_moments_have_the_unpadded_shape_of_their_weight():
    table = decoder.param_table(batches.model())

    def pad(param):
        *shape, last = param.stacked_shape
        return jax.ShapeDtypeStruct((*shape, last + 3), jnp.float32)

    master = jax.tree.map(pad, table)
    opt = jax.tree.map(lambda x: {"mu": x, "count": jax.ShapeDtypeStruct((), jnp.int32)}, master)
    digests = checksums.unpadded_shapes(table, {"master": master, "opt": opt})
    shapes = {name: param.stacked_shape for name, param in checksums.name_leaves(table).items()}
    assert {name: x.shape for name, x in digests.items()} == {
        **{f"master/{name}": shape for name, shape in shapes.items()},
        **{f"opt/{name}/mu": shape for name, shape in shapes.items()},
        **{f"opt/{name}/count": () for name in shapes},
    }
