"""Softmax attention as the mixer of a layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxsp.attention.attend import CHECKPOINT_NAMES as ATTENTION_NAMES
from jaxsp.attention.cached_attention import CachedKeys, attend_to_cache
from jaxsp.blocks import rope
from jaxsp.blocks.block import (
    LayerCache,
    Mixer,
    MixerInput,
    NextToken,
    RowInputs,
)
from jaxsp.blocks.config import LayerConfig, ModelConfig
from jaxsp.blocks.layers import (
    Norm,
    NormWithoutWeight,
    Parameter,
    Weights,
    apply_norm,
    declare_param,
)
from jaxsp.blocks.linear import Keys, Linear, declare_fused


class AttentionInput(MixerInput):
    """Norm, projections to q, k, v and a gate, and RoPE."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.q, self.k, self.v = self._declare_projections(config)
        self.v_norm = NormWithoutWeight(config) if config.has_value_norm else None
        gate = None
        if config.attention_gate == "gate_proj":
            dim = config.num_heads * config.head_dim
            name = "self_attn.gate_proj"
            gate = Linear(config.hidden_size, dim, hf_name=name, bias=False, config=config)
        self.gate = gate
        self.q_norm = self._declare_qk_norm("q", config.num_heads, config)
        has_keys = config.shared_keys is None
        num_kv_heads = config.num_kv_heads
        self.k_norm = self._declare_qk_norm("k", num_kv_heads, config) if has_keys else None
        self.config = config

    def _declare_projections(self, config: ModelConfig) -> list[Any]:
        """Linear layers to q, k and v; None for those that there are not."""
        linear = functools.partial(Linear, config.hidden_size, bias=config.qkv_bias, config=config)
        num_heads = (
            config.num_heads * (2 if config.attention_gate == "q_proj" else 1),
            config.num_kv_heads,
            config.num_kv_heads,
        )
        rows = [heads * config.head_dim for heads in num_heads]
        if config.has_fused_qkv:
            return [*declare_fused(linear, rows, hf_name="self_attn.qkv_proj")]
        has_keys = config.shared_keys is None
        own = {"q": True, "k": has_keys, "v": has_keys and config.has_value_projection}
        return [
            linear(size, hf_name=f"self_attn.{name}_proj") if own[name] else None
            for name, size in zip("qkv", rows, strict=True)
        ]

    def _declare_qk_norm(
        self, name: str, num_heads: int, config: ModelConfig
    ) -> Norm | NormWithoutWeight | None:
        if config.qk_norm == "none":
            return None
        if config.qk_norm == "head_without_weight":
            return NormWithoutWeight(config)
        num_normalized = 1 if config.qk_norm == "head" else num_heads
        dim = num_normalized * config.head_dim
        return Norm(dim, hf_name=f"self_attn.{name}_norm", config=config)

    def __call__(
        self,
        x_BlD: Float[Array, "B l D"],
        positions_Bl: Int32[Array, "B l"],
        keys: Keys | None,
        rope_index: Int32[Array, ""] | int = 0,
    ) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        """q [B, l, H, K], and unless they are shared k and v [B, l, G, K]; and the gate
        [B, l, H, K], if there is one."""
        config = self.config
        x_BlD, mlp_input = self.normalize(x_BlD)
        angles = rope.compute_angles(positions_Bl, config.ropes, rope_index)
        q = self.q(x_BlD, keys)
        carried: tuple[Array, ...] = ()
        if config.attention_gate == "q_proj":
            # Each head's rows are those of its query, then those of its gate
            q_BlHX = q.reshape(*q.shape[:2], config.num_heads, 2 * config.head_dim)
            q, gate = jnp.split(q_BlHX, 2, axis=-1)
            carried = (gate,)
        elif self.gate is not None:
            gate = self.gate(x_BlD, keys)
            carried = (gate.reshape(*gate.shape[:2], config.num_heads, config.head_dim),)
        q = self._split_heads(q, self.q_norm)
        rotate = functools.partial(
            rope.rotate, angles=angles, is_interleaved=config.rope_interleaved
        )
        k_and_v: list[Array] = []
        if self.k is not None:
            projected = self.k(x_BlD, keys)
            k = self._split_heads(projected, self.k_norm)
            v = self._split_heads(projected if self.v is None else self.v(x_BlD, keys), None)
            k_and_v = [k, apply_norm(self.v_norm, v)]
        q = rotate(q)
        k_and_v[:1] = map(rotate, k_and_v[:1])
        if config.query_scale is not None:
            q = rope.scale_queries(q, positions_Bl, config.query_scale)
        return (q, *k_and_v), (mlp_input, *carried)

    def _split_heads(
        self, x: Array, norm: Norm | NormWithoutWeight | None
    ) -> Float[Array, "B l heads K"]:
        """Splits a projection into heads; applies the norm to all heads together or to each."""
        heads = (*x.shape[:2], -1, self.config.head_dim)
        if self.config.qk_norm == "projection":
            return apply_norm(norm, x).reshape(heads)
        return apply_norm(norm, x.reshape(heads))


class Sinks(nnx.Module):
    """Scores of one more key for each head, whose value is 0."""

    def __init__(self, config: ModelConfig):
        self.sinks = declare_param(Parameter(shape=(config.num_heads,), hf_name="self_attn.sinks"))


class AttentionOutput(Linear):
    """Output projection, after the gate if there is one."""

    def __call__(  # type: ignore[override]  # called as every mixer's output, not as a Linear
        self, out_BlHK: Float[Array, "B l H K"], *gates: Array, keys: Keys | None = None
    ) -> Float[Array, "B l D"]:
        for gate in gates:
            out_BlHK = out_BlHK * jax.nn.sigmoid(gate)
        return super().__call__(out_BlHK.reshape(*out_BlHK.shape[:2], -1), keys)


class Attention(Mixer):
    """Causal softmax attention within each segment: see `Attend`."""

    description = "attention"
    checkpoint_names = ATTENTION_NAMES

    def declare_input(self, config: ModelConfig) -> AttentionInput:
        return AttentionInput(config)

    def declare_weights(self, config: ModelConfig) -> Sinks | None:
        return Sinks(config) if config.has_sinks else None

    def declare_output(self, config: ModelConfig) -> AttentionOutput:
        return AttentionOutput(
            config.num_heads * config.head_dim,
            config.hidden_size,
            hf_name="self_attn.o_proj",
            bias=config.output_bias,
            config=config,
        )

    def mix(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> Float[Array, "B l H K"]:
        q_BlHK, k_BlGK, v_BlGK = inputs
        segments = (rows.batch.starts_BM, rows.batch.lengths_BM, rows.tables)
        return rows.attend(
            q_BlHK,
            k_BlGK,
            v_BlGK,
            *segments,
            kind=rows.attention_kind,
            sinks_H=weights.get("sinks"),
        )

    def prefill(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> tuple[Float[Array, "B l H K"], LayerCache]:
        return self.mix(config, weights, inputs, rows), _make_cache(config, inputs)

    def decode(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], token: NextToken
    ) -> tuple[Float[Array, "B 1 H K"], LayerCache]:
        q_B1HK, k_B1GK, v_B1GK = inputs
        own_positions_B1 = jnp.where(token.is_own, token.positions_B, -1)[:, None]
        keys = [
            CachedKeys(token.prompts["k"], token.prompts["v"], token.prompt_positions_Bl),
            CachedKeys(token.answers["k"], token.answers["v"], token.answer_positions_Bn),
            CachedKeys(k_B1GK, v_B1GK, own_positions_B1),
        ]
        out_BHK = attend_to_cache(
            q_B1HK[:, 0],
            keys,
            positions_B=token.positions_B,
            window=token.window,
            score=config.layer_scores[0],  # layers of a kind differ in their windows only
            sinks_H=weights.get("sinks"),
        )
        return out_BHK[:, None], _make_cache(config, inputs)

    def output_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Output and log-sum-exp."""
        return config.num_heads * (config.head_dim * itemsize + 4)

    def forward_flops(
        self, config: ModelConfig, layer: LayerConfig, segment_lengths: np.ndarray
    ) -> float:
        """4 operations per head element and pair of a query and a key. A segment of n tokens has
        n (n + 1) / 2 pairs; with a window of w, each token from number w on has w."""
        lengths = segment_lengths.astype(np.float64)
        near = lengths if layer.window is None else np.minimum(lengths, layer.window)
        pairs = float(np.sum(near * (near + 1) / 2 + (lengths - near) * near))
        return 4 * config.num_heads * config.head_dim * pairs


def _make_cache(config: ModelConfig, inputs: Sequence[Array]) -> LayerCache:
    """Keys and values of a layer; empty if they are another layer's."""
    if config.shared_keys is not None:
        return LayerCache(tokens={}, states={})
    _, k_BlGK, v_BlGK = inputs
    return LayerCache(tokens={"k": k_BlGK, "v": v_BlGK}, states={})
