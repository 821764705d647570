"""A stack of layers whose inputs wait in host memory, with a backward pass written by hand.

JAX's own (remat.py) can offload the input of each layer. This one needs less memory: host memory
has the input of every k-th layer only, and while attention's backward pass runs, the layer's input
and its gradient are in host memory too. Each layer is recomputed as a whole (`remat: full`).

    forward     group by group of k layers: the group's first input goes to the host
    backward    groups from last to first: the inputs of the group's layers are computed from the
                first, except the output of the last layer, and go to the host; then each layer's
                backward pass, from last to first
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.blocks.config import LayerKind, LayerSegment
from jaxsp.blocks.layers import Gather, Weights
from jaxsp.core import host_memory
from jaxsp.model import remat
from jaxsp.model.remat import RematPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Functions of a layer's parts. `batch` is a tree of arrays without gradients."""

    pre: Callable[..., tuple[Any, Any]]
    """(shards, x, indices, batch) -> (arrays to mix, arrays that `post` gets too)."""
    mix: Callable[..., Array]
    """(shards or None, arrays to mix, indices, batch) -> mixed. The part that communicates."""
    post: Callable[..., Array]
    """(shards, x, mixed, carried arrays, indices, batch) -> x of the next layer."""

    def __call__(self, shards: Weights, x: Array, indices: Any, batch: Any) -> Array:
        """Output of a layer. Args: indices: see `decoder.LayerIndices`."""
        inputs, carried = self.pre(shards["pre_attention"], x, indices, batch)
        mixed = self.mix(shards.get("mix"), inputs, indices, batch)
        return self.post(shards["post_attention"], x, mixed, carried, indices, batch)


def run_layers(
    parts: Mapping[LayerKind, LayerParts],
    x: Array,
    shards: Mapping[LayerKind, Weights],
    indices: Any,
    batch: Any,
    *,
    segments: Sequence[LayerSegment],
    policy: RematPolicy,
    gather: Gather,
) -> Array:
    """Output of the last layer.

    Shapes: arrays of a kind's `shards` stack its layers, those of `indices` all layers.
    """
    if policy.has_own_backward_pass:
        ((kind, shards_of_kind),) = shards.items()
        stack = OffloadedStack(
            parts=parts[kind],
            num_layers=sum(segment.num_layers for segment in segments),
            group_size=policy.offload_every,
            offloads_during_attention=policy.offloads_during_attention,
            merge_holders=gather.merge_holders,
        )
        return stack(x, *gather.split_holders(shards_of_kind), indices, batch)

    num_done: collections.Counter[LayerKind] = collections.Counter()
    for segment in segments:
        run = functools.partial(_run_period, parts, segment.period, batch, policy)
        stacks = {}
        for kind, count in collections.Counter(segment.period).items():
            stack = _take_layers(shards[kind], num_done[kind], segment.repeats, count)
            stacks[kind] = stack
            num_done[kind] += segment.repeats * count
        own = _take_layers(indices, segment.first, segment.repeats, len(segment.period))
        x = jax.lax.scan(run, x, (stacks, own))[0]
    return x


def _run_period(
    parts: Mapping[LayerKind, LayerParts],
    period: Sequence[LayerKind],
    batch: Any,
    policy: RematPolicy,
    x: Array,
    inputs: tuple[Mapping[LayerKind, Weights], Any],
) -> tuple[Array, None]:
    """Runs the layers of a period one after another, each with its own rematerialization."""
    stacks, indices = inputs
    places: collections.Counter[LayerKind] = collections.Counter()
    counts = collections.Counter(period)
    for number, kind in enumerate(period):

        def layer(x: Array, inputs: tuple[Weights, Any], kind: LayerKind = kind) -> Array:
            shards, indices = inputs
            return parts[kind](shards, remat.name_layer_input(x), indices, batch)

        layer_inputs = (
            _take_place(stacks[kind], places[kind], counts[kind]),
            _take_place(indices, number, len(period)),
        )
        x = remat.checkpoint_layer(layer, policy, kind)(x, layer_inputs)
        places[kind] += 1
    return x, None


def _take_layers(stacked: Any, first: int, repeats: int, count: int) -> Any:
    """A segment's part of stacked arrays: [repeats, count, ...], without `count` if it is 1."""

    def take(x: Array) -> Array:
        if x.shape[0] != repeats * count:
            x = jax.lax.slice_in_dim(x, first, first + repeats * count)
        return x if count == 1 else x.reshape(repeats, count, *x.shape[1:])

    return jax.tree.map(take, stacked)


def _take_place(arrays: Any, place: int, count: int) -> Any:
    """Arrays of a layer of a period. `count` layers are stacked, unless it is 1."""
    return arrays if count == 1 else jax.tree.map(lambda x: x[place], arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedStack:
    """The layers of a model, one after another; see the module's docstring."""

    parts: LayerParts
    num_layers: int
    group_size: int
    """Number of layers of a group; the last group may have fewer."""
    offloads_during_attention: bool
    """True if a layer's input and its gradient are in host memory during attention's backward
    pass."""
    merge_holders: Callable[[Any, Any], Any]
    """(holders, values) -> shards: see `layers.Gather`."""

    def __call__(self, x: Array, holders: Any, values: Any, indices: Any, batch: Any) -> Array:
        """Output of the last layer.

        Shapes: arrays of `holders`, `values` and `indices` are [N, ...].

        Args:
            holders: arrays shaped like the shards' gradients: see `layers.Gather.split_holders`.
                Values on the device are the gradients of earlier microbatches: the backward pass
                adds to them in place, and returns the sums. Values in host memory are replaced.
            values: the rest of the layers' shards, without gradients.
        """
        run = jax.custom_vjp(self._run_without_gradient)
        run.defvjp(self._run_forward, self._run_backward)
        return run(x, holders, values, indices, batch)

    @property
    def _groups(self) -> tuple[int, int]:
        """Number of groups with group_size layers, and number of the remaining layers."""
        return divmod(self.num_layers, self.group_size)

    def _run_without_gradient(
        self, x: Array, holders: Any, values: Any, indices: Any, batch: Any
    ) -> Array:
        stacked = holders, values, indices
        apply = lambda layer, x: self._apply_layer(_read(stacked, layer), x, batch)
        return jax.lax.fori_loop(0, self.num_layers, apply, x)

    def _run_forward(
        self, x: Array, holders: Any, values: Any, indices: Any, batch: Any
    ) -> tuple[Array, tuple[Any, ...]]:
        stacked = holders, values, indices
        num_groups, num_remaining = self._groups

        def run_layer(layer: Array, x: Array) -> Array:
            return self._apply_layer(_read(stacked, layer), x, batch)

        def run_group(group: Array | int, state: tuple, *, size: int) -> tuple:
            x, kept = state
            kept = _write(kept, host_memory.to_host(x), group)
            first = group * self.group_size
            x = jax.lax.fori_loop(0, size, lambda i, x: run_layer(first + i, x), x)
            return x, kept

        state = x, _empty_on_host(num_groups + (num_remaining > 0), x)
        run_whole_group = functools.partial(run_group, size=self.group_size)
        state = jax.lax.fori_loop(0, num_groups, run_whole_group, state)
        if num_remaining:
            state = run_group(num_groups, state, size=num_remaining)
        x, kept = state
        return x, (kept, holders, values, indices, batch)

    def _apply_layer(self, layer_inputs: Any, x: Array, batch: Any) -> Array:
        holders, values, indices = layer_inputs
        return self.parts(self.merge_holders(holders, values), x, indices, batch)

    def _run_backward(self, residuals: tuple[Any, ...], dx: Array) -> tuple[Any, ...]:
        kept, holders, values, indices, batch = residuals
        stacked = holders, values, indices
        num_groups, num_remaining = self._groups

        def run_group(group: Array | int, state: tuple, *, size: int) -> tuple:
            dx, gradients, waiting = state
            first = group * self.group_size
            inputs = kept, jnp.asarray(group)
            if size > 1:
                if self.offloads_during_attention:
                    dx, group = jax.lax.optimization_barrier(
                        (host_memory.to_host(dx), jnp.asarray(group))
                    )
                waiting = self._compute_inputs(waiting, kept, group, stacked, batch, size=size)
                # Without the barrier, XLA makes a copy of the inputs in host memory
                dx, waiting = jax.lax.optimization_barrier((dx, waiting))
                dx = host_memory.to_device(dx)
                inputs = waiting, jnp.asarray(0)

            def run_layer(i: Array, state: tuple) -> tuple:
                dx, gradients = state
                index = size - 1 - i
                layer_inputs = _read(stacked, first + index)
                stored, offset = inputs
                dx, new = self._differentiate_layer(
                    layer_inputs, batch, dx, (stored, offset + index)
                )
                add = functools.partial(_add_gradient, index=first + index)
                return dx, jax.tree.map(add, gradients, new)

            return *jax.lax.fori_loop(0, size, run_layer, (dx, gradients)), waiting

        # One array for all groups: XLA runs the last one after the loop, with an array of its own
        waiting = _empty_on_host(self.group_size, dx) if self.group_size > 1 else None
        state = dx, holders, waiting
        if num_remaining:
            state = run_group(num_groups, state, size=num_remaining)
        run_whole_group = functools.partial(run_group, size=self.group_size)
        state = jax.lax.fori_loop(
            0, num_groups, lambda i, state: run_whole_group(num_groups - 1 - i, state), state
        )
        dx, gradients, _ = state
        return dx, gradients, None, None, None

    def _compute_inputs(
        self,
        waiting: Array,
        kept: Array,
        group: Array | int,
        stacked: Any,
        batch: Any,
        *,
        size: int,
    ) -> Array:
        """Inputs of a group's layers, in host memory. Args: waiting: array that they replace."""
        x = host_memory.to_device(_read(kept, group))

        def run_layer(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            x, waiting = state
            layer_inputs = _read(stacked, group * self.group_size + i)
            x = self._apply_layer(layer_inputs, x, batch)
            return x, _write(waiting, host_memory.to_host(x), i + 1)

        waiting = _write(waiting, host_memory.to_host(x), 0)
        return jax.lax.fori_loop(0, size - 1, run_layer, (x, waiting))[1]

    def _differentiate_layer(
        self, layer_inputs: Any, batch: Any, dx: Array, waiting: tuple[Array, Array]
    ) -> tuple[Array, Any]:
        """Gradients of a layer's input and of its holders.

        Args:
            dx: gradient of its output.
            waiting: inputs of several layers, in host memory, and the index of this one's.
        """
        kept, index = waiting
        holders, values, indices = layer_inputs

        def bind(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            """Part of the layer as a function of its holders and inputs."""

            def run(holders: Any, *inputs: Any) -> Any:
                shards = self.merge_holders(holders, values[name]) if name in values else None
                return function(shards, *inputs, indices, batch)

            return run

        pre = bind(self.parts.pre, "pre_attention")
        mix = bind(self.parts.mix, "mix")
        post = bind(self.parts.post, "post_attention")
        read_input = lambda index: host_memory.to_device(_read(kept, index))
        # Recompute what is mixed, and the result
        x = read_input(index)
        inputs, carried = pre(holders["pre_attention"], x)
        if self.offloads_during_attention:
            dx, inputs = jax.lax.optimization_barrier((host_memory.to_host(dx), inputs))
        mixed, pull_mix = jax.vjp(mix, holders.get("mix"), inputs)
        # Gradients of the part after the mixing
        if self.offloads_during_attention:
            # The input is read again once the mixing has ended
            dx, mixed, index = jax.lax.optimization_barrier((dx, mixed, index))
            dx = host_memory.to_device(dx)
            x = read_input(index)
        _, pull_post = jax.vjp(post, holders["post_attention"], x, mixed, carried)
        post_gradients, dx, dmixed, dcarried = pull_post(dx)
        # Gradients of the mixing
        if self.offloads_during_attention:
            dx, dmixed = jax.lax.optimization_barrier((host_memory.to_host(dx), dmixed))
        mix_gradients, dinputs = pull_mix(dmixed)
        # Gradients of the part before it
        if self.offloads_during_attention:
            dx, dinputs, index = jax.lax.optimization_barrier((dx, dinputs, index))
            dx = host_memory.to_device(dx)
            x = read_input(index)
        _, pull_pre = jax.vjp(pre, holders["pre_attention"], x)
        pre_gradients, dx_of_mixing = pull_pre((dinputs, dcarried))
        gradients = {
            "pre_attention": pre_gradients,
            "mix": mix_gradients,
            "post_attention": post_gradients,
        }
        return dx + dx_of_mixing, {name: gradients[name] for name in holders}


def _empty_on_host(count: int, x: Array) -> Array:
    """Uninitialized arrays of the shape of x, stacked, in host memory."""
    return host_memory.to_host(jax.lax.empty((count, *x.shape), x.dtype))


def _read(stacked: Any, index: Array | int) -> Any:
    """One layer's arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _write(stacked: Array, layer: Array, index: Array | int) -> Array:
    """Replaces one layer's array."""
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)


def _add_gradient(sums: Array, gradient: Array, index: Array | int) -> Array:
    """Adds one layer's gradient to the sums; replaces it in host memory, where nothing is added."""
    if not host_memory.is_on_host(sums):
        gradient = gradient + _read(sums, index)
    return _write(sums, gradient, index)
