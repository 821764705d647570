"""Decoder modules in Flax NNX, which declare each weight once and compute one device's tokens.

Dims: B rows, l this device's tokens of a row, D model, H query heads, G K/V heads, K head size,
F feed-forward, V vocabulary. Matrices are [out, in] as in Hugging Face's files, so that import and
export copy bytes.
"""

import dataclasses
import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.core.batch import POSITION_LIMIT
from jaxsp.model.config import ModelConfig

Weights = dict[str, Any]
"""Nested dict of arrays, with the structure that the modules declare."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Entry of the parameter table, which init, sharding, optimizer, import and export all use."""

    shape: tuple[int, ...]
    """Shape of one layer's tensor, in Hugging Face's layout."""
    hf_name: str
    """The tensor's name in a safetensors file; `{layer}` stands for the layer's number."""
    num_layers: int | None = None
    """Size of the layer dimension in front of `shape`; None for a tensor outside the layers."""
    mean: float = 0.0
    """Mean of random weights, which are drawn from a normal distribution."""
    std: float = 0.0
    """Standard deviation of random weights."""

    @property
    def is_matrix(self) -> bool:
        """True for all weights except biases and norms. Weight decay applies to matrices only."""
        return len(self.shape) > 1

    @property
    def size(self) -> int:
        """Number of elements of one layer's tensor."""
        return math.prod(self.shape)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the array that stacks all layers."""
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape)


@runtime_checkable
class Gather(Protocol):
    """Gathers whole weights, in the compute dtype, from a device's shards.

    The model gets weights only through it, so model code needs no mesh. A shard may be any tree of
    arrays.
    """

    def __call__(self, params: Any, shards: Any) -> Any:
        """Whole weights of a tree, or of one parameter; differentiable."""

    def all_gather(self, param: Parameter, shard: Any) -> Array:
        """One whole weight, without a gradient; `gather(param, shard)` has one."""

    def reduce_scatter(self, param: Parameter, gradient: Array) -> Any:
        """Gradient of a shard, float32, summed over all devices: the transpose of `all_gather`."""


def _declare_param(param: Parameter) -> nnx.Param:
    """Declares a weight without a value; the arrays are merged into the modules for each call."""
    return nnx.Param(jax.ShapeDtypeStruct(param.shape, jnp.float32), param=param)


class Linear(nnx.Module):
    """x -> x W^T + b."""

    def __init__(self, dim_in: int, dim_out: int, *, hf_name: str, bias: bool, config: ModelConfig):
        matrix = Parameter(
            shape=(dim_out, dim_in), hf_name=f"{hf_name}.weight", std=config.initializer_range
        )
        self.weight = _declare_param(matrix)
        vector = Parameter(shape=(dim_out,), hf_name=f"{hf_name}.bias")
        self.bias = _declare_param(vector) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        if self.bias is None:
            return y
        # In float32, so that the bias's gradient, a sum over tokens, is summed in float32.
        y32 = y.astype(jnp.float32)
        bias = jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return (y32 + bias).astype(y.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * w over the last dim, in float32."""

    def __init__(self, dim: int, *, hf_name: str, eps: float):
        self.weight = _declare_param(Parameter(shape=(dim,), hf_name=f"{hf_name}.weight", mean=1.0))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(self.weight[...].astype(jnp.float32), x32.shape)
        return (x32 * weight).astype(x.dtype)


class PreAttention(nnx.Module):
    """Part of a layer before attention: norm, projections to q, k and v, and RoPE."""

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        K = config.head_dim
        linear = functools.partial(Linear, bias=config.qkv_bias, config=config)
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps)
        self.norm = norm(D, hf_name="input_layernorm")
        self.q = linear(D, config.num_heads * K, hf_name="self_attn.q_proj")
        self.k = linear(D, config.num_kv_heads * K, hf_name="self_attn.k_proj")
        self.v = linear(D, config.num_kv_heads * K, hf_name="self_attn.v_proj")
        self.q_norm = norm(K, hf_name="self_attn.q_norm") if config.qk_norm else None
        self.k_norm = norm(K, hf_name="self_attn.k_norm") if config.qk_norm else None
        self.config = config

    def __call__(
        self, x_BlD: Float[Array, "B l D"], positions_Bl: Int32[Array, "B l"]
    ) -> tuple[Float[Array, "B l H K"], Float[Array, "B l G K"], Float[Array, "B l G K"]]:
        heads = (*x_BlD.shape[:2], -1, self.config.head_dim)
        x_BlD = self.norm(x_BlD)
        angles = rope_angles(positions_Bl, self.config)
        q = self.q(x_BlD).reshape(heads)
        k = self.k(x_BlD).reshape(heads)
        v = self.v(x_BlD).reshape(heads)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return apply_rope(q, angles), apply_rope(k, angles), v


MLP_CHECKPOINT_NAMES = ("mlp_gate", "mlp_up")
"""Names of the MLP's gate and up projections, for a remat policy."""


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        F = config.intermediate_size
        linear = functools.partial(Linear, bias=config.mlp_bias, config=config)
        self.gate = linear(D, F, hf_name="mlp.gate_proj")
        self.up = linear(D, F, hf_name="mlp.up_proj")
        self.down = linear(F, D, hf_name="mlp.down_proj")

    def __call__(self, x: Float[Array, "B l D"]) -> Float[Array, "B l D"]:
        gate, up = (
            checkpoint_name(y, name)
            for y, name in zip((self.gate(x), self.up(x)), MLP_CHECKPOINT_NAMES, strict=True)
        )
        return self.down(jax.nn.silu(gate) * up)


class PostAttention(nnx.Module):
    """Part of a layer after attention: output projection and MLP, each with a residual."""

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        q_dim = config.num_heads * config.head_dim
        self.o = Linear(
            q_dim, D, hf_name="self_attn.o_proj", bias=config.output_bias, config=config
        )
        self.norm = RMSNorm(D, hf_name="post_attention_layernorm", eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(
        self, x_BlD: Float[Array, "B l D"], out_BlHK: Float[Array, "B l H K"]
    ) -> Float[Array, "B l D"]:
        x_BlD = x_BlD + self.o(out_BlHK.reshape(*x_BlD.shape[:2], -1))
        return x_BlD + self.mlp(self.norm(x_BlD))


class DecoderLayer(nnx.Module):
    """Weights of one layer. model/decoder.py calls both parts, with attention between them."""

    def __init__(self, config: ModelConfig):
        self.pre_attention = PreAttention(config)
        self.post_attention = PostAttention(config)


class Decoder(nnx.Module):
    """All weights: embedding, layers, last norm and head.

    `layers` declares one layer. The arrays stack all layers: see `Parameter.num_layers`.
    """

    def __init__(self, config: ModelConfig):
        matrix = Parameter(
            shape=(config.vocab_size, config.hidden_size),
            hf_name="model.embed_tokens.weight",
            std=config.initializer_range,
        )
        self.embedding = _declare_param(matrix)
        self.layers = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, hf_name="model.norm", eps=config.rms_norm_eps)
        head = dataclasses.replace(matrix, hf_name="lm_head.weight")
        self.head = None if config.tie_embeddings else _declare_param(head)


@dataclasses.dataclass(frozen=True)
class RopeAngles:
    """Cosine and sine of each token's RoPE angles, one angle for each pair of a head's elements."""

    cos: Float32[Array, "B l pairs"]
    sin: Float32[Array, "B l pairs"]


ROPE_TABLE_STRIDE = 4096
"""Stride of the coarse table: position = stride * a + b, with one table for a and one for b."""


def rope_angles(positions_Bl: Int32[Array, "B l"], config: ModelConfig) -> RopeAngles:
    """RoPE angles, accurate to 1e-6 at any position below `batch.POSITION_LIMIT`.

    A float32 product position * frequency is off by 0.06 rad at position 1,000,000 and by 0.31 at
    5,000,000. So both tables are computed in float64 and combined by the angle-sum formula.
    """
    tables = _rope_tables(config)
    coarse, fine = jnp.divmod(positions_Bl, jnp.int32(ROPE_TABLE_STRIDE))
    indices = (coarse, coarse, fine, fine)
    cos_a, sin_a, cos_b, sin_b = (
        jnp.asarray(table)[index] for table, index in zip(tables, indices, strict=True)
    )
    return RopeAngles(cos=cos_a * cos_b - sin_a * sin_b, sin=sin_a * cos_b + cos_a * sin_b)


@functools.lru_cache(maxsize=4)
def _rope_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cosines and sines of the coarse table, and those of the fine one, [entries, K/2]."""
    frequencies = rope_frequencies(config)[None]
    coarse_positions = np.arange(POSITION_LIMIT // ROPE_TABLE_STRIDE)[:, None] * ROPE_TABLE_STRIDE
    coarse = coarse_positions * frequencies
    fine = np.arange(ROPE_TABLE_STRIDE)[:, None] * frequencies
    cos_a, sin_a, cos_b, sin_b = (
        function(angles).astype(np.float32)
        for angles in (coarse, fine)
        for function in (np.cos, np.sin)
    )
    return cos_a, sin_a, cos_b, sin_b


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair of a head's elements, float64 [K/2].

    Llama 3.1 scales them. Let original = original_max_position_embeddings. Wavelengths above
    original / low_freq_factor become `factor` times longer; those below original / high_freq_factor
    stay the same. Between them, frequencies are interpolated linearly in original / wavelength.

    Source: Su et al. 2021, arXiv:2104.09864; scaling: Llama 3.1's published code.
    """
    K = config.head_dim
    frequencies = config.rope_theta ** (-np.arange(0, K, 2, dtype=np.float64) / K)
    scaling = config.rope_llama3
    if scaling is None:
        return frequencies
    periods = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    factor_range = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = np.clip((periods - scaling.low_freq_factor) / factor_range, 0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def apply_rope(
    x_BlHK: Float[Array, "B l heads K"], angles: RopeAngles
) -> Float[Array, "B l heads K"]:
    """Rotates the pairs (i, i + K/2) of each head, as in Hugging Face, in float32."""
    cos = angles.cos[:, :, None]
    sin = angles.sin[:, :, None]
    a, b = jnp.split(x_BlHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_BlHK.dtype)
