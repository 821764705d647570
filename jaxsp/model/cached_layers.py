"""Layers for generation: prefill of prompts, and decoding of one token of each row.

A row is one document, whose prompt starts at the row's first token. The devices of a group keep
what later tokens need of the prompt's tokens where they are, and deal out the new tokens: token
number t of an answer is in slot t // seq of device t % seq.
"""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxsp.attention.attend import Attend
from jaxsp.blocks.block import LayerCache, NextToken
from jaxsp.blocks.config import LayerKind, LayerSegment, ModelConfig
from jaxsp.blocks.layers import Gather, Weights
from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.delta_rule.spans import RowSpans
from jaxsp.model import decoder, layer_stack
from jaxsp.model.decoder import LayerArrays
from jaxsp.model.layer_stack import Shared

Arrays = dict[LayerKind, dict[str, Array]]
"""Arrays of a mixer by the kind of its layers, which are stacked: [N, B, ...]."""

_ALL_TOKENS = np.iinfo(np.int32).max


class Prompts(NamedTuple):
    """Cache of prompts, which new tokens leave as it is."""

    tokens: Arrays
    """[N, B, l, ...]"""
    lengths_B: Int32[Array, "B"]


class Answers(NamedTuple):
    """Cache that each new token changes."""

    tokens: Arrays
    """[N, B, n, ...], n slots on each device."""
    states: Arrays


def prefill(
    shards: Weights,
    batch: Batch,
    *,
    config: ModelConfig,
    attend: Attend,
    gather: Gather,
    dtype: jnp.dtype,
    tile_tokens: int,
) -> tuple[Float[Array, "B D"], Prompts, Arrays]:
    """Input of the head for the last token of each prompt, the cache, and the states after it;
    inside shard_map.

    Args: see `decoder.hidden_states`. Each row of the batch is one segment, a prompt.
    """
    x_BlD = decoder.compute_first_input(
        shards, batch.tokens_BL, config=config, gather=gather, dtype=dtype
    )
    layers = decoder.make_layers(config, attend, gather, tile_tokens)
    tables = decoder.make_segment_tables(layers, batch)
    arrays = LayerArrays(batch, tables, None, jnp.ones(batch.tokens_BL.shape, bool))

    def run(kind: LayerKind, x: Array, shards: Weights, _: Any, indices: Any, shared: Any) -> Any:
        layer = layers[kind]
        inputs, carried = layer.project(shards["pre_attention"], x, indices, arrays)
        to_mix, to_finish = layer.share(shared, x.dtype)
        mixed, cache = layer.mixer.prefill(
            layer.config,
            layer.gather_mixer_weights(shards.get("mix")),
            (*inputs, *to_mix),
            layer.make_row_inputs(indices, arrays),
        )
        carried = (*carried, *to_finish)
        x, sums = layer.finish(shards["post_attention"], x, mixed, carried, indices, arrays)
        return x, cache, sums.get(layer_stack.STORED, {})

    indices = decoder.find_layer_indices(config, attend, has_dropout=False)
    shared = decoder.make_shared(shards, x_BlD, config=config, gather=gather)
    x_BlD, caches = _run_layers(run, config, x_BlD, shards, indices, shared)
    x_BlD = decoder.apply_last_norm(shards, x_BlD, config=config, gather=gather)
    lengths_B = batch.lengths_BM[:, 0]
    spans = _find_spans(attend, x_BlD.shape[1])
    x_BD = spans.take_tokens(x_BlD, lengths_B[:, None] - 1)[:, 0]
    tokens = {kind: cache.tokens for kind, cache in caches.items()}
    states = {kind: cache.states for kind, cache in caches.items()}
    return x_BD, Prompts(tokens, lengths_B), states


def decode(
    shards: Weights,
    tokens_B: Int32[Array, "B"],
    prompts: Prompts,
    answers: Answers,
    number: Int32[Array, ""],
    *,
    config: ModelConfig,
    attend: Attend,
    gather: Gather,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "B D"], Answers]:
    """Input of the head for one more token of each row, and the cache with it; inside shard_map.

    Args:
        tokens_B: the tokens, the same on all devices of a group.
        number: number of tokens of the answers before.
    """
    place = _find_place(prompts, answers, number, attend)
    positions_B1 = place.positions_B[:, None]
    batch = Batch(
        tokens_BL=tokens_B[:, None],
        labels_BL=positions_B1,
        positions_BL=positions_B1,
        starts_BM=positions_B1,
        lengths_BM=positions_B1,
    )
    arrays = LayerArrays(batch, (), None, jnp.ones(positions_B1.shape, bool))
    layers = decoder.make_layers(config, attend, gather, len(tokens_B))

    def run(
        kind: LayerKind, x: Array, shards: Weights, cache: Any, of_layer: Any, shared: Any
    ) -> Any:
        indices, window = of_layer
        layer = layers[kind]
        inputs, carried = layer.project(shards["pre_attention"], x, indices, arrays)
        to_mix, to_finish = layer.share(shared, x.dtype)
        if layer.config.shared_keys in sources:
            source = sources[layer.config.shared_keys]
            cache = jax.tree.map(lambda x: x[0], caches[source])
        prompt, answer, states = cache
        token = place._replace(prompts=prompt, answers=answer, states=states, window=window)
        weights = layer.gather_mixer_weights(shards.get("mix"))
        inputs = (*inputs, *to_mix)
        mixed, cache = layer.mixer.decode(layer.config, weights, inputs, token)
        carried = (*carried, *to_finish)
        x, sums = layer.finish(shards["post_attention"], x, mixed, carried, indices, arrays)
        return x, cache, sums.get(layer_stack.STORED, {})

    x_B1D = decoder.compute_first_input(
        shards, batch.tokens_BL, config=config, gather=gather, dtype=dtype
    )
    caches = {
        kind: (prompts.tokens[kind], answers.tokens[kind], answers.states[kind])
        for kind in config.kinds
    }
    # The only layer of a kind has the keys that others share, by their name
    sources = {layers[kind].config.stored_keys: kind for kind in config.kinds}
    sources.pop(None, None)
    windows = [_ALL_TOKENS if layer.window is None else layer.window for layer in config.layers]
    indices = decoder.find_layer_indices(config, attend, has_dropout=False)
    of_layers = indices, jnp.asarray(windows, jnp.int32)
    shared = decoder.make_shared(shards, x_B1D, config=config, gather=gather)
    x_B1D, new = _run_layers(run, config, x_B1D, shards, of_layers, shared, caches)
    write = functools.partial(_write_token, slot=number // attend.strategy.seq, place=place)
    answers = Answers(
        tokens={kind: jax.tree.map(write, answers.tokens[kind], new[kind].tokens) for kind in new},
        states={kind: new[kind].states for kind in new},
    )
    x_B1D = decoder.apply_last_norm(shards, x_B1D, config=config, gather=gather)
    return x_B1D[:, 0], answers


def make_slots(prompts: Prompts, num_slots: int) -> Arrays:
    """Empty slots for new tokens on each device: `Answers.tokens`."""
    empty = lambda x: jnp.zeros((*x.shape[:2], num_slots, *x.shape[3:]), x.dtype)
    return jax.tree.map(empty, prompts.tokens)


def _find_spans(attend: Attend, tokens_per_device: int) -> RowSpans:
    return RowSpans(
        seq=attend.strategy.seq, layout=attend.layout, tokens_per_device=tokens_per_device
    )


def _find_place(
    prompts: Prompts, answers: Answers, number: Int32[Array, ""], attend: Attend
) -> NextToken:
    """Place of the next token among the cached ones, without the cache of a layer."""
    seq = attend.strategy.seq
    device = jax.lax.axis_index(axes.SEQ)
    lengths_B1 = prompts.lengths_B[:, None]
    tokens_1l = _find_spans(attend, _count_tokens(prompts.tokens)).own_tokens()[None]
    slots_1n = jnp.arange(_count_tokens(answers.tokens), dtype=jnp.int32)[None]
    numbers_1n = slots_1n * seq + device
    return NextToken(
        prompts={},
        answers={},
        states={},
        prompt_positions_Bl=jnp.where(tokens_1l < lengths_B1, tokens_1l, -1),
        answer_positions_Bn=jnp.where(numbers_1n < number, lengths_B1 + numbers_1n, -1),
        positions_B=prompts.lengths_B + number,
        is_own=number % seq == device,
        window=jnp.int32(_ALL_TOKENS),
    )


def _count_tokens(tokens: Arrays) -> int:
    """Number of tokens of a row on this device; 0 if no mixer keeps any."""
    return next((x.shape[2] for x in jax.tree.leaves(tokens)), 0)


def _write_token(
    tokens: Float[Array, "N B n ..."],
    new: Float[Array, "N B 1 ..."],
    *,
    slot: Int32[Array, ""],
    place: NextToken,
) -> Array:
    """Writes the next token into a slot of the device that holds it."""
    old = jax.lax.dynamic_slice_in_dim(tokens, slot, 1, axis=2)
    new = jnp.where(place.is_own, new.astype(old.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(tokens, new, slot, axis=2)


def _run_layers(
    run: Callable[..., tuple[Array, LayerCache, Shared]],
    config: ModelConfig,
    x: Array,
    shards: Weights,
    indices: Any,
    shared: Shared,
    caches: dict[LayerKind, Any] | None = None,
) -> tuple[Array, dict[LayerKind, LayerCache]]:
    """Output of the last layer, and the stacked results of the layers of each kind.

    Args:
        run: (kind, x, shards, cache, indices, shared) -> (x, result, stored) of one layer.
        indices: of all layers, stacked.
        shared: arrays that layers share.
        caches: what a layer gets of the cache, stacked; None: nothing.
    """
    stacks = decoder.split_kinds(config, shards["layers"])
    done: collections.Counter[LayerKind] = collections.Counter()
    results: dict[LayerKind, list[LayerCache]] = {kind: [] for kind in config.kinds}
    stack: Callable[..., Array] = lambda *parts: jnp.stack(parts)
    concatenate: Callable[..., Array] = lambda *parts: jnp.concatenate(parts)
    for segment in config.segments:

        def run_period(
            x: Array,
            period: Int32[Array, ""],
            segment: LayerSegment = segment,
            before: Mapping[LayerKind, int] = done.copy(),
            shared: Shared = shared,
        ) -> tuple[Array, tuple[dict[LayerKind, LayerCache], Shared]]:
            """Runs the layers of a period one after another."""
            of_kinds: dict[LayerKind, list[LayerCache]] = {kind: [] for kind in segment.period}
            stored: Shared = {}
            for number, kind in enumerate(segment.period):
                first = before[kind] + period * segment.period.count(kind)
                layer = segment.first + period * len(segment.period) + number
                own = _read((stacks[kind], (caches or {}).get(kind)), first + len(of_kinds[kind]))
                x, result, of_layer = run(kind, x, *own, _read(indices, layer), shared)
                of_kinds[kind].append(result)
                stored |= of_layer
            stacked = {kind: jax.tree.map(stack, *parts) for kind, parts in of_kinds.items()}
            return x, (stacked, stored)

        numbers = jnp.arange(segment.repeats, dtype=jnp.int32)
        x, (of_kinds, stored) = jax.lax.scan(run_period, x, numbers)
        shared = shared | jax.tree.map(lambda y: y[0], stored)
        for kind, of_kind in of_kinds.items():
            join = lambda y: y.reshape(-1, *y.shape[2:])
            results[kind].append(jax.tree.map(join, of_kind))
            done[kind] += segment.repeats * segment.period.count(kind)
    return x, {kind: jax.tree.map(concatenate, *parts) for kind, parts in results.items()}


def _read(stacked: Any, index: Int32[Array, ""]) -> Any:
    """One layer's arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
