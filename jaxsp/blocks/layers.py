"""Modules in Flax NNX that all layers are made of. Each weight is declared once.

Dims: B rows, l this device's tokens of a row, D model, H query heads, G K/V heads, K head size,
F feed-forward, V vocabulary. Matrices are [out, in] as in Hugging Face's files, so that import and
export copy bytes.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from jaxsp.blocks.config import ModelConfig

Weights = dict[str, Any]
"""Nested dict of arrays, with the structure that the modules declare."""


PRODUCT_NAME = "product"
"""Name, for rematerialization, of the results of linear layers."""


class RowGroups(NamedTuple):
    """Rows that a parameter has in a tensor: those from `first` on of every group of rows.

    Example: of the rows of two tensors that alternate, the second has RowGroups(1, 1, 2).
    """

    first: int
    """Number of the parameter's first row in a group."""
    num_rows: int
    """Rows of the parameter in a group."""
    group_rows: int
    """All rows of a group."""

    def find(self, row: Any) -> Any:
        """Returns the index in the file's tensor of a row of the parameter, or of several."""
        return row // self.num_rows * self.group_rows + self.first + row % self.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Entry of the parameter table, which init, sharding, optimizer, import and export all use."""

    shape: tuple[int, ...]
    """Shape of one layer's tensor, in Hugging Face's layout."""
    hf_name: str
    """The tensor's name in a safetensors file; `{layer}` stands for the layer's number, and
    `{expert}` for that of an expert with a tensor of its own."""
    hf_rows: RowGroups | None = None
    """Rows of that tensor; None: this parameter is the whole tensor."""
    is_transposed: bool = False
    """True if files have rows as columns."""
    num_experts: int | None = None
    """Number of experts, the first dim of `shape`; None: there are none."""
    expert_layout: Literal["rows", "columns"] | None = None
    """Dim of a file's matrix that has all experts' rows, one expert after another, or all experts'
    columns, those of all experts beside each other; None: experts have a dim of their own."""
    adapted_tensor: str | None = None
    """Tensor of a layer in transformers' modules that has the matrices of all experts, and that
    PEFT adapts as a whole. Example: `mlp.experts.gate_up_proj`."""
    adapted_rows: RowGroups | None = None
    """Rows of an expert's matrix in that tensor; None: all of them."""
    joined_layers: tuple[Literal["rows", "columns"], int] | None = None
    """Dim of a file's tensor in which those of all layers are one after another, and the number of
    these layers; None: each layer has a tensor."""
    is_lookup: bool = False
    """True for a table of a layer, of which each token reads a row."""
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
    file_dtype: str | None = None
    """dtype in exported files; None: that of the export."""
    is_projection: bool = False
    """True for a matrix that may have an adapter beside it."""
    is_float8: bool = False
    """True for a matrix that is gathered as codes of 8-bit floats: see `blocks.float8`."""
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
        """True for weights of two dims, such as projections and embeddings, except filters.

        Weight decay applies to matrices only.
        """
        return len(self.matrix_shape) > 1 and not self.is_filter

    @property
    def size(self) -> int:
        """Number of elements of one layer's tensor, with all experts."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of one layer's tensor, or of one expert's."""
        return self.shape if self.num_experts is None else self.shape[1:]

    @property
    def has_tensor_per_expert(self) -> bool:
        """True if each expert has a tensor in the files."""
        return "{expert}" in self.hf_name

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a safetensors file."""
        if self.joined_layers is not None:
            dim, count = self.joined_layers
            rows, columns = self.shape
            return (rows * count, columns) if dim == "rows" else (rows, columns * count)
        rows, *others = self.matrix_shape
        if self.hf_rows is not None:
            rows = rows // self.hf_rows.num_rows * self.hf_rows.group_rows
        if self.expert_layout is not None:
            (columns,) = others
            num_experts = self.num_experts or 1
            if self.expert_layout == "rows":
                return (num_experts * rows, columns)
            return (rows, num_experts * columns)
        matrix = (*others, rows) if self.is_transposed else (rows, *others)
        if self.num_experts is None or self.has_tensor_per_expert:
            return matrix
        return (self.num_experts, *matrix)

    def find_block(self, index: tuple[slice, ...], layer: int | None) -> tuple[slice, ...]:
        """Index into a file's tensor, from one into the matrix of a layer."""
        if self.joined_layers is None:
            return index
        assert layer is not None, "the parameter is one of layers"
        axis = ("rows", "columns").index(self.joined_layers[0])
        size = self.shape[axis]
        start, stop, _ = index[axis].indices(size)
        block = slice(layer * size + start, layer * size + stop)
        return (*index[:axis], block, *index[axis + 1 :])

    def view_matrices(self, tensor: np.ndarray) -> np.ndarray:
        """View of a file's tensor as matrices, [rows, columns] or [experts, rows, columns].

        They have all rows of the tensor, of which `hf_rows` are the parameter's.
        """
        num_experts = self.num_experts or 1
        if self.expert_layout == "rows":
            return tensor.reshape(num_experts, -1, tensor.shape[-1])
        if self.expert_layout == "columns":
            return tensor.reshape(len(tensor), -1, num_experts).transpose(2, 0, 1)
        return tensor.swapaxes(-1, -2) if self.is_transposed else tensor

    def tensor_name(self, layer: int | None, expert: int | None = None) -> str:
        """Name of a tensor in a safetensors file. Args: layer: None for one outside the layers."""
        return self.hf_name.format(layer=layer, expert=expert)

    def list_tensors(self, layer: int | None) -> list[tuple[int | None, str]]:
        """Experts and names of a layer's tensors; None: the tensor has all that there is."""
        experts = range(self.num_experts or 0) if self.has_tensor_per_expert else (None,)
        return [(expert, self.tensor_name(layer, expert)) for expert in experts]

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
        """Whole weights of a tree, or of one parameter; differentiable.

        Those that are trained are float32 arrays of values of the compute dtype, so that their
        gradients are float32: cast them where they are used. XLA removes both conversions.
        Those that are `Parameter.is_float8` may be codes: `float8.ScaledMatrix`.
        """

    def all_gather(self, param: Parameter, shard: Any) -> Any:
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
    """Norm of a name in the files; None without a name: there is no such norm. Args: eps: as in
    `Norm`."""
    return None if hf_name is None else Norm(dim, hf_name=hf_name, config=config, eps=eps)


def apply_norm(norm: Norm | NormWithoutWeight | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def activate(gate: Array, activation: str) -> Array:
    """Args: activation: see `ModelConfig.activation`."""
    if activation == "silu":
        return jax.nn.silu(gate)
    return jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype)


def scale(x: Array, factor: float) -> Array:
    """x times a factor rounded to the dtype of x, as in torch; x itself if the factor is 1."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
