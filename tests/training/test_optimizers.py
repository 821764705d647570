"""Every optimizer: equal to optax's on one device and on every mesh; its state and its bytes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.optimizers import adamw8bit, muon, optimizer
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory
from jaxsp.training.train_state import TrainState
from tests import batches, tolerances
from tests.training import optimizer_cases, runs
from tests.training.optimizer_cases import NUM_STEPS, TABLE

pytestmark = pytest.mark.usefixtures("small_shards")

QUICK = ("muon", "adafactor")
"""Optimizers of the default tier, which are not elementwise."""

each_optimizer = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.e2e)
        for name in optimizer_cases.OPTIONS
    ],
)


@functools.cache
def run(name, sizes):
    return optimizer_cases.run_on_mesh(optimizer_cases.make_config(name), sizes)


def largest_error(actual, expected):
    return max(batches.relative_error(actual[name], expected[name]) for name in expected)


@each_optimizer
@pytest.mark.parametrize("sizes", [(1, 2, 4), pytest.param((2, 1, 3), marks=pytest.mark.slow)])
def test_weights_after_five_steps_are_those_of_optax(name, sizes):
    """With weights of every placement, and 3 layers on 8 and 3 shards. Padding of weights and state
    stays zero, also through Newton-Schulz iterations, and in codes of 8 bits."""
    master, state = run(name, sizes)
    expected = optimizer_cases.run_optax(optimizer_cases.make_config(name))
    actual = optimizer_cases.unpad(master)
    before = batches.name_leaves(optimizer_cases.draw(1))
    moved = {key: expected[key] - before[key] for key in before}
    assert largest_error(actual, expected) < tolerances.OPTAX
    moves = {key: actual[key] - before[key] for key in before}
    assert largest_error(moves, moved) < tolerances.OPTIMIZER
    assert min(map(np.linalg.norm, moved.values())) > 1e-3
    stored = jax.tree.leaves((master, state))
    unpadded = [
        *jax.tree.leaves(jax.tree.map(runs.remove_padding, TABLE, master)),
        *optimizer_cases.unpad_state(master, state),
    ]
    assert [np.count_nonzero(x) for x in stored] == [np.count_nonzero(x) for x in unpadded]
    assert any(x.size > own.size for x, own in zip(stored, unpadded, strict=True))


def test_muon_exchanges_a_group_of_layers_for_each_shard_at_a_time():
    param = Parameter(shape=(64, 32), hf_name="", layers=tuple(range(10)))
    assert muon.group_size(param, 4) == 4
    experts = dataclasses.replace(param, shape=(6, 64, 32), num_experts=6)
    assert muon.group_size(experts, 4) == 1
    whole = dataclasses.replace(param, shape=(8, 64, 32), num_experts=8)
    assert muon.group_size(whole, 4) == 1


def test_newton_schulz_brings_singular_values_near_one():
    """Matrices are tall and wide, with singular values down to 1 % of the largest."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((40, 24)))
    right, _ = np.linalg.qr(rng.standard_normal((24, 24)))
    tall = (left * np.geomspace(1, 0.01, 24)) @ right.T
    for matrix in (tall, tall.T):
        param = Parameter(shape=matrix.shape, hf_name="", layers=(0,))
        actual = muon.orthogonalize(param, jnp.float32(matrix[None]))
        values = np.linalg.svd(np.asarray(actual[0]) / (0.2 * 40**0.5), compute_uv=False)
        assert 0.65 < values.min() < values.max() < 1.25


# State

STATE_BYTES = {
    "adamw": 8.0,
    "sgd": 4.0,
    "lion": 4.0,
    "muon": 4.0,
    "adamw8bit": 2 + 8 / 256,
    "adafactor": 4 / 4096 + 4 / 14336,
}


@pytest.mark.parametrize("name", STATE_BYTES)
def test_bytes_of_state_for_each_weight_of_a_large_matrix(name):
    config = optimizer_cases.make_config(name).optimizer
    param = Parameter(shape=(14336, 4096), hf_name="", layers=tuple(range(32)))
    size = param.size * param.num_layers
    one_device = sum(optimizer.state_bytes(config, param, 1))
    assert one_device / size == pytest.approx(STATE_BYTES[name], abs=1e-5)
    on_eight = sum(optimizer.state_bytes(config, param, 8))
    expected = 1 if name == "adafactor" else 1 / 8  # averages of rows are on all devices
    assert on_eight / one_device == pytest.approx(expected, abs=1e-5)
    stored = optimizer_cases.describe_state(
        optimizer_cases.make_config(name), batches.mesh(1, 2, 4)
    )
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(stored)
    )
    assert held == sum(sum(optimizer.state_bytes(config, row, 8)) for row in jax.tree.leaves(TABLE))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
def test_a_checkpoint_resumes_on_another_mesh(name, tmp_path):
    """The state has the same bits after it is saved on 8 shards and restored on 3."""
    config = optimizer_cases.make_config(name)
    master, state = run(name, (1, 2, 4))
    mesh = batches.mesh(1, 1, 3)
    meta = CheckpointMeta(config={}, model={}, data={}, step=5, rows_consumed=0, num_tokens_total=0)
    step = jax.device_put(np.int32(NUM_STEPS), jax.tree.leaves(state)[0].sharding)
    with CheckpointWriter(tmp_path, table=TABLE, config=CheckpointConfig()) as store:
        # the writer's state is given back to the next step: save copies
        copy = jax.tree.map(jnp.copy, (master, state))
        store.save(TrainState(master=copy[0], opt_state=copy[1], step=step), meta)
    like_master = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        runs.put_weights(TABLE, optimizer_cases.draw(1), mesh),
    )
    like = TrainState(
        master=like_master, opt_state=optimizer_cases.describe_state(config, mesh), step=step
    )
    restored = reader.restore(tmp_path / "5", like, table=TABLE, num_steps=NUM_STEPS)
    assert batches.is_bitwise_equal(
        optimizer_cases.unpad(restored.master), optimizer_cases.unpad(master)
    )
    expected = optimizer_cases.unpad_state(master, state)
    assert batches.is_bitwise_equal(
        optimizer_cases.unpad_state(restored.master, restored.opt_state), expected
    )
    assert any(np.count_nonzero(x) for x in expected)


@runs.NEEDS_HOST
@each_optimizer
def test_a_state_in_host_memory_gives_the_same_weights(name, monkeypatch):
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 1000)
    config = optimizer_cases.make_config(name)
    master, state = optimizer_cases.run_on_mesh(config, (1, 2, 4), offload=True)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((master, state)) if x.size > 50_000}
    assert kinds == {device_memory.MEMORY_KIND}
    assert (
        largest_error(optimizer_cases.unpad(master), optimizer_cases.unpad(run(name, (1, 2, 4))[0]))
        < tolerances.OPTAX
    )


# Moments of 8 bits


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_number_is_stored_as_the_nearest_entry_of_its_block(is_signed):
    rng = np.random.default_rng(3)
    numbers = np.float32(rng.standard_normal((5, 300)) ** 3)
    numbers[0, :3] = (0, 1e-9, 0)
    if not is_signed:
        numbers = np.abs(numbers)
    quantize = functools.partial(adamw8bit.quantize, is_signed=is_signed)
    stored = quantize(jnp.asarray(numbers))
    table = np.float64(adamw8bit.make_table(128 if is_signed else 256))
    assert table[-1] == 1
    for row in range(5):
        for block in (slice(0, 256), slice(256, 300)):
            part = np.float64(numbers[row, block])
            scale = np.abs(part).max()
            nearest = np.abs(table - np.abs(part)[:, None] / scale).argmin(1)
            if not is_signed:
                nearest = np.where(part > 0, np.maximum(nearest, 1), nearest)
            expected = np.sign(part) * table[nearest] * scale
            actual = np.asarray(adamw8bit.dequantize(stored))[row, block]
            assert batches.relative_error(actual, expected) < 1e-6
    if not is_signed:
        assert np.array_equal(np.asarray(stored.codes) == 0, numbers == 0)


def test_moments_of_8_bits_are_near_those_of_32_bits():
    eight, full = (
        optimizer_cases.unpad(run(name, (1, 2, 4))[0])["layers.gate"]
        for name in ("adamw8bit", "adamw")
    )
    before = optimizer_cases.draw(1)["layers"]["gate"]
    assert 1e-4 < batches.relative_error(eight - before, full - before) < 0.1


# Parameter groups


def test_a_group_changes_the_learning_rate_and_the_decay_of_its_weights_only():
    groups = [
        {"pattern": "model.layers.*.gate_proj.*", "learning_rate_factor": 0.5},
        {"pattern": "*gate_proj*", "learning_rate_factor": 0.0},
        {"pattern": "*.down_proj.*", "weight_decay": 0.0},
        {"pattern": "model.embed*", "learning_rate_factor": 0.0},
    ]
    options = {"momentum": 0.0, "nesterov": False, "schedule": "constant", "learning_rate": 0.1}
    config = optimizer_cases.make_config("sgd", groups=groups, **options)
    actual = optimizer_cases.unpad(optimizer_cases.run_on_mesh(config, (1, 1, 1))[0])
    before = batches.name_leaves(optimizer_cases.draw(1))
    gradients = [batches.name_leaves(tree) for tree in optimizer_cases.draw_gradients()]
    for name, weight in before.items():
        factor = {"layers.gate": 0.5, "embedding": 0.0}.get(name, 1.0)
        has_decay = "norm" not in name and "bias" not in name and "down" not in name
        expected = np.float64(weight)
        for gradient in gradients:
            decay = 0.1 * expected if has_decay else 0.0
            expected = expected - 0.1 * factor * (0.5 * gradient[name] + decay)
        assert batches.relative_error(actual[name], expected) < tolerances.OPTAX, name
