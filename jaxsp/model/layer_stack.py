"""A stack of layers whose inputs wait in host memory, with a backward pass written by hand.

JAX's own (remat.py) can offload the input of each layer. This one needs less memory: host memory
has the input of every k-th layer only, and while the mixer's backward pass runs, the layer's input
and its gradient are in host memory too. Each layer is recomputed as a whole (`remat: full`). If the
kinds of layers repeat with a period, k is a multiple of it.

    forward     group by group of k layers: the group's first input goes to the host
    backward    groups from last to first: the inputs of the group's layers are computed from the
                first, except the output of the last layer, and go to the host; then each layer's
                backward pass, from last to first
"""

import abc
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.blocks.config import LayerKind, LayerSegment
from jaxsp.blocks.layers import Gather, Weights
from jaxsp.model import remat
from jaxsp.model.remat import RematPolicy
from jaxsp.system import device_memory

Sums = dict[str, Any]
"""Sums of a layer over tokens, by name, which may have gradients; empty for most layers. Those of
several layers are stacked."""

STORED = "stored"
"""Entry of a layer's sums with arrays, by name, that the layers of later segments share. Such a
layer is a segment of its own."""

Shared = dict[str, Any]
"""Arrays that several layers share, by name, with gradients."""


class Layer(abc.ABC):
    """The layers of a kind: functions of the shards of one of them.

    Args:
        indices: see `decoder.LayerIndices`.
        batch: tree of arrays without gradients.
    """

    @abc.abstractmethod
    def project(self, shards: Weights, x: Array, indices: Any, batch: Any) -> tuple[Any, Any]:
        """Arrays to mix, and arrays that `finish` gets too."""

    @abc.abstractmethod
    def mix(self, shards: Weights | None, inputs: Any, indices: Any, batch: Any) -> Array:
        """The mixed array. The part that communicates."""

    @abc.abstractmethod
    def finish(
        self, shards: Weights, x: Array, mixed: Array, carried: Any, indices: Any, batch: Any
    ) -> tuple[Array, Sums]:
        """Input of the next layer, and the layer's sums."""

    def share(self, shared: Shared, dtype: jnp.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Shared arrays that the layer mixes too, and those that `finish` gets too."""
        return (), ()

    def __call__(
        self, x: Array, own: tuple[Weights, Any], *, batch: Any, shared: Shared | None = None
    ) -> tuple[Array, Sums]:
        """Runs a layer. Args: own: its shards and indices."""
        shards, indices = own
        x = remat.name_layer_input(x)
        inputs, carried = self.project(shards["pre_attention"], x, indices, batch)
        to_mix, to_finish = self.share(shared or {}, x.dtype)
        mixed = self.mix(shards.get("mix"), (*inputs, *to_mix), indices, batch)
        carried = (*carried, *to_finish)
        return self.finish(shards["post_attention"], x, mixed, carried, indices, batch)


def run_layers(
    layers: Mapping[LayerKind, Layer],
    x: Array,
    shards: Mapping[LayerKind, Weights],
    indices: Any,
    batch: Any,
    *,
    segments: Sequence[LayerSegment],
    policy: RematPolicy,
    gather: Gather,
    shared: Shared | None = None,
) -> tuple[Array, Sums]:
    """Output of the last layer, and the sums of the layers that have some.

    Shapes: arrays of a kind's `shards` stack its layers, those of `indices` all layers.

    Args: shared: arrays that all layers share.
    """
    shared = shared or {}
    all_sums: list[Sums] = []
    num_done: collections.Counter[LayerKind] = collections.Counter()
    for segment in segments:
        counts = collections.Counter(segment.period)
        numbers = {kind: segment.repeats * count for kind, count in counts.items()}
        stacks = {
            kind: _take_layers(shards[kind], num_done[kind], number)
            for kind, number in numbers.items()
        }
        own = _take_layers(indices, segment.first, segment.num_layers)
        num_done.update(numbers)
        if policy.has_own_backward_pass:
            stack = OffloadedStack(
                layers=layers,
                period=segment.period,
                num_periods=segment.repeats,
                group_size=-(-policy.offload_every // len(segment.period)),
                offloads_during_attention=policy.offloads_during_attention,
                merge_holders=gather.merge_holders,
            )
            x, sums_of_kinds = stack(x, *gather.split_holders(stacks), own, batch, shared)
            for sums in sums_of_kinds.values():
                shared = shared | pop_stored(sums)
                all_sums.append(sums)
            continue
        divided = policy.divide(segment, segments[-1].first + segments[-1].num_layers)
        if len(segment.period) == len(divided) == 1:
            (kind,) = stacks
            run_layer = functools.partial(layers[kind], batch=batch, shared=shared)
            run = remat.checkpoint_layer(run_layer, divided[0][1], kind)
            x, sums = jax.lax.scan(run, x, (stacks[kind], own))
            shared = shared | pop_stored(sums)
            all_sums.append(sums)
            continue
        count = len(segment.period)
        own = jax.tree.map(lambda x, n=count: x.reshape(-1, n, *x.shape[1:]), own)
        for periods, of_part in divided:
            run_layers = {
                kind: functools.partial(layers[kind], batch=batch, shared=shared) for kind in counts
            }
            run = functools.partial(_run_period, run_layers, segment.period, stacks, of_part)
            of_periods = _take_layers(own, periods.start, len(periods))
            inputs = jnp.asarray(periods, jnp.int32), of_periods
            x, sums = jax.lax.scan(run, x, inputs)
            all_sums.append(jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), sums))
    return x, _join_sums(all_sums)


def pop_stored(sums: Sums) -> Shared:
    """Removes and returns what the only layer of a segment stored."""
    return jax.tree.map(lambda y: y[0], sums.pop(STORED, {}))


def _join_sums(parts: Sequence[Sums]) -> Sums:
    """Stacked sums of several groups of layers; groups without sums are left out."""
    given = [sums for sums in parts if sums]
    return jax.tree.map(lambda *sums: jnp.concatenate(sums), *given) if given else {}


def is_one_loop(segments: Sequence[LayerSegment], policy: RematPolicy) -> bool:
    """True if JAX differentiates one loop over all layers. Then each iteration of the backward pass
    writes one layer's gradients, without adding to others."""
    segment = segments[0]
    is_uniform = len(segments) == len(segment.period) == 1
    is_undivided = len(policy.divide(segment, segment.num_layers)) == 1
    return is_uniform and is_undivided and not policy.has_own_backward_pass


def _run_period(
    layers: Mapping[LayerKind, Callable[..., tuple[Array, Sums]]],
    period: Sequence[LayerKind],
    stacks: Mapping[LayerKind, Weights],
    policy: RematPolicy,
    x: Array,
    inputs: tuple[Array, Any],
) -> tuple[Array, Sums]:
    """Runs the layers of a period one after another, each with its own rematerialization.

    Layers of one kind in a row are a loop, which is compiled once. Each layer reads its weights
    from the stack of all periods, so that its gradient is added to the stack's in place. Gradients
    of parts of parts would be copied (27B on 8 GPUs: 13.7 GiB more).
    """
    number, indices = inputs
    counts = collections.Counter(period)
    done: collections.Counter[LayerKind] = collections.Counter()
    all_sums = []
    for kind, group in itertools.groupby(period):
        count = len(list(group))

        def layer(x: Array, inputs: tuple[Array, Any], kind: LayerKind = kind) -> Any:
            place, indices = inputs
            return layers[kind](x, (_read(stacks[kind], place), indices))

        checkpointed = remat.checkpoint_layer(layer, policy, kind)
        first = _index(number, counts[kind], done[kind])
        place = done.total()
        if count == 1:
            of_layer = jax.tree.map(lambda x, place=place: x[place], indices)
            x, sums = checkpointed(x, (first, of_layer))
            sums = jax.tree.map(lambda y: y[None], sums)
        else:
            of_group = jax.tree.map(lambda x, i=place, n=count: x[i : i + n], indices)
            places = first + jnp.arange(count, dtype=jnp.int32)
            x, sums = jax.lax.scan(checkpointed, x, (places, of_group))
        all_sums.append(sums)
        done[kind] += count
    return x, _join_sums(all_sums)


def _take_layers(stacked: Any, first: int, number: int) -> Any:
    """Part of stacked arrays; the arrays themselves if it is all of them."""

    def take(x: Array) -> Array:
        return x if len(x) == number else jax.lax.slice_in_dim(x, first, first + number)

    return jax.tree.map(take, stacked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedStack:
    """The layers of a segment, one after another; see the module's docstring."""

    layers: Mapping[LayerKind, Layer]
    period: Sequence[LayerKind]
    num_periods: int
    group_size: int
    """Number of periods of a group; the last group may have fewer."""
    offloads_during_attention: bool
    """True if a layer's input and its gradient are in host memory during attention's backward
    pass."""
    merge_holders: Callable[[Any, Any], Any]
    """(holders, values) -> shards: see `layers.Gather`."""

    def __call__(
        self,
        x: Array,
        holders: Any,
        values: Any,
        indices: Any,
        batch: Any,
        shared: Shared | None = None,
    ) -> tuple[Array, dict[LayerKind, Sums]]:
        """Output of the last layer, and the sums of the layers of each kind.

        Shapes: arrays of `holders` and `values`, by kind, stack the layers of a kind, those of
            `indices` all layers.

        Args:
            holders: arrays shaped like the shards' gradients: see `layers.Gather.split_holders`.
                Values on the device are the gradients of earlier microbatches: the backward pass
                adds to them in place, and returns the sums. Values in host memory are replaced.
            values: the rest of the layers' shards, without gradients.
        """
        run = jax.custom_vjp(self._run_without_gradient)
        run.defvjp(self._run_forward, self._run_backward)
        return run(x, holders, values, indices, batch, shared or {})

    @property
    def _groups(self) -> tuple[int, int]:
        """Number of groups with group_size periods, and number of the remaining periods."""
        return divmod(self.num_periods, self.group_size)

    def _run_without_gradient(
        self, x: Array, holders: Any, values: Any, indices: Any, batch: Any, shared: Shared
    ) -> tuple[Array, dict[LayerKind, Sums]]:
        stacked = holders, values, indices
        batch = batch, shared
        run = lambda period, state: self._run_period(stacked, period, state, batch)
        return jax.lax.fori_loop(
            0, self.num_periods, run, (x, self._make_empty_sums(stacked, x, batch))
        )

    def _make_empty_sums(self, stacked: Any, x: Array, batch: Any) -> dict[LayerKind, Sums]:
        """Zeros for the sums of all layers of each kind."""
        counts = collections.Counter(self.period)

        def make(kind: LayerKind) -> Sums:
            run = functools.partial(self._apply_layer, number=self.period.index(kind), batch=batch)
            sums = jax.eval_shape(lambda stacked, x: run(stacked, 0, x=x)[1], stacked, x)
            number = self.num_periods * counts[kind]
            return jax.tree.map(lambda y: jnp.zeros((number, *y.shape), y.dtype), sums)

        return {kind: make(kind) for kind in counts}

    def _run_forward(
        self, x: Array, holders: Any, values: Any, indices: Any, batch: Any, shared: Shared
    ) -> tuple[tuple[Array, dict[LayerKind, Sums]], tuple[Any, ...]]:
        stacked = holders, values, indices
        batch = batch, shared
        num_groups, num_remaining = self._groups

        def run_group(group: Array | int, state: tuple, *, size: int) -> tuple:
            x, sums, kept = state
            kept = _write(kept, device_memory.to_host(x), group)
            first = group * self.group_size
            run = lambda i, state: self._run_period(stacked, first + i, state, batch)
            return *jax.lax.fori_loop(0, size, run, (x, sums)), kept

        sums = self._make_empty_sums(stacked, x, batch)
        state = x, sums, _empty_on_host(num_groups + (num_remaining > 0), x)
        run_whole_group = functools.partial(run_group, size=self.group_size)
        state = jax.lax.fori_loop(0, num_groups, run_whole_group, state)
        if num_remaining:
            state = run_group(num_groups, state, size=num_remaining)
        x, sums, kept = state
        return (x, sums), (kept, holders, values, indices, batch)

    def _run_period(
        self,
        stacked: Any,
        period: Array | int,
        state: tuple[Array, dict[LayerKind, Sums]],
        batch: Any,
    ) -> tuple[Array, dict[LayerKind, Sums]]:
        x, sums = state
        for number, kind in enumerate(self.period):
            x, of_layer = self._apply_layer(stacked, period, number=number, x=x, batch=batch)
            write = functools.partial(_write, index=self._place(period, number))
            sums = sums | {kind: jax.tree.map(write, sums[kind], of_layer)}
        return x, sums

    def _apply_layer(
        self, stacked: Any, period: Array | int, *, number: int, x: Array, batch: Any
    ) -> tuple[Array, Sums]:
        holders, values, indices = self._read_layer(stacked, period, number)
        shards = self.merge_holders(holders, values)
        batch, shared = batch
        run = self.layers[self.period[number]]
        return run(x, (shards, indices), batch=batch, shared=shared)

    def _place(self, period: Array | int, number: int) -> Array | int:
        """Index of a layer in the arrays of its kind."""
        kind = self.period[number]
        return _index(period, self.period.count(kind), self.period[:number].count(kind))

    def _read_layer(self, stacked: Any, period: Array | int, number: int) -> Any:
        """A layer's holders, values and indices."""
        holders, values, indices = stacked
        kind = self.period[number]
        own = _read((holders[kind], values[kind]), self._place(period, number))
        return (*own, _read(indices, _index(period, len(self.period), number)))

    def _run_backward(
        self, residuals: tuple[Any, ...], dresults: tuple[Array, dict[LayerKind, Sums]]
    ) -> tuple[Any, ...]:
        kept, holders, values, indices, batch = residuals
        dx, dsums = dresults
        stacked = holders, values, indices
        num_groups, num_remaining = self._groups

        def run_group(group: Array | int, state: tuple, *, size: int) -> tuple:
            dx, gradients, dshared, waiting = state
            first = group * self.group_size
            inputs = kept, jnp.asarray(group)
            if size * len(self.period) > 1:
                if self.offloads_during_attention:
                    dx, group = jax.lax.optimization_barrier(
                        (device_memory.to_host(dx), jnp.asarray(group))
                    )
                waiting = self._compute_inputs(waiting, kept, group, stacked, batch, size=size)
                # Without the barrier, XLA makes a copy of the inputs in host memory
                dx, waiting = jax.lax.optimization_barrier((dx, waiting))
                dx = device_memory.to_device(dx)
                inputs = waiting, jnp.asarray(0)

            def pull_period(i: Array, state: tuple) -> tuple:
                dx, gradients, dshared = state
                index = size - 1 - i
                stored, offset = inputs
                for number, kind in reversed(list(enumerate(self.period))):
                    layer_inputs = self._read_layer(stacked, first + index, number)
                    place = offset + _index(index, len(self.period), number)
                    place_of_kind = self._place(first + index, number)
                    dresults = dx, _read(dsums[kind], place_of_kind)
                    dx, new, new_shared = self._differentiate_layer(
                        kind, layer_inputs, batch, dresults, (stored, place)
                    )
                    dshared = jax.tree.map(jnp.add, dshared, new_shared)
                    add = functools.partial(_add_gradient, index=place_of_kind)
                    gradients = gradients | {kind: jax.tree.map(add, gradients[kind], new)}
                return dx, gradients, dshared

            return *jax.lax.fori_loop(0, size, pull_period, (dx, gradients, dshared)), waiting

        # One array for all groups: XLA runs the last one after the loop, with an array of its own
        num_waiting = self.group_size * len(self.period)
        waiting = _empty_on_host(num_waiting, dx) if num_waiting > 1 else None
        state = dx, holders, jax.tree.map(jnp.zeros_like, batch[1]), waiting
        if num_remaining:
            state = run_group(num_groups, state, size=num_remaining)
        run_whole_group = functools.partial(run_group, size=self.group_size)
        state = jax.lax.fori_loop(
            0, num_groups, lambda i, state: run_whole_group(num_groups - 1 - i, state), state
        )
        dx, gradients, dshared, _ = state
        return dx, gradients, None, None, None, dshared

    def _compute_inputs(
        self, waiting: Array, kept: Array, group: Any, stacked: Any, batch: Any, *, size: int
    ) -> Array:
        """Inputs of a group's layers, in host memory. Args: waiting: array that they replace."""
        x = device_memory.to_device(_read(kept, group))

        def run_layer(i: Array | int, number: int, state: tuple[Array, Array]) -> Any:
            x, waiting = state
            period = group * self.group_size + i
            x, _ = self._apply_layer(stacked, period, number=number, x=x, batch=batch)
            next_place = _index(i, len(self.period), number) + 1
            return x, _write(waiting, device_memory.to_host(x), next_place)

        def run_period(i: Array, state: tuple[Array, Array]) -> Any:
            for number in range(len(self.period)):
                state = run_layer(i, number, state)
            return state

        state = x, _write(waiting, device_memory.to_host(x), 0)
        state = jax.lax.fori_loop(0, size - 1, run_period, state)
        for number in range(len(self.period) - 1):
            state = run_layer(size - 1, number, state)
        return state[1]

    def _differentiate_layer(
        self,
        kind: LayerKind,
        layer_inputs: Any,
        batch: Any,
        dresults: tuple[Array, Sums],
        waiting: tuple[Array, Array],
    ) -> tuple[Array, Any, Shared]:
        """Gradients of a layer's input, of its holders, and of what layers share.

        Args:
            batch: the batch, and the shared arrays.
            dresults: gradients of its output and of its sums.
            waiting: inputs of several layers, in host memory, and the index of this one's.
        """
        dx, dsums = dresults
        kept, index = waiting
        batch, shared = batch
        holders, values, indices = layer_inputs

        def bind(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            """Part of the layer as a function of its holders and inputs."""

            def run(holders: Any, *inputs: Any) -> Any:
                shards = self.merge_holders(holders, values[name]) if name in values else None
                return function(shards, *inputs, indices, batch)

            return run

        pre = bind(self.layers[kind].project, "pre_attention")
        mix = bind(self.layers[kind].mix, "mix")
        post = bind(self.layers[kind].finish, "post_attention")
        read_input = lambda index: device_memory.to_device(_read(kept, index))
        # Recompute what is mixed, and the result
        x = read_input(index)
        inputs, carried = pre(holders["pre_attention"], x)
        if self.offloads_during_attention:
            dx, inputs = jax.lax.optimization_barrier((device_memory.to_host(dx), inputs))
        share = functools.partial(self.layers[kind].share, dtype=x.dtype)
        (to_mix, to_finish), pull_share = jax.vjp(share, shared)
        mixed, pull_mix = jax.vjp(mix, holders.get("mix"), (*inputs, *to_mix))
        # Gradients of the part after the mixing
        if self.offloads_during_attention:
            # The input is read again once the mixing has ended
            dx, mixed, index = jax.lax.optimization_barrier((dx, mixed, index))
            dx = device_memory.to_device(dx)
            x = read_input(index)
        carried = (*carried, *to_finish)
        _, pull_post = jax.vjp(post, holders["post_attention"], x, mixed, carried)
        post_gradients, dx, dmixed, dcarried = pull_post((dx, dsums))
        num_carried = len(carried) - len(to_finish)
        # Gradients of the mixing
        if self.offloads_during_attention:
            dx, dmixed = jax.lax.optimization_barrier((device_memory.to_host(dx), dmixed))
        mix_gradients, dinputs = pull_mix(dmixed)
        (dshared,) = pull_share((dinputs[len(inputs) :], dcarried[num_carried:]))
        dinputs = dinputs[: len(inputs)]
        # Gradients of the part before it
        if self.offloads_during_attention:
            dx, dinputs, index = jax.lax.optimization_barrier((dx, dinputs, index))
            dx = device_memory.to_device(dx)
            x = read_input(index)
        _, pull_pre = jax.vjp(pre, holders["pre_attention"], x)
        pre_gradients, dx_of_mixing = pull_pre((dinputs, dcarried[:num_carried]))
        gradients = {"pre_attention": pre_gradients, "post_attention": post_gradients}
        if "mix" in holders:
            gradients["mix"] = mix_gradients
        return dx + dx_of_mixing, gradients, dshared


def _empty_on_host(count: int, x: Array) -> Array:
    """Uninitialized arrays of the shape of x, stacked, in host memory."""
    return device_memory.to_host(jax.lax.empty((count, *x.shape), x.dtype))


def _index(period: Array | int, count: int, place: int) -> Array | int:
    """Index of the layer in this place of a period, of which `count` layers are stacked."""
    return period if count == 1 else period * count + place


def _read(stacked: Any, index: Array | int) -> Any:
    """One layer's arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _write(stacked: Array, layer: Array, index: Array | int) -> Array:
    """Replaces one layer's array."""
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)


def _add_gradient(sums: Array, gradient: Array, index: Array | int) -> Array:
    """Adds one layer's gradient to the sums; replaces it in host memory, where nothing is added."""
    if not device_memory.is_on_host(sums):
        gradient = gradient + _read(sums, index)
    return _write(sums, gradient, index)
