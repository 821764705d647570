"""Gated delta net as the mixer of a layer (Qwen3.5, OLMo Hybrid).

Each head has a state that decays, and in which a token replaces what its key finds:
`delta_rule.chunk`. The tokens of a row stay where they are; devices exchange states.

Source: Yang et al. 2024, arXiv:2412.06464.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxsp.blocks.block import (
    LayerCache,
    Mixer,
    MixerInput,
    NextToken,
    RowInputs,
)
from jaxsp.blocks.config import DeltaNetConfig, LayerConfig, ModelConfig, NormNames
from jaxsp.blocks.layers import Parameter, RowGroups, Weights, declare_param, scale
from jaxsp.blocks.linear import Keys, Linear
from jaxsp.delta_rule import delta_rule, kernels
from jaxsp.delta_rule.spans import (
    OwnSegments,
    RowSpans,
    convolve,
    convolve_token,
    find_segments,
)

OUTPUT = "delta_net_out"

_PREFIX = "linear_attn"

_COUNTED_CHUNK_TOKENS = 64

_FILTERS = {"qkv": "filters", "q": "q_filters", "k": "k_filters", "v": "v_filters"}
"""Keys of the convolution's filters, by the part that they are for; in the order of channels."""


def _sizes(config: ModelConfig) -> DeltaNetConfig:
    assert config.delta_net is not None, "a layer is a delta net"
    return config.delta_net


def _split_channels(sizes: DeltaNetConfig, names: tuple[str, ...]) -> dict[str, int]:
    """Number of channels of each part of q, k and v, by its key in the parameter table.

    Args: names: names of one tensor for all parts, or of one for each.
    """
    if len(names) == 1:
        return {"qkv": sizes.num_channels}
    keys = sizes.num_key_heads * sizes.key_size
    return {"q": keys, "k": keys, "v": sizes.num_heads * sizes.value_size}


def _join(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _declare_projections(
    linear: functools.partial, members: dict[str, int], sizes: DeltaNetConfig
) -> dict[str, Linear]:
    """Projections that are one tensor: if there are several, each key head has rows of all.

    Args: members: number of rows of each.
    """
    if len(members) == 1:
        return {part: linear(size) for part, size in members.items()}
    counts = [size // sizes.num_key_heads for size in members.values()]
    declared: dict[str, Linear] = {}
    for index, (part, size) in enumerate(members.items()):
        rows = RowGroups(sum(counts[:index]), counts[index], sum(counts))
        first = next(iter(declared.values()), None)
        declared[part] = linear(size, hf_rows=rows, fused_with=first)
    return declared


class DeltaNetInput(MixerInput):
    """Norm, and projections to q, k and v, to the output's gate, to decays and to strengths."""

    z: Linear
    a: Linear
    b: Linear

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        sizes = _sizes(config)
        H = sizes.num_heads
        names = sizes.names
        channels = _split_channels(sizes, names.qkv)
        self.qkv_parts = tuple(channels)
        parts = [
            *((part, channels[part], name) for part, name in zip(channels, names.qkv, strict=True)),
            ("z", H * sizes.value_size, names.gate),
            ("b", H, names.strength),
            ("a", H, names.decay),
        ]
        for name in dict.fromkeys(name for _, _, name in parts):
            members = {part: size for part, size, of_part in parts if of_part == name}
            linear = functools.partial(
                Linear,
                config.hidden_size,
                hf_name=f"{_PREFIX}.{name}",
                bias=False,
                config=config,
            )
            for part, declared in _declare_projections(linear, members, sizes).items():
                setattr(self, part, declared)
        self.decay = declare_param(
            Parameter(
                shape=(H,),
                hf_name=f"{_PREFIX}.A_log",
                log_uniform=sizes.decay_range,
                compute_dtype="float32",
                file_dtype="float32",
            )
        )
        self.step = declare_param(
            Parameter(
                shape=(H,),
                hf_name=f"{_PREFIX}.dt_bias",
                mean=1.0,
                softplus_range=sizes.step_range,
                compute_dtype="float32",
                file_dtype="float32",
            )
        )
        self.strength_scale = sizes.strength_scale

    def __call__(
        self, x_BlD: Float[Array, "B l D"], positions_Bl: Array, keys: Keys | None, *_: Any
    ) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        """q, k and v [B, l, X], decays' logarithms and strengths [B, l, H] in float32; the gate."""
        x_BlD, mlp_input = self.normalize(x_BlD)
        strength = jax.nn.sigmoid(self.b(x_BlD, keys)).astype(jnp.float32)
        strength = scale(strength, self.strength_scale)
        a32 = self.a(x_BlD, keys).astype(jnp.float32)
        step, decay = (jnp.broadcast_to(param[...], a32.shape) for param in (self.step, self.decay))
        log_decay = -jnp.exp(decay) * jax.nn.softplus(a32 + step)
        qkv = _join([getattr(self, part)(x_BlD, keys) for part in self.qkv_parts], axis=-1)
        return (qkv, log_decay, strength), (mlp_input, self.z(x_BlD, keys))


class Filters(nnx.Module):
    """Filters of the convolution over q, k and v."""

    def __init__(self, config: ModelConfig):
        sizes = _sizes(config)
        names = sizes.names.filters
        channels = _split_channels(sizes, names)
        for part, name in zip(channels, names, strict=True):
            param = Parameter(
                shape=(channels[part], 1, sizes.filter_size),
                hf_name=f"{_PREFIX}.{name}.weight",
                std=config.initializer_range,
                is_filter=True,
            )
            setattr(self, _FILTERS[part], declare_param(param))


class DeltaNetOutput(nnx.Module):
    """Norm of each head, gate and output projection."""

    def __init__(self, config: ModelConfig):
        sizes = _sizes(config)
        # The weight w is a factor, also in models whose other norms have 1 + w
        self.norm = declare_param(
            Parameter(
                shape=(sizes.value_size,), hf_name=f"{_PREFIX}.{sizes.names.norm}.weight", mean=1.0
            )
        )
        self.out = Linear(
            sizes.num_heads * sizes.value_size,
            config.hidden_size,
            hf_name=f"{_PREFIX}.{sizes.names.out}",
            bias=False,
            config=config,
        )
        self.eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps

    def __call__(
        self,
        out_BlHV: Float[Array, "B l H V"],
        gate: Float[Array, "B l X"],
        *,
        keys: Keys | None = None,
    ) -> Float[Array, "B l D"]:
        x32 = out_BlHV.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(self.norm[...].astype(jnp.float32), x32.shape)
        # Rounded where transformers rounds
        rounded = x32.astype(out_BlHV.dtype).astype(jnp.float32)
        normed = (weight * rounded).astype(out_BlHV.dtype).astype(jnp.float32)
        gated = normed * jax.nn.silu(gate.astype(jnp.float32).reshape(x32.shape))
        x_BlX = gated.astype(out_BlHV.dtype).reshape(gate.shape)
        return self.out(x_BlX, keys)


def _join_filters(weights: Weights) -> Float[Array, "X W"]:
    """Filters of all channels."""
    return _join([weights[name][:, 0] for name in _FILTERS.values() if name in weights], axis=0)


def _split_qkv(sizes: DeltaNetConfig, qkv_BlX: Array) -> list[Array]:
    """Queries, keys and values, [B, l, heads, size]."""
    key_channels = sizes.num_key_heads * sizes.key_size
    parts = jnp.split(qkv_BlX, [key_channels, 2 * key_channels], axis=-1)
    num_heads = (*2 * [sizes.num_key_heads], sizes.num_heads)
    return [x.reshape(*x.shape[:2], heads, -1) for x, heads in zip(parts, num_heads, strict=True)]


class DeltaNet(Mixer):
    """The gated delta rule within each segment, after a convolution."""

    description = "a gated delta net"
    checkpoint_names = (OUTPUT,)

    def norm_names(self, config: ModelConfig) -> NormNames:
        return _sizes(config).norm_names

    def declare_input(self, config: ModelConfig) -> DeltaNetInput:
        return DeltaNetInput(config)

    def declare_weights(self, config: ModelConfig) -> Filters:
        return Filters(config)

    def declare_output(self, config: ModelConfig) -> DeltaNetOutput:
        return DeltaNetOutput(config)

    def mix(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> Float[Array, "B l H V"]:
        with jax.named_scope(SCOPE):
            (qkv_BlX, g_BlH, beta_BlH), segments, spans = self._prepare(inputs, rows)
            filtered = convolve(qkv_BlX, _join_filters(weights), segments, spans)
            q, k, v = _split_qkv(_sizes(config), filtered)
            compute = kernels.find(_sizes(config).kernel)
            out = compute(q, k, v, g_BlH, beta_BlH, segments.is_first_Bl, spans=spans)
        return checkpoint_name(out, OUTPUT)

    def _prepare(
        self, inputs: Sequence[Array], rows: RowInputs
    ) -> tuple[list[Array], OwnSegments, RowSpans]:
        """The inputs with 0 at padding, and the places of this device's tokens."""
        spans = RowSpans(
            seq=rows.attend.strategy.seq,
            layout=rows.attend.layout,
            tokens_per_device=inputs[0].shape[1],
        )
        segments = find_segments(rows.batch.starts_BM, rows.batch.lengths_BM, spans.own_tokens())
        clear = lambda x: jnp.where(segments.inside_Bl[..., None], x, jnp.zeros((), x.dtype))
        return [clear(x) for x in inputs], segments, spans

    def prefill(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> tuple[Float[Array, "B l H V"], LayerCache]:
        sizes = _sizes(config)
        with jax.named_scope(SCOPE):
            (qkv_BlX, *strengths), segments, spans = self._prepare(inputs, rows)
            filtered = convolve(qkv_BlX, _join_filters(weights), segments, spans)
            qkv = _split_qkv(sizes, filtered)
            # Padding changes no state, so that the row's last state is that of its last token
            out, state = delta_rule.compute_with_state(
                *qkv, *strengths, segments.is_first_Bl, spans=spans
            )
            # Numbers of the last tokens of each prompt; negative ones do not exist
            back_t = jnp.arange(1 - sizes.filter_size, 0, dtype=jnp.int32)
            last_Bt = rows.batch.lengths_BM[:, :1] + back_t[None]
            before = spans.take_tokens(qkv_BlX, last_Bt)
        return out, LayerCache(tokens={}, states={"before": before, "state": state})

    def decode(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], token: NextToken
    ) -> tuple[Float[Array, "B 1 H V"], LayerCache]:
        qkv_B1X, *strengths = inputs
        with jax.named_scope(SCOPE):
            filtered, before = convolve_token(
                token.states["before"], qkv_B1X, _join_filters(weights)
            )
            qkv = _split_qkv(_sizes(config), filtered)
            out, state = delta_rule.compute_token(token.states["state"], *qkv, *strengths)
        return out, LayerCache(tokens={}, states={"before": before, "state": state})

    def output_bytes(self, config: ModelConfig, itemsize: int) -> int:
        sizes = _sizes(config)
        return sizes.num_heads * sizes.value_size * itemsize

    def forward_flops(
        self, config: ModelConfig, layer: LayerConfig, segment_lengths: np.ndarray
    ) -> float:
        """For each token and head: three products of the state, those of a chunk's tokens with each
        other, and the convolution. Chunks count as 64 tokens, whatever the kernel's are."""
        sizes = _sizes(config)
        K = sizes.key_size
        V = sizes.value_size
        per_head = 6 * K * V + 2 * _COUNTED_CHUNK_TOKENS * (3 * K + 2 * V)
        per_token = sizes.num_heads * per_head + 2 * sizes.filter_size * sizes.num_channels
        return per_token * float(segment_lengths.sum())


SCOPE = "delta_net"
"""Scope of the operations of `DeltaNet.mix` in a compiled program."""
