"""The decoder: embedding, scan over stacked layers and last norm; and its parameter table."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention import Attend
from jaxsp.core.batch import Batch
from jaxsp.model import dropout, layer_stack, layers, tiling
from jaxsp.model.config import ModelConfig
from jaxsp.model.dropout import Keys
from jaxsp.model.layer_stack import LayerParts
from jaxsp.model.layers import Decoder, Gather, Parameter
from jaxsp.model.remat import RematPolicy

LAYER_PREFIX = "model.layers.{layer}."
"""Beginning of the names of a layer's tensors in Hugging Face's files."""


@functools.lru_cache(maxsize=4)
def param_table(config: ModelConfig) -> layers.Weights:
    """The parameter table: a nested dict like that of the weights, with a `Parameter` per leaf.

    Example: {"embedding": ..., "head": ..., "norm": {"weight": ...},
        "layers": {"pre_attention": {"q": {"weight": ...}, ...}, "post_attention": ...}}.
    """

    def stack(param: Parameter) -> Parameter:
        hf_name = LAYER_PREFIX + param.hf_name
        return dataclasses.replace(param, hf_name=hf_name, num_layers=config.num_layers)

    state = nnx.split(Decoder(config))[1]
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    params = jax.tree.map(lambda leaf: leaf.param, state, is_leaf=is_variable)
    table = nnx.to_pure_dict(params)
    return table | {"layers": jax.tree.map(stack, table["layers"])}


def lm_head(weights: layers.Weights) -> Any:
    """Leaf that maps hidden states to logits: the embedding's if the two are tied."""
    return weights["head"] if "head" in weights else weights["embedding"]


def transform_logits(config: ModelConfig, logits: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Logits from products of hidden states and head: the model's factor and soft limit."""
    logits = layers.scale(logits, config.logit_scale)
    if config.logit_softcap is None:
        return logits
    return config.logit_softcap * jnp.tanh(logits / config.logit_softcap)


def hidden_states(
    shards: layers.Weights,
    batch: Batch,
    *,
    config: ModelConfig,
    attend: Attend,
    gather: Gather,
    dtype: jnp.dtype,
    policy: RematPolicy,
    tile_tokens: int,
    token_keys: Keys | None = None,
) -> Float[Array, "B l D"]:
    """Input of the head: this device's tokens after the last norm.

    Args:
        shards: this device's shards of the weights, in the structure of `param_table`. Whole
            weights exist for one layer at a time.
        batch: this device's shard of a microbatch.
        policy: activations that are saved for the backward pass.
        tile_tokens: tokens that go through the parts of a layer before and after attention at a
            time.
        token_keys: random keys for dropout; None: no dropout.
    """
    params = param_table(config)
    x_BlD = embed_tokens(
        gather,
        params["embedding"],
        shards["embedding"],
        batch.tokens_BL,
        dtype=dtype,
        padding_id=config.padding_id,
    )
    x_BlD = layers.scale(x_BlD, config.embedding_scale)
    parts = _layer_parts(config, attend=attend, gather=gather, tile_tokens=tile_tokens)
    tables = attend.make_segment_tables(
        batch.starts_BM, batch.lengths_BM, tokens_per_device=batch.tokens_BL.shape[1]
    )
    arrays = LayerArrays(batch, tables, token_keys)
    indices = _layer_indices(config, attend, has_dropout=token_keys is not None)
    x_BlD = layer_stack.run_layers(
        parts,
        x_BlD,
        shards["layers"],
        indices,
        arrays,
        num_layers=config.num_layers,
        policy=policy,
        gather=gather,
    )
    last_norm = _graphdefs(config)[2]
    return nnx.merge(last_norm, gather(params["norm"], shards["norm"]))(x_BlD)


class LayerArrays(NamedTuple):
    """Arrays without gradients that all layers use."""

    batch: Batch
    tables: Any
    """Result of `Attend.make_segment_tables`."""
    token_keys: Keys | None


def _layer_parts(
    config: ModelConfig, *, attend: Attend, gather: Gather, tile_tokens: int
) -> LayerParts:
    """Functions of a layer's parts."""
    params = param_table(config)["layers"]
    apply = functools.partial(tiling.apply_in_tiles, gather=gather, tile_tokens=tile_tokens)
    pre_attention, post_attention, _ = _graphdefs(config)

    def run_pre_attention(
        shards: layers.Weights, x_BlD: Array, indices: LayerIndices, arrays: LayerArrays
    ) -> tuple[Array | None, ...]:
        keys = dropout.fold_layer(arrays.token_keys, indices.layer)
        results = apply(
            lambda weights, *inputs: nnx.merge(pre_attention, weights)(*inputs),
            params["pre_attention"],
            shards,
            (x_BlD, arrays.batch.positions_BL, keys),
            shared=() if indices.rope is None else (indices.rope,),
        )
        return tuple(results)

    def run_attention(
        sinks: Any,
        q_BlHK: Array,
        k_BlGK: Array,
        v_BlGK: Array,
        indices: LayerIndices,
        arrays: LayerArrays,
    ) -> Array:
        sinks_H = None
        if config.has_sinks:
            sinks_H = gather(params["sinks"], sinks)
        segments = (arrays.batch.starts_BM, arrays.batch.lengths_BM, arrays.tables)
        kind = 0 if indices.attention is None else indices.attention
        return attend(q_BlHK, k_BlGK, v_BlGK, *segments, kind=kind, sinks_H=sinks_H)

    def run_post_attention(
        shards: layers.Weights,
        x_BlD: Array,
        out_BlHK: Array,
        mlp_input_BlD: Array | None,
        indices: LayerIndices,
        arrays: LayerArrays,
    ) -> Array:
        keys = dropout.fold_layer(arrays.token_keys, indices.layer)
        return apply(
            lambda weights, *inputs: nnx.merge(post_attention, weights)(*inputs),
            params["post_attention"],
            shards,
            (x_BlD, out_BlHK, mlp_input_BlD, keys),
        )

    return LayerParts(
        pre_attention=run_pre_attention, attend=run_attention, post_attention=run_post_attention
    )


class LayerIndices(NamedTuple):
    """Indices of what differs between layers, one per layer; None if the layers are alike."""

    rope: Int32[Array, "N"] | None
    """Index into `ModelConfig.ropes`."""
    attention: Int32[Array, "N"] | None
    """Index into `Attend.kinds`."""
    layer: Int32[Array, "N"] | None
    """Number of the layer, for dropout."""


def _layer_indices(config: ModelConfig, attend: Attend, *, has_dropout: bool) -> LayerIndices:
    ropes = [config.ropes.index(layer.rope) for layer in config.layers]
    indices = LayerIndices(
        rope=jnp.asarray(ropes, jnp.int32) if len(config.ropes) > 1 else None,
        attention=None,
        layer=jnp.arange(config.num_layers, dtype=jnp.int32) if has_dropout else None,
    )
    if len(attend.kinds) == 1:
        return indices
    assert len(attend.layer_kinds) == config.num_layers, "attention was made for another model"
    return indices._replace(attention=jnp.asarray(attend.layer_kinds, jnp.int32))


def embed_tokens(
    gather: Gather,
    param: Parameter,
    shard: Any,
    tokens_Bl: Int32[Array, "B l"],
    *,
    dtype: jnp.dtype,
    padding_id: int | None,
) -> Float[Array, "B l D"]:
    """Embeddings of tokens; the gradient of the table is summed over tokens in float32.

    In bfloat16, 256 + 1 is 256: a token that occurs 39,643 times would get gradient 256.

    Args: padding_id: see `ModelConfig.padding_id`.
    """

    @jax.custom_vjp
    def embed(shard: Any) -> Array:
        return gather.all_gather(param, shard)[tokens_Bl].astype(dtype)

    def backward(_: None, dx_BlD: Array) -> tuple[Any]:
        # The zeros must wait for dx. Otherwise XLA fills them before the layers' backward pass,
        # when memory is fullest (2 GiB for a vocabulary of 128,256).
        zero, dx_BlD = jax.lax.optimization_barrier((jnp.float32(0), dx_BlD))
        zeros_VD = jnp.broadcast_to(zero, param.shape)
        gradient_VD = zeros_VD.at[tokens_Bl].add(dx_BlD.astype(jnp.float32))
        if padding_id is not None:
            gradient_VD = gradient_VD.at[padding_id].set(0)
        return (gather.reduce_scatter(param, gradient_VD),)

    embed.defvjp(lambda shard: (embed(shard), None), backward)
    return embed(shard)


@functools.lru_cache(maxsize=4)
def _graphdefs(config: ModelConfig) -> list[nnx.GraphDef]:
    """Modules without weights: the parts of a layer before and after attention, the last norm."""
    decoder = Decoder(config)
    modules = (decoder.layers.pre_attention, decoder.layers.post_attention, decoder.norm)
    return [nnx.graphdef(module) for module in modules]
