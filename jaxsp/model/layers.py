"""Decoder modules in Flax NNX, which declare each weight once and compute one device's tokens.

Dims: B rows, l this device's tokens of a row, D model, H query heads, G K/V heads, K head size,
F feed-forward, V vocabulary. Matrices are [out, in] as in Hugging Face's files, so that import and
export copy bytes.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.model import dropout, rope
from jaxsp.model.config import Lora, ModelConfig
from jaxsp.model.dropout import Keys

Weights = dict[str, Any]
"""Nested dict of arrays, with the structure that the modules declare."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Entry of the parameter table, which init, sharding, optimizer, import and export all use."""

    shape: tuple[int, ...]
    """Shape of one layer's tensor, in Hugging Face's layout."""
    hf_name: str
    """The tensor's name in a safetensors file; `{layer}` stands for the layer's number."""
    hf_rows: tuple[int, int] | None = None
    """First row of this parameter in that tensor, and number of rows of the tensor; None: this
    parameter is the whole tensor."""
    num_layers: int | None = None
    """Size of the layer dimension in front of `shape`; None for a tensor outside the layers."""
    mean: float = 0.0
    """Mean of random weights, which are drawn from a normal distribution."""
    std: float = 0.0
    """Standard deviation of random weights."""
    is_adapter: bool = False
    """True for a weight of an adapter (LoRA), which is not part of the model's own files."""
    frozen_as: str | None = None
    """Format in which a frozen weight is stored, for example `bfloat16`; None: the weight is
    trained, and stored in float32."""

    @property
    def is_trainable(self) -> bool:
        """True for a weight with a gradient and optimizer state."""
        return self.frozen_as is None

    @property
    def is_matrix(self) -> bool:
        """True for all weights except biases and norms. Weight decay applies to matrices only."""
        return len(self.shape) > 1

    @property
    def size(self) -> int:
        """Number of elements of one layer's tensor."""
        return math.prod(self.shape)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a safetensors file."""
        return self.shape if self.hf_rows is None else (self.hf_rows[1], *self.shape[1:])

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

    def has_gradient(self, shard: Any) -> bool:
        """False for the shard of a frozen weight: a backward pass returns None for it."""

    def split_holders(self, shards: Any) -> tuple[Any, Any]:
        """Splits shards into holders of gradients and values; `merge_holders` is the inverse.

        Holders are arrays in the shapes, dtypes and memory of the gradients, None for frozen
        weights. Differentiating with respect to them gives the gradients of the shards.
        """

    def merge_holders(self, holders: Any, values: Any) -> Any:
        """Shards from holders and values, of all layers or of one."""


def _declare_param(param: Parameter) -> nnx.Param:
    """Declares a weight without a value; the arrays are merged into the modules for each call."""
    return nnx.Param(jax.ShapeDtypeStruct(param.shape, jnp.float32), param=param)


class Linear(nnx.Module):
    """x -> x W^T + b, with an adapter if it is one of `Lora.targets`."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        hf_name: str,
        bias: bool,
        config: ModelConfig,
        hf_rows: tuple[int, int] | None = None,
        fused_with: "Linear | None" = None,
    ):
        """Args: fused_with: another part of the same tensor in Hugging Face's files."""
        matrix = Parameter(
            shape=(dim_out, dim_in),
            hf_name=f"{hf_name}.weight",
            hf_rows=hf_rows,
            std=config.initializer_range,
        )
        self.weight = _declare_param(matrix)
        vector = Parameter(shape=(dim_out,), hf_name=f"{hf_name}.bias", hf_rows=hf_rows)
        self.bias = _declare_param(vector) if bias else None
        adapter: LoraAdapter | None = None
        if config.lora is not None and hf_name in config.lora.targets:
            shared = None if fused_with is None else fused_with.adapter
            adapter = LoraAdapter(matrix, config.lora, shared=shared)
        self.adapter: LoraAdapter | None = adapter

    def __call__(self, x: Float[Array, "B l i"], keys: Keys | None = None) -> Float[Array, "B l o"]:
        """Args: keys: of the tokens, for dropout before the adapter; None: no dropout."""
        y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        if self.adapter is not None:
            y = self.adapter(x, y, self.weight[...], keys)
        if self.bias is None:
            return y
        # In float32, so that the bias's gradient, a sum over tokens, is summed in float32.
        y32 = y.astype(jnp.float32)
        bias = jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return (y32 + bias).astype(y.dtype)


class LoraAdapter(nnx.Module):
    """Adapter of a projection: see `model.config.Lora`. Names are those of PEFT.

    A has random weights of the variance that PEFT gives them, B is 0, and DoRA's magnitudes are the
    norms of the rows of W (`training.weight_init.init_magnitudes`).
    """

    def __init__(self, weight: Parameter, lora: Lora, *, shared: "LoraAdapter | None"):
        """Args: shared: adapter of another part of the same tensor, which has the same A."""
        dim_out, dim_in = weight.shape
        name = weight.hf_name.removesuffix(".weight")
        a = Parameter(
            shape=(lora.rank, dim_in),
            hf_name=f"{name}.lora_A.weight",
            std=(3 * dim_in) ** -0.5,
            is_adapter=True,
        )
        b = Parameter(
            shape=(dim_out, lora.rank),
            hf_name=f"{name}.lora_B.weight",
            hf_rows=weight.hf_rows,
            is_adapter=True,
        )
        self.a: nnx.Param = _declare_param(a) if shared is None else shared.a
        self.b = _declare_param(b)
        magnitude = Parameter(
            shape=(dim_out,),
            hf_name=f"{name}.lora_magnitude_vector",
            hf_rows=weight.hf_rows,
            is_adapter=True,
        )
        self.magnitude = _declare_param(magnitude) if lora.is_dora else None
        self.scale = lora.scale
        self.dropout = lora.dropout
        self.name = name

    def __call__(
        self,
        x: Float[Array, "B l i"],
        y: Float[Array, "B l o"],
        weight_oi: Float[Array, "o i"],
        keys: Keys | None,
    ) -> Float[Array, "B l o"]:
        """The adapted product.

        Args:
            y: the product of x and the frozen weight.
            keys: of the tokens, for dropout; None: no dropout.
        """
        a_ri = self.a[...]
        b_or = self.b[...]
        if keys is not None:
            x = dropout.drop(x, keys, name=self.name, rate=self.dropout)
        delta = jnp.einsum("...r,or->...o", jnp.einsum("...i,ri->...r", x, a_ri), b_or)
        y = y + scale(delta, self.scale)
        if self.magnitude is None:
            return y
        norm_o = jax.lax.stop_gradient(self._row_norms(weight_oi, a_ri, b_or))
        # A row of zeros has no direction: it stays zero
        is_zero_o = norm_o == 0
        divisor_o = jnp.where(is_zero_o, 1, norm_o)
        factor_o = self.magnitude[...].astype(jnp.float32) / divisor_o
        factor_o = jnp.where(is_zero_o, 0, factor_o)
        # In float32 and broadcast, so that the gradient is summed over tokens in float32
        return (y.astype(jnp.float32) * jnp.broadcast_to(factor_o, y.shape)).astype(y.dtype)

    def _row_norms(self, weight_oi: Array, a_ri: Array, b_or: Array) -> Float32[Array, "o"]:
        """Norms of the rows of W + scale * B A, without that matrix."""
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        b_or = self.scale * b_or.astype(jnp.float32)
        weight_squares_o = jnp.sum(jnp.square(weight_oi.astype(jnp.float32)), axis=-1)
        mixed_or = product("oi,ri->or", weight_oi, a_ri)
        a_squares_rs = product("ri,si->rs", a_ri, a_ri)
        rest_o = jnp.sum(b_or * (2 * mixed_or + b_or @ a_squares_rs), axis=-1)
        # Rounding makes the sum slightly negative where W + scale * B A nearly cancels
        return jnp.sqrt(jnp.maximum(weight_squares_o + rest_o, 0))


class Norm(nnx.Module):
    """Normalization over the last dim, in float32: see `ModelConfig.norm`."""

    def __init__(self, dim: int, *, hf_name: str, config: ModelConfig):
        mean = 0.0 if config.norm == "rms_plus_one" else 1.0
        self.weight = _declare_param(
            Parameter(shape=(dim,), hf_name=f"{hf_name}.weight", mean=mean)
        )
        self.kind = config.norm
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        if self.kind == "layer":
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(self.weight[...].astype(jnp.float32), x32.shape)
        if self.kind == "rms_plus_one":
            weight = 1 + weight
        return (x32 * weight).astype(x.dtype)


def _declare_norm(dim: int, hf_name: str | None, config: ModelConfig) -> Norm | None:
    return None if hf_name is None else Norm(dim, hf_name=hf_name, config=config)


def _apply_norm(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class AttentionInputs(NamedTuple):
    """Results of the part of a layer before attention."""

    q: Float[Array, "B l H K"]
    k: Float[Array, "B l G K"]
    v: Float[Array, "B l G K"]
    mlp_input: Float[Array, "B l D"] | None
    """Input of the MLP, if it is that of attention (`ModelConfig.is_parallel`)."""


class PreAttention(nnx.Module):
    """Part of a layer before attention: norm, projections to q, k and v, and RoPE."""

    def __init__(self, config: ModelConfig):
        self.norm = _declare_norm(config.hidden_size, config.norm_names.pre_attention, config)
        self.q, self.k, self.v = self._declare_projections(config)
        self.q_norm = self._declare_qk_norm("q", config.num_heads, config)
        self.k_norm = self._declare_qk_norm("k", config.num_kv_heads, config)
        self.config = config

    def _declare_projections(self, config: ModelConfig) -> list[Linear]:
        linear = functools.partial(Linear, config.hidden_size, bias=config.qkv_bias, config=config)
        num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = [heads * config.head_dim for heads in num_heads]
        if config.has_fused_qkv:
            return _declare_fused(linear, rows, hf_name="self_attn.qkv_proj")
        return [
            linear(size, hf_name=f"self_attn.{name}_proj")
            for name, size in zip("qkv", rows, strict=True)
        ]

    def _declare_qk_norm(self, name: str, num_heads: int, config: ModelConfig) -> Norm | None:
        if config.qk_norm == "none":
            return None
        num_normalized = 1 if config.qk_norm == "head" else num_heads
        dim = num_normalized * config.head_dim
        return Norm(dim, hf_name=f"self_attn.{name}_norm", config=config)

    def __call__(
        self,
        x_BlD: Float[Array, "B l D"],
        positions_Bl: Int32[Array, "B l"],
        keys: Keys | None = None,
        rope_index: Int32[Array, ""] | int = 0,
    ) -> AttentionInputs:
        """Args: keys: as in `Linear`. rope_index: index into `ModelConfig.ropes`."""
        config = self.config
        x_BlD = _apply_norm(self.norm, x_BlD)
        angles = rope.compute_angles(positions_Bl, config.ropes, rope_index)
        q = self._split_heads(self.q(x_BlD, keys), self.q_norm)
        k = self._split_heads(self.k(x_BlD, keys), self.k_norm)
        v = self._split_heads(self.v(x_BlD, keys), None)
        q = rope.rotate(q, angles, is_interleaved=config.rope_interleaved)
        k = rope.rotate(k, angles, is_interleaved=config.rope_interleaved)
        if config.query_scale is not None:
            q = rope.scale_queries(q, positions_Bl, config.query_scale)
        return AttentionInputs(q, k, v, x_BlD if config.is_parallel else None)

    def _split_heads(self, x_BlX: Array, norm: Norm | None) -> Float[Array, "B l heads K"]:
        """Splits a projection into heads; applies the norm to all heads together or to each."""
        heads = (*x_BlX.shape[:2], -1, self.config.head_dim)
        if self.config.qk_norm == "projection":
            return _apply_norm(norm, x_BlX).reshape(heads)
        return _apply_norm(norm, x_BlX.reshape(heads))


def _declare_fused(linear: functools.partial, rows: list[int], *, hf_name: str) -> list[Linear]:
    """Matrices that are parts of one tensor in Hugging Face's files, below each other."""
    parts: list[Linear] = []
    for index, size in enumerate(rows):
        part = linear(
            size,
            hf_name=hf_name,
            hf_rows=(sum(rows[:index]), sum(rows)),
            fused_with=parts[0] if parts else None,
        )
        parts.append(part)
    return parts


MLP_CHECKPOINT_NAMES = ("mlp_gate", "mlp_up")
"""Names of the MLP's gate and up projections, for a remat policy."""


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        F = config.intermediate_size
        linear = functools.partial(Linear, bias=config.mlp_bias, config=config)
        if config.has_fused_gate_up:
            fused = functools.partial(linear, D)
            self.gate, self.up = _declare_fused(fused, [F, F], hf_name="mlp.gate_up_proj")
        else:
            self.gate = linear(D, F, hf_name="mlp.gate_proj")
            self.up = linear(D, F, hf_name="mlp.up_proj")
        self.down = linear(F, D, hf_name="mlp.down_proj")
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B l D"], keys: Keys | None = None) -> Float[Array, "B l D"]:
        """Args: keys: as in `Linear`."""
        products = (self.gate(x, keys), self.up(x, keys))
        gate, up = map(checkpoint_name, products, MLP_CHECKPOINT_NAMES)
        return self.down(self._activate(gate) * up, keys)

    def _activate(self, gate: Array) -> Array:
        if self.activation == "silu":
            return jax.nn.silu(gate)
        return jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype)


class PostAttention(nnx.Module):
    """Part of a layer after attention: output projection and MLP, each with a residual."""

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        q_dim = config.num_heads * config.head_dim
        names = config.norm_names
        self.o = Linear(
            q_dim, D, hf_name="self_attn.o_proj", bias=config.output_bias, config=config
        )
        self.output_norm = _declare_norm(D, names.post_attention, config)
        self.norm = _declare_norm(D, names.pre_mlp, config)
        self.mlp = MLP(config)
        self.mlp_norm = _declare_norm(D, names.post_mlp, config)
        self.residual_scale = config.residual_scale

    def __call__(
        self,
        x_BlD: Float[Array, "B l D"],
        out_BlHK: Float[Array, "B l H K"],
        mlp_input: Float[Array, "B l D"] | None = None,
        keys: Keys | None = None,
    ) -> Float[Array, "B l D"]:
        """Args: mlp_input: see `AttentionInputs`; None: the MLP follows attention. keys: as in
        `Linear`."""
        out_BlD = self.o(out_BlHK.reshape(*x_BlD.shape[:2], -1), keys)
        x_BlD = x_BlD + scale(_apply_norm(self.output_norm, out_BlD), self.residual_scale)
        if mlp_input is None:
            mlp_input = _apply_norm(self.norm, x_BlD)
        mlp_out_BlD = _apply_norm(self.mlp_norm, self.mlp(mlp_input, keys))
        return x_BlD + scale(mlp_out_BlD, self.residual_scale)


def scale(x: Array, factor: float) -> Array:
    """x times a factor rounded to the dtype of x, as in torch; x itself if the factor is 1."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


class DecoderLayer(nnx.Module):
    """Weights of one layer. model/decoder.py calls both parts, with attention between them."""

    def __init__(self, config: ModelConfig):
        self.pre_attention = PreAttention(config)
        sinks = Parameter(shape=(config.num_heads,), hf_name="self_attn.sinks")
        self.sinks = _declare_param(sinks) if config.has_sinks else None
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
        self.norm = Norm(config.hidden_size, hf_name="model.norm", config=config)
        head = dataclasses.replace(matrix, hf_name="lm_head.weight")
        self.head = None if config.tie_embeddings else _declare_param(head)
