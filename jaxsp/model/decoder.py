"""The decoder: embedding, scan over stacked layers and last norm; and its parameter table."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.attend import Attend
from jaxsp.blocks import layers, linear, registry
from jaxsp.blocks.block import LayerOutput, Mixer, RowInputs
from jaxsp.blocks.config import ATTENTION, MLP, LayerKind, ModelConfig
from jaxsp.blocks.layers import Gather, Norm, Parameter, declare_param
from jaxsp.blocks.linear import Keys, multiply
from jaxsp.core.batch import Batch
from jaxsp.delta_rule import spans
from jaxsp.model import layer_stack, tiling
from jaxsp.model.layer_stack import Layer, Shared, Sums
from jaxsp.model.remat import RematPolicy

LAYER_PREFIX = "model.layers.{layer}."
"""Beginning of the names of a layer's tensors in Hugging Face's files."""


SCORE_NAME = "score.weight"
"""Name of a reward model's head in Hugging Face's files."""


class OutsideLayers(nnx.Module):
    """All weights outside of the layers: embedding, last norm and head."""

    def __init__(self, config: ModelConfig):
        matrix = Parameter(
            shape=(config.vocab_size, config.hidden_size),
            hf_name="model.embed_tokens.weight",
            std=config.initializer_range,
        )
        self.embedding = declare_param(matrix)
        self.norm = Norm(
            config.hidden_size, hf_name="model.norm", config=config, kind=config.last_norm
        )
        head = dataclasses.replace(matrix, hf_name="lm_head.weight")
        if config.has_scores:
            head = dataclasses.replace(matrix, shape=(1, config.hidden_size), hf_name=SCORE_NAME)
        self.head = None if config.tie_embeddings else declare_param(head)
        per_layer_norm: Norm | None = None
        if config.per_layer_size:
            name = "model.per_layer_projection_norm"
            per_layer_norm = Norm(config.per_layer_size, hf_name=name, config=config)
        self.per_layer_norm = per_layer_norm


@functools.lru_cache(maxsize=16)
def _declare_layer(
    config: ModelConfig, kind: LayerKind
) -> tuple[dict[str, nnx.GraphDef], dict[str, layers.Weights]]:
    """Modules of a layer without weights, and the tables of their weights, by part of the layer."""
    mixer = registry.MIXERS[kind.mixer]
    num_layers = config.num_layers
    config = config.of_kind(kind)
    config = dataclasses.replace(config, norm_names=mixer.norm_names(config))
    modules: dict[str, nnx.Module | None] = {
        "pre_attention": mixer.declare_input(config),
        "mix": mixer.declare_weights(config),
        "post_attention": LayerOutput(config, mixer, registry.FEED_FORWARDS[kind.feed_forward]),
    }
    given = {part: module for part, module in modules.items() if module is not None}
    graphdefs = {part: nnx.graphdef(module) for part, module in given.items()}
    tables = {part: _make_table(module) for part, module in given.items()}
    if config.per_layer_size:
        # Rows and columns of tensors that have those of all layers
        P = config.per_layer_size
        tables["post_attention"]["per_layer"] = {
            "embedding": Parameter(
                shape=(config.per_layer_vocab_size, P),
                hf_name="model.embed_tokens_per_layer.weight",
                joined_layers=("columns", num_layers),
                is_lookup=True,
                std=config.initializer_range,
            ),
            "projection": Parameter(
                shape=(P, config.hidden_size),
                hf_name="model.per_layer_model_projection.weight",
                joined_layers=("rows", num_layers),
                std=config.initializer_range,
            ),
        }
    return graphdefs, tables


@functools.lru_cache(maxsize=4)
def param_table(config: ModelConfig) -> layers.Weights:
    """The parameter table: a nested dict like that of the weights, with a `Parameter` per leaf.

    Example: {"embedding": ..., "head": ..., "norm": {"weight": ...},
        "layers": {"pre_attention": {"q": {"weight": ...}, ...}, "post_attention": ...}}. If there
        are layers of several kinds, "layers" has such a table for each, by the kind's name.
    """
    tables = {}
    for kind in config.kinds:
        numbers = tuple(number for number, layer in enumerate(config.layers) if layer.kind == kind)

        def stack(param: Parameter, numbers: tuple[int, ...] = numbers) -> Parameter:
            hf_name = param.hf_name
            if param.joined_layers is None:
                hf_name = LAYER_PREFIX + hf_name
            return dataclasses.replace(param, hf_name=hf_name, layers=numbers)

        tables[kind] = jax.tree.map(stack, _declare_layer(config, kind)[1])
    of_layers: Any = {kind.name: table for kind, table in tables.items()}
    if len(tables) == 1:
        (of_layers,) = tables.values()
    return _make_table(OutsideLayers(config)) | {"layers": of_layers}


def plain_table(config: ModelConfig) -> layers.Weights:
    """The parameter table of the model without adapters."""
    return param_table(dataclasses.replace(config, lora=None))


def split_kinds(config: ModelConfig, tree: Any) -> dict[LayerKind, Any]:
    """Weights of each kind of layers, from those of all layers in the structure of the table."""
    if len(config.kinds) == 1:
        return {config.kinds[0]: tree}
    return {kind: tree[kind.name] for kind in config.kinds}


def _make_table(module: nnx.Module) -> layers.Weights:
    state = nnx.split(module)[1]
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    params = jax.tree.map(lambda leaf: leaf.param, state, is_leaf=is_variable)
    return nnx.to_pure_dict(params)


def describe_layers(config: ModelConfig, *, tokens_per_device: int | None) -> str:
    """Describes the blocks of the layers; empty if all have attention and an MLP.

    Args: tokens_per_device: those of a microbatch; None if no weights are gathered in the compute
        dtype, on one device and with quantized weights.
    """
    counts = Counter(layer.kind._replace(sizes=None) for layer in config.layers)
    if set(counts) == {LayerKind(ATTENTION, MLP)}:
        return ""
    parts = []
    for kind, count in counts.items():
        mixer = registry.MIXERS[kind.mixer].description
        feed_forward = registry.FEED_FORWARDS[kind.feed_forward].describe(config, tokens_per_device)
        parts.append(f"{count} with {mixer} and {feed_forward}")
    return ", ".join(parts)


def lm_head(weights: layers.Weights) -> Any:
    """Leaf that maps hidden states to logits: the embedding's if the two are tied."""
    return weights["head"] if "head" in weights else weights["embedding"]


def transform_logits(config: ModelConfig, logits: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Logits from products of hidden states and head: the model's factor and soft limit, which
    scores of a reward model do not have."""
    if config.has_scores:
        return logits
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
) -> tuple[Float[Array, "B l D"], Sums]:
    """Input of the head, this device's tokens after the last norm; and sums of the layers.

    Args:
        shards: this device's shards of the weights, in the structure of `param_table`. Whole
            weights exist for one layer at a time.
        batch: this device's shard of a microbatch.
        policy: activations that are saved for the backward pass.
        tile_tokens: tokens that go through the parts of a layer before and after attention at a
            time.
        token_keys: random keys for dropout; None: no dropout.
    Returns: hidden states, and the statistics of layers that have some, summed over this device's
        tokens of each row, [layers, B, ...].
    """
    x_BlD = compute_first_input(shards, batch.tokens_BL, config=config, gather=gather, dtype=dtype)
    x_BlD, sums = run_layers(
        shards,
        x_BlD,
        batch,
        config=config,
        attend=attend,
        gather=gather,
        policy=policy,
        tile_tokens=tile_tokens,
        token_keys=token_keys,
    )
    return apply_last_norm(shards, x_BlD, config=config, gather=gather), sums


def run_layers(
    shards: layers.Weights,
    x_BlD: Float[Array, "B l D"],
    batch: Batch,
    *,
    config: ModelConfig,
    attend: Attend,
    gather: Gather,
    policy: RematPolicy,
    tile_tokens: int,
    token_keys: Keys | None,
) -> tuple[Float[Array, "B l D"], Sums]:
    """Output of the last layer, and sums of the layers. Args: see `hidden_states`."""
    of_kinds = make_layers(config, attend, gather, tile_tokens)
    tables = make_segment_tables(of_kinds, batch)
    return layer_stack.run_layers(
        of_kinds,
        x_BlD,
        split_kinds(config, shards["layers"]),
        find_layer_indices(config, attend, has_dropout=token_keys is not None),
        LayerArrays(batch, tables, token_keys, _find_tokens(config, attend, batch)),
        segments=config.segments,
        policy=policy,
        gather=gather,
        shared=make_shared(shards, x_BlD, config=config, gather=gather),
    )


def compute_first_input(
    shards: layers.Weights,
    tokens_Bl: Int32[Array, "B l"],
    *,
    config: ModelConfig,
    gather: Gather,
    dtype: jnp.dtype,
) -> Float[Array, "B l D"]:
    """Input of the first layer: the embeddings of tokens."""
    x_BlD = embed_tokens(
        gather,
        param_table(config)["embedding"],
        shards["embedding"],
        tokens_Bl,
        dtype=dtype,
        padding_id=config.padding_id,
    )
    if config.has_embedding_norm:
        # Recomputed: its backward pass would keep the embeddings in float32 for the whole step
        x_BlD = jax.checkpoint(layers.NormWithoutWeight(config))(x_BlD)
    return layers.scale(x_BlD, config.embedding_scale)


def apply_last_norm(
    shards: layers.Weights, x_BlD: Float[Array, "B l D"], *, config: ModelConfig, gather: Gather
) -> Float[Array, "B l D"]:
    """Input of the head, from the output of the last layer."""
    norm = gather(param_table(config)["norm"], shards["norm"])
    return nnx.merge(nnx.graphdef(OutsideLayers(config).norm), norm)(x_BlD)


class LayerArrays(NamedTuple):
    """Arrays without gradients that all layers use."""

    batch: Batch
    tables: tuple[Any, ...]
    """Result of `make_segment_tables`."""
    token_keys: Keys | None
    is_token_Bl: Bool[Array, "B l"] | None
    """False at padding; None for models without statistics."""


class LayerIndices(NamedTuple):
    """Indices of what differs between layers, one per layer; None if the layers are alike."""

    rope: Int32[Array, "N"] | None
    """Index into `ModelConfig.ropes` of its kind; 0 for a layer without."""
    attention: Int32[Array, "N"] | None
    """Index into `Attend.kinds` of its kind; 0 for a layer without attention."""
    layer: Int32[Array, "N"] | None
    """Number of the layer, for dropout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderLayer(Layer):
    """The layers of a kind, on a mesh."""

    config: ModelConfig
    """The model as its layers of this kind see it."""
    kind: LayerKind
    params: layers.Weights
    """Parameter table of the layers."""
    attend: Attend
    """Attention of these layers."""
    gather: Gather
    tile_tokens: int
    table_index: int
    """Index of the segment tables of their attention."""

    @property
    def mixer(self) -> Mixer:
        return registry.MIXERS[self.kind.mixer]

    def project(
        self, shards: layers.Weights, x_BlD: Array, indices: LayerIndices, arrays: LayerArrays
    ) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        keys = linear.fold_layer(arrays.token_keys, indices.layer)
        inputs, carried = tiling.apply_in_tiles(
            self._bind("pre_attention"),
            self.params["pre_attention"],
            shards,
            (x_BlD, arrays.batch.positions_BL, keys),
            gather=self.gather,
            tile_tokens=self.tile_tokens,
            shared=() if indices.rope is None else (indices.rope,),
        )
        if self.config.stored_keys is not None:
            # In float32, so that gradients of all layers that share them are summed in float32
            carried = (*carried, *(x.astype(jnp.float32) for x in inputs[1:]))
        return inputs, carried

    def share(self, shared: Shared, dtype: jnp.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        to_mix: tuple[Array, ...] = ()
        if (name := self.config.shared_keys) is not None:
            to_mix = tuple(x.astype(dtype) for x in shared[name])
        to_finish: tuple[Array, ...] = ()
        if PER_LAYER in shared:
            embeddings_BlD, norm_P = shared[PER_LAYER]
            to_finish = (embeddings_BlD.astype(dtype), norm_P)
        return to_mix, to_finish

    def _bind(self, part: str) -> Callable[[layers.Weights], Callable[..., Any]]:
        """Function that makes the module of a part, given its weights."""
        return functools.partial(nnx.merge, _declare_layer(self.config, self.kind)[0][part])

    def mix(
        self,
        shards: layers.Weights | None,
        inputs: Sequence[Array],
        indices: LayerIndices,
        arrays: LayerArrays,
    ) -> Array:
        rows = self.make_row_inputs(indices, arrays)
        return self.mixer.mix(self.config, self.gather_mixer_weights(shards), inputs, rows)

    def gather_mixer_weights(self, shards: layers.Weights | None) -> layers.Weights:
        """Whole weights of `Mixer.mix` in a layer."""
        return self.gather(self.params["mix"], shards) if "mix" in self.params else {}

    def make_row_inputs(self, indices: LayerIndices, arrays: LayerArrays) -> RowInputs:
        """Inputs of `Mixer.mix` in a layer."""
        kind = 0 if indices.attention is None else indices.attention
        return RowInputs(arrays.batch, self.attend, arrays.tables[self.table_index], kind)

    def finish(
        self,
        shards: layers.Weights,
        x_BlD: Array,
        mixed: Array,
        carried: Sequence[Array | None],
        indices: LayerIndices,
        arrays: LayerArrays,
    ) -> tuple[Array, Sums]:
        others: list[Any]
        mlp_input_BlD, *others = carried
        shards = dict(shards)
        of_layer: list[Array] = []
        if (per_layer := shards.pop("per_layer", None)) is not None:
            *others, embeddings_BlD, norm_P = others
            input_BlP = self._compute_per_layer_input(
                per_layer, embeddings_BlD, norm_P, arrays.batch
            )
            of_layer = [input_BlP]
        stored: dict[str, Any] = {}
        if (name := self.config.stored_keys) is not None:
            *others, k_BlGK, v_BlGK = others
            stored = {layer_stack.STORED: {name: (k_BlGK, v_BlGK)}}
        keys = linear.fold_layer(arrays.token_keys, indices.layer)
        params = {x: self.params["post_attention"][x] for x in shards}
        x_BlD, statistics = tiling.apply_in_tiles(
            self._bind("post_attention"),
            params,
            shards,
            (x_BlD, mixed, mlp_input_BlD, keys, *others, *of_layer),
            gather=self.gather,
            tile_tokens=self.tile_tokens,
        )

        def sum_rows(statistic: Float32[Array, "B l ..."]) -> Float32[Array, "B ..."]:
            """Sum over this device's tokens of each row."""
            assert arrays.is_token_Bl is not None, "the block has no statistics"
            is_token = jnp.expand_dims(arrays.is_token_Bl, range(2, statistic.ndim))
            return jnp.sum(jnp.where(is_token, statistic, 0), axis=1)

        return x_BlD, jax.tree.map(sum_rows, statistics) | stored

    def _compute_per_layer_input(
        self, shards: layers.Weights, embeddings_BlD: Any, norm_P: Any, batch: Batch
    ) -> Float[Array, "B l P"]:
        """See `ModelConfig.per_layer_size`."""
        params = self.params["post_attention"]["per_layer"]
        config = self.config
        rows_BlP = embed_tokens(
            self.gather,
            params["embedding"],
            shards["embedding"],
            batch.tokens_BL,
            dtype=embeddings_BlD.dtype,
            padding_id=config.padding_id,
        )
        weight_PD = self.gather(params["projection"], shards["projection"])
        projected = layers.scale(multiply(embeddings_BlD, weight_PD), config.hidden_size**-0.5)
        normalized = layers.divide_by_rms(projected.astype(jnp.float32), config.norm_eps)
        normalized *= jnp.broadcast_to(norm_P, normalized.shape)
        rows_BlP = layers.scale(rows_BlP, config.per_layer_size**0.5)
        return layers.scale(normalized.astype(rows_BlP.dtype) + rows_BlP, 2**-0.5)


PER_LAYER = "per_layer"
"""Name of the input of the first layer, and the norm of its projections, which all layers share."""


def make_shared(
    shards: layers.Weights, x_BlD: Float[Array, "B l D"], *, config: ModelConfig, gather: Gather
) -> Shared:
    """Arrays that all layers share. Args: x_BlD: input of the first layer."""
    if not config.per_layer_size:
        return {}
    norm = gather(param_table(config)["per_layer_norm"], shards["per_layer_norm"])
    # In float32, so that gradients are summed over layers in float32
    return {PER_LAYER: (x_BlD.astype(jnp.float32), norm["weight"].astype(jnp.float32))}


def make_layers(
    config: ModelConfig, attend: Attend, gather: Gather, tile_tokens: int
) -> dict[LayerKind, DecoderLayer]:
    """The kinds of layers. Args: see `hidden_states`."""
    attends = _select_attends(config, attend)
    distinct = list(dict.fromkeys(attends.values()))
    return {
        kind: DecoderLayer(
            config=config.of_kind(kind),
            kind=kind,
            params=params,
            attend=attends[kind],
            gather=gather,
            tile_tokens=tile_tokens,
            table_index=distinct.index(attends[kind]),
        )
        for kind, params in split_kinds(config, param_table(config)["layers"]).items()
    }


def _select_attends(config: ModelConfig, attend: Attend) -> dict[LayerKind, Attend]:
    """Attention of each kind of layers."""
    if len(attend.kinds) == 1:
        return dict.fromkeys(config.kinds, attend)
    assert len(attend.layer_kinds) == len(config.attention_layers), "made for another model"
    numbers: dict[LayerKind, list[int]] = {kind: [] for kind in config.kinds}
    for layer, number in zip(config.attention_layers, attend.layer_kinds, strict=True):
        numbers[layer.kind].append(number)
    return {kind: attend.select(of_kind) for kind, of_kind in numbers.items()}


def make_segment_tables(of_kinds: dict[LayerKind, DecoderLayer], batch: Batch) -> tuple[Any, ...]:
    """Results of `Attend.make_segment_tables` by `DecoderLayer.table_index`."""
    return tuple(
        attend.make_segment_tables(
            batch.starts_BM, batch.lengths_BM, tokens_per_device=batch.tokens_BL.shape[1]
        )
        for attend in dict.fromkeys(layer.attend for layer in of_kinds.values())
    )


def _find_tokens(config: ModelConfig, attend: Attend, batch: Batch) -> Bool[Array, "B l"] | None:
    """False at padding; None if no layer has statistics."""
    blocks = [registry.FEED_FORWARDS[kind.feed_forward] for kind in config.kinds]
    if not any(block.has_statistics for block in blocks):
        return None
    row_spans = spans.RowSpans(
        seq=attend.strategy.seq,
        layout=attend.layout,
        tokens_per_device=batch.tokens_BL.shape[1],
    )
    return spans.find_segments(batch.starts_BM, batch.lengths_BM, row_spans.own_tokens()).inside_Bl


def find_layer_indices(config: ModelConfig, attend: Attend, *, has_dropout: bool) -> LayerIndices:
    """Indices of the layers of a model."""
    kinds = config.kinds
    ropes = {kind: config.of_kind(kind).ropes for kind in kinds}
    attends = _select_attends(config, attend)
    scores = {kind: iter(attends[kind].layer_kinds) for kind in kinds}
    of_ropes = [
        0 if layer.rope is None else ropes[layer.kind].index(layer.rope) for layer in config.layers
    ]
    has_scores = any(len(each.kinds) > 1 for each in attends.values())
    of_scores = [
        next(scores[layer.kind]) if has_scores and layer.mixer == ATTENTION else 0
        for layer in config.layers
    ]
    return LayerIndices(
        rope=jnp.asarray(of_ropes, jnp.int32) if max(map(len, ropes.values())) > 1 else None,
        attention=jnp.asarray(of_scores, jnp.int32) if has_scores else None,
        layer=jnp.arange(config.num_layers, dtype=jnp.int32) if has_dropout else None,
    )


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
    def embed(shard: Any, tokens_Bl: Array) -> Array:
        return gather.all_gather(param, shard)[tokens_Bl].astype(dtype)

    def backward(tokens_Bl: Array, dx_BlD: Array) -> tuple[Any, None]:
        # The zeros must wait for dx. Otherwise XLA fills them before the layers' backward pass,
        # when memory is fullest (2 GiB for a vocabulary of 128,256).
        zero, dx_BlD = jax.lax.optimization_barrier((jnp.float32(0), dx_BlD))
        zeros_VD = jnp.broadcast_to(zero, param.shape)
        gradient_VD = zeros_VD.at[tokens_Bl].add(dx_BlD.astype(jnp.float32))
        if padding_id is not None:
            gradient_VD = gradient_VD.at[padding_id].set(0)
        return gather.reduce_scatter(param, gradient_VD), None

    embed.defvjp(lambda shard, tokens_Bl: (embed(shard, tokens_Bl), tokens_Bl), backward)
    return embed(shard, tokens_Bl)
