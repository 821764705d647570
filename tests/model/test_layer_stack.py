"""The hand-written backward pass of a stack of layers: gradients, recomputation, host memory."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.config import LayerKind, LayerSegment
from jaxsp.model import layer_stack
from jaxsp.model.layer_stack import Layer, OffloadedStack
from jaxsp.model.remat import RematPolicy
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory
from tests.unsharded import UnshardedGather

KIND = LayerKind("attention", "mlp")
NUM_LAYERS = 7
GROUPS = [(1, True), (2, False), (3, True), (7, False), (9, True)]
"""Sizes of groups, which need not divide the layers, and offloads_during_attention."""


@pytest.fixture(autouse=True)
def plain_memory(monkeypatch):
    """Older releases have no arrays in host memory inside loops; the arithmetic is the same."""
    if jax.__version_info__ < host_offload.MIN_RELEASE:
        for name in ("to_host", "to_device"):
            monkeypatch.setattr(device_memory, name, lambda x: x)


class ToyLayer(Layer):
    def __init__(self, on_attend=lambda: None):
        self.on_attend = on_attend

    def project(self, shards, x, index, batch):
        y = jnp.tanh(x @ shards["w"]) * (1 + index)
        return (y, y + batch, 2 * y), (jnp.sin(x),)

    def mix(self, shards, inputs, index, batch):
        jax.debug.callback(self.on_attend)
        q, k, v = inputs
        return jnp.cumsum(q * k, 0) / 8 + v * shards["w"][None]

    def finish(self, shards, x, mixed, carried, index, batch):
        y = x + jnp.cos(mixed @ shards["w"]) + carried[0]
        return y, {"squares": jnp.sum(y**2, axis=-1)}


class OtherLayer(ToyLayer):
    def mix(self, *inputs):
        return -2 * super().mix(*inputs)

    def finish(self, *inputs):
        return super().finish(*inputs)[0], {}


def draw(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 3)
    weights = {
        "pre_attention": {"w": normal(NUM_LAYERS, 6, 6)},
        "mix": {"w": normal(NUM_LAYERS, 6)},
        "post_attention": {"w": normal(NUM_LAYERS, 6, 6)},
    }
    return normal(5, 6), weights, jnp.arange(NUM_LAYERS) / 10, normal(5, 6)


def run_plain(x, weights, indices, batch):
    """The layers in a Python loop."""
    layer_of_kind = ToyLayer()
    all_sums = []
    for layer in range(NUM_LAYERS):
        own = jax.tree.map(lambda w, i=layer: w[i], weights)
        x, sums = layer_of_kind(x, (own, indices[layer]), batch=batch)
        all_sums.append(sums["squares"])
    return make_loss(x, jnp.stack(all_sums))


def make_loss(x, sums):
    """A loss in which the sums of each layer have another weight."""
    weights = 1 / (1 + jnp.arange(sums.size)).reshape(sums.shape)
    return jnp.sum(x**2) + jnp.sum(weights * sums)


def merge_holders(holders, values):
    """Weights whose gradients are those of their holders, and which do not depend on them."""
    return jax.tree.map(lambda h, v: v + (h - jax.lax.stop_gradient(h)), holders, values)


def run_stack(x, holders, values, indices, batch, *, group_size, during_attention, layer):
    stack = OffloadedStack(
        layers={KIND: layer},
        period=(KIND,),
        num_periods=NUM_LAYERS,
        group_size=group_size,
        offloads_during_attention=during_attention,
        merge_holders=merge_holders,
    )
    x, sums = stack(x, {KIND: holders}, {KIND: values}, indices, batch)
    return make_loss(x, sums[KIND]["squares"])


def differentiate(group_size, during_attention, on_attend=lambda: None):
    """The loss and its gradients, which the backward pass adds to the values of the holders."""
    run = functools.partial(
        run_stack,
        group_size=group_size,
        during_attention=during_attention,
        layer=ToyLayer(on_attend),
    )
    x, weights, indices, batch = draw()
    holders = jax.tree.map(lambda w: 2 * w, weights)
    differentiate = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))
    loss, (dx, sums) = differentiate(x, holders, weights, indices, batch)
    return loss, (dx, jax.tree.map(jnp.subtract, sums, holders))


@pytest.mark.parametrize(("group_size", "during_attention"), GROUPS)
def test_gradients_are_those_of_the_layers_one_after_another(group_size, during_attention):
    expected = jax.value_and_grad(run_plain, argnums=(0, 1))(*draw())
    actual = differentiate(group_size, during_attention)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group_size", "groups"), [(1, 7), (2, 4), (3, 3), (9, 1)])
def test_the_last_layer_of_a_group_is_not_computed_for_its_output(group_size, groups):
    """Forward, again before each layer's backward pass, and the inputs that were not kept."""
    calls = []
    jax.block_until_ready(differentiate(group_size, False, lambda: calls.append(1)))
    jax.effects_barrier()
    assert len(calls) == 2 * NUM_LAYERS + (NUM_LAYERS - groups)


OTHER = LayerKind("delta_net", "mlp")
SEGMENTS = [
    LayerSegment(0, (OTHER,), 2),
    LayerSegment(2, (KIND, KIND, OTHER, KIND), 3),
]
KINDS = [kind for segment in SEGMENTS for _ in range(segment.repeats) for kind in segment.period]


POLICIES = [
    RematPolicy(remat="full"),
    RematPolicy(remat="full", offload_activations="layer_inputs", offload_every=8),
    RematPolicy(remat="full", offload_activations="layer_inputs", offloads_during_attention=True),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "every eighth", "during attention"])
def test_layers_of_several_kinds_run_in_their_order(policy):
    """Segments of one and of several layers, a kind in several places of a period and segment."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 3)
    draw_kind = lambda n: {
        "pre_attention": {"w": normal(n, 6, 6)},
        "mix": {"w": normal(n, 6)},
        "post_attention": {"w": normal(n, 6, 6)},
    }
    weights = {kind: draw_kind(KINDS.count(kind)) for kind in (KIND, OTHER)}
    layers = {KIND: ToyLayer(), OTHER: OtherLayer()}
    x = normal(5, 6)
    indices = jnp.arange(len(KINDS)) / 10
    batch = normal(5, 6)

    def run_plain(x, weights):
        done = collections.Counter()
        all_sums = []
        for layer, kind in enumerate(KINDS):
            own = jax.tree.map(lambda w, i=done[kind]: w[i], weights[kind])
            x, sums = layers[kind](x, (own, indices[layer]), batch=batch)
            all_sums += sums.values()
            done[kind] += 1
        return make_loss(x, jnp.stack(all_sums))

    def run(x, weights):
        options = {"segments": SEGMENTS, "policy": policy, "gather": UnshardedGather()}
        x, sums = layer_stack.run_layers(layers, x, weights, indices, batch, **options)
        return make_loss(x, sums["squares"])

    expected = jax.value_and_grad(run_plain, argnums=(0, 1))(x, weights)
    loss, (dx, dweights) = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(x, weights)
    if policy.has_own_backward_pass:  # it adds to the holders, which are the weights
        dweights = jax.tree.map(jnp.subtract, dweights, weights)
    for a, b in zip(
        jax.tree.leaves((loss, (dx, dweights))), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


class StoringLayer(ToyLayer):
    """Later layers mix its keys."""

    def project(self, *inputs):
        (q, k, v), carried = super().project(*inputs)
        return (q, k, v), (*carried, k)

    def finish(self, shards, x, mixed, carried, index, batch):
        y, sums = super().finish(shards, x, mixed, carried, index, batch)
        return y, sums | {layer_stack.STORED: {"keys": carried[1]}}


class SharingLayer(ToyLayer):
    """Mixes the keys of an earlier layer, and adds an array that all layers share."""

    def project(self, *inputs):
        (q, _, v), carried = super().project(*inputs)
        return (q, v), carried

    def share(self, shared, dtype):
        return (shared["keys"],), (shared["all"],)

    def mix(self, shards, inputs, index, batch):
        q, v, k = inputs
        return super().mix(shards, (q, k, v), index, batch)

    def finish(self, shards, x, mixed, carried, index, batch):
        y, sums = super().finish(shards, x, mixed, carried, index, batch)
        return y + jnp.sin(carried[1]), sums


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "every eighth", "during attention"])
def test_gradients_of_shared_arrays_are_summed_over_the_layers(policy):
    source = LayerKind("attention", "experts")
    kinds = [KIND, source, *4 * [OTHER]]
    layers = {KIND: ToyLayer(), source: StoringLayer(), OTHER: SharingLayer()}
    segments = [
        LayerSegment(0, (KIND,), 1),
        LayerSegment(1, (source,), 1),
        LayerSegment(2, (OTHER, OTHER), 2),
    ]
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 3)
    weights = {
        kind: {
            "pre_attention": {"w": normal(kinds.count(kind), 6, 6)},
            "mix": {"w": normal(kinds.count(kind), 6)},
            "post_attention": {"w": normal(kinds.count(kind), 6, 6)},
        }
        for kind in layers
    }
    x = normal(5, 6)
    batch = normal(5, 6)
    of_all = normal(5, 6)
    indices = jnp.arange(len(kinds)) / 10

    def run_plain(x, weights, of_all):
        shared = {"all": of_all}
        all_sums = []
        for layer, kind in enumerate(kinds):
            number = kinds[:layer].count(kind)
            own = jax.tree.map(lambda w, i=number: w[i], weights[kind])
            x, sums = layers[kind](x, (own, indices[layer]), batch=batch, shared=shared)
            shared |= sums.pop(layer_stack.STORED, {})
            all_sums.append(sums["squares"])
        return make_loss(x, jnp.stack(all_sums))

    def run(x, weights, of_all):
        options = {"segments": segments, "policy": policy, "gather": UnshardedGather()}
        shared = {"all": of_all}
        x, sums = layer_stack.run_layers(
            layers, x, weights, indices, batch, shared=shared, **options
        )
        return make_loss(x, sums["squares"])

    inputs = (x, weights, of_all)
    expected = jax.value_and_grad(run_plain, argnums=(0, 1, 2))(*inputs)
    loss, (dx, dweights, dall) = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*inputs)
    if policy.has_own_backward_pass:  # it adds to the holders, which are the weights
        dweights = jax.tree.map(jnp.subtract, dweights, weights)
    actual = (loss, (dx, dweights, dall))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
