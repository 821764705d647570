"""Modules in Flax NNX that all layers are made of. Each weight is declared once.

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
from flax import nnx
from jaxtyping import Array, Float, Float32

from jaxsp.blocks import dropout
from jaxsp.blocks.config import Lora, ModelConfig
from jaxsp.blocks.dropout import Keys

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
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have such a tensor, which the array stacks in front of `shape`;
    None for a tensor outside the layers."""
    mean: float = 0.0
    """Mean of random weights, which are drawn from a normal distribution."""
    std: float = 0.0
    """Standard deviation of random weights."""
    log_uniform: tuple[float, float] | None = None
    """Range of uniform numbers whose logarithms random weights are; None: they are normal."""
    softplus_range: tuple[float, float] | None = None
    """Range of the softplus of random weights, whose logarithm is uniform; None: they are
    normal."""
    compute_dtype: str | None = None
    """dtype that the model gets this weight in; None: that of the run."""
    is_filter: bool = False
    """True for filters of a convolution, which are treated like vectors."""
    is_adapter: bool = False
    """True for a weight of an adapter (LoRA), which is not part of the model's own files."""
    frozen_as: str | None = None
    """Format in which a frozen weight is stored, for example `bfloat16`; None: the weight is
    trained, and stored in float32."""

    @property
    def num_layers(self) -> int | None:
        """Size of the layer dimension; None for a tensor outside the layers."""
        return None if self.layers is None else len(self.layers)

    def find(self, layer: int) -> int:
        """Index of a layer, by its number, in the stack."""
        assert self.layers is not None, self.hf_name
        return self.layers.index(layer)

    @property
    def is_trainable(self) -> bool:
        """True for a weight with a gradient and optimizer state."""
        return self.frozen_as is None

    @property
    def is_matrix(self) -> bool:
        """True for all weights except biases, norms and filters.

        Weight decay applies to matrices only.
        """
        return len(self.shape) > 1 and not self.is_filter

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


def declare_param(param: Parameter) -> nnx.Param:
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
        self.weight = declare_param(matrix)
        vector = Parameter(shape=(dim_out,), hf_name=f"{hf_name}.bias", hf_rows=hf_rows)
        self.bias = declare_param(vector) if bias else None
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
    """Adapter of a projection: see `blocks.config.Lora`. Names are those of PEFT.

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
        self.a: nnx.Param = declare_param(a) if shared is None else shared.a
        self.b = declare_param(b)
        magnitude = Parameter(
            shape=(dim_out,),
            hf_name=f"{name}.lora_magnitude_vector",
            hf_rows=weight.hf_rows,
            is_adapter=True,
        )
        self.magnitude = declare_param(magnitude) if lora.is_dora else None
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

    def __init__(
        self,
        dim: int,
        *,
        hf_name: str,
        config: ModelConfig,
        kind: str | None = None,
        eps: float | None = None,
    ):
        """Args: kind, eps: those of the model's other norms if None."""
        self.kind = kind or config.norm
        self.eps = config.norm_eps if eps is None else eps
        mean = 0.0 if self.kind == "rms_plus_one" else 1.0
        self.weight = declare_param(Parameter(shape=(dim,), hf_name=f"{hf_name}.weight", mean=mean))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        if self.kind == "layer":
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = divide_by_rms(x32, self.eps)
        weight = jnp.broadcast_to(self.weight[...].astype(jnp.float32), x32.shape)
        if self.kind == "rms_plus_one":
            weight = 1 + weight
        return (x32 * weight).astype(x.dtype)


class NormWithoutWeight(nnx.Module):
    """x / rms(x) over the last dim, in float32."""

    def __init__(self, config: ModelConfig):
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return divide_by_rms(x.astype(jnp.float32), self.eps).astype(x.dtype)


def divide_by_rms(x32: Float32[Array, "... D"], eps: float) -> Float32[Array, "... D"]:
    """x / rms(x) over the last dim."""
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def declare_norm(
    dim: int, hf_name: str | None, config: ModelConfig, *, eps: float | None = None
) -> Norm | None:
    """Args: eps: as in `Norm`."""
    return None if hf_name is None else Norm(dim, hf_name=hf_name, config=config, eps=eps)


def apply_norm(norm: Norm | NormWithoutWeight | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def declare_fused(linear: functools.partial, rows: list[int], *, hf_name: str) -> list[Linear]:
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


def scale(x: Array, factor: float) -> Array:
    """x times a factor rounded to the dtype of x, as in torch; x itself if the factor is 1."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
