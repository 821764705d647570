"""Formats of frozen weights: dtypes, and quantized matrices of 8 or 4 bits.

Matrices are quantized when they are loaded, row by row, so that the numbers do not depend on the
mesh. Shards are gathered as they are stored, and each layer is dequantized on every device.

To add a format, write a class like `Int8` and add a line to `QUANTIZED`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.blocks.layers import Parameter
from jaxsp.core.units import MIB


class Int8:
    """8-bit integers with one scale per row: the largest magnitude of the row is 127."""

    codes_dtype: type = np.int8

    def count_codes(self, dim_in: int) -> int:
        """Number of stored integers of a row."""
        return dim_in

    def count_scales(self, dim_in: int) -> int:
        """Number of scales of a row."""
        return 1

    def quantize(self, xp: Any, rows: Any) -> tuple[Any, Any]:
        """Codes and float32 scales of rows [..., i]. Args: xp: numpy or jax.numpy."""
        largest = xp.max(xp.abs(rows), axis=-1, keepdims=True)
        scales = xp.where(largest > 0, largest, 1).astype(np.float32) / np.float32(127)
        return xp.round(rows / scales).astype(np.int8), scales

    def dequantize(self, codes: Any, scales: Any, dim_in: int) -> Any:
        """Rows [..., dim_in], float32."""
        return codes.astype(jnp.float32) * scales


class NormalFloat4:
    """4-bit codes of values that are equally likely for normally distributed weights, with one
    scale for each block of 64: 4.5 bits per weight.

    Source: Dettmers et al. 2023 (QLoRA), section 3 and appendix E, without double quantization.
    """

    codes_dtype: type = np.uint8
    block = 64
    values = np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    )
    """Values of the codes, times the scale."""

    def count_codes(self, dim_in: int) -> int:
        return self.count_scales(dim_in) * self.block // 2

    def count_scales(self, dim_in: int) -> int:
        return -(-dim_in // self.block)

    def quantize(self, xp: Any, rows: Any) -> tuple[Any, Any]:
        *lead, dim_in = rows.shape
        widths = [(0, 0)] * len(lead) + [(0, -dim_in % self.block)]
        blocks = xp.pad(rows, widths).reshape(*lead, -1, self.block)
        scales = xp.max(xp.abs(blocks), axis=-1).astype(np.float32)
        divisors = xp.where(scales > 0, scales, 1)
        relative = blocks / divisors[..., None]
        # In numpy, faster than searchsorted
        nearest = xp.zeros(blocks.shape, np.uint8)
        for middle in (self.values[1:] + self.values[:-1]) / 2:
            nearest = nearest + (relative > middle).astype(np.uint8)
        pairs = nearest.reshape(*lead, -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4), scales

    def dequantize(self, codes: Any, scales: Any, dim_in: int) -> Any:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
        values = jnp.asarray(self.values)[pairs]
        blocks = values.reshape(*codes.shape[:-1], -1, self.block) * scales[..., None]
        return blocks.reshape(*codes.shape[:-1], -1)[..., :dim_in]


QUANTIZED: dict[str, Int8 | NormalFloat4] = {"int8": Int8(), "nf4": NormalFloat4()}
"""Quantized formats by name, which is a value of `AdapterConfig.quantization`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A matrix, all of its layers, or shards of them: [..., out, in] in a quantized format."""

    codes: Any
    """Integers [..., out, number of codes]."""
    scales: Any
    """Float32 [..., out, number of scales]."""
    name: str = dataclasses.field(metadata={"static": True})
    """Name of the format."""


def is_quantized(param: Parameter) -> bool:
    """True if the weight is a `QuantizedMatrix` between steps."""
    return param.frozen_as in QUANTIZED


def can_quantize(param: Parameter) -> bool:
    """True for the matrices of layers, also of experts; not for embeddings, and not for routers,
    which have a dtype of their own: rounding would change the choice of experts."""
    is_own = param.is_matrix and not param.is_adapter and not param.is_lookup
    return param.num_layers is not None and is_own and param.compute_dtype is None


def encode(param: Parameter, weight: Any, xp: Any = np) -> Any:
    """A weight, or rows of it, as it is stored. Args: weight: float32. xp: numpy or jax.numpy."""
    name = str(param.frozen_as or "float32")
    if name not in QUANTIZED:
        return weight.astype(jnp.dtype(name))
    if xp is not np:
        codes, scales = QUANTIZED[name].quantize(xp, weight)
        return QuantizedMatrix(codes=codes, scales=scales, name=name)
    # a MiB of rows at a time, which stay in a processor's cache
    rows = weight.reshape(-1, weight.shape[-1])
    blocks = np.array_split(rows, max(1, rows.nbytes // MIB))
    parts = zip(*(QUANTIZED[name].quantize(np, block) for block in blocks), strict=True)
    codes, scales = (np.concatenate(part).reshape(*weight.shape[:-1], -1) for part in parts)
    return QuantizedMatrix(codes=codes, scales=scales, name=name)


def decode(param: Parameter, stored: Any, dtype: jnp.dtype) -> Any:
    """Inverse of `encode`, in another dtype; of a quantized matrix, an approximation, in JAX."""
    if isinstance(stored, QuantizedMatrix):
        quantized = QUANTIZED[stored.name]
        stored = quantized.dequantize(stored.codes, stored.scales, param.shape[-1])
    return stored.astype(dtype)


def describe(param: Parameter, shape: tuple[int, ...]) -> Any:
    """Shapes and dtypes of a stored weight. Args: shape: [..., *param.shape], or with padding."""
    name = str(param.frozen_as or "float32")
    if name not in QUANTIZED:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(name))
    quantized = QUANTIZED[name]
    *lead, dim_in = shape
    return QuantizedMatrix(
        codes=jax.ShapeDtypeStruct((*lead, quantized.count_codes(dim_in)), quantized.codes_dtype),
        scales=jax.ShapeDtypeStruct((*lead, quantized.count_scales(dim_in)), jnp.float32),
        name=name,
    )


def stored_bytes(param: Parameter, shape: tuple[int, ...]) -> int:
    """Bytes of a stored weight of a shape."""
    leaves = jax.tree.leaves(describe(param, shape))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
