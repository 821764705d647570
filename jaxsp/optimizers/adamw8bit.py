"""AdamW whose moments have 8 bits: blocks of 256 numbers with a float32 scale.

A number is stored as the nearest entry of a table, times the largest magnitude of its block. The
table is dynamic quantization: seven decades, of which a higher one has twice as many entries.
Blocks are parts of a row of the whole matrix, so that they do not depend on the mesh.

Source: Dettmers et al. 2022, arXiv:2110.02861, section 2. Differences: a positive second moment
never becomes 0, because the update would divide by eps; the table of signed numbers is symmetric,
without a second name for the largest magnitude.

Loses: in the decade below a block's largest magnitude, numbers of the first moment differ by up to
7 % and of the second by up to 3.5 %, and by twice as much in each lower decade. Rounding also turns
differences of gradients between meshes, of 1e-7, into a step of the table for a few numbers.
configs/guide/optimizers.md has measured losses.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32

BLOCK_SIZE = 256
_NUM_DECADES = 7


def make_table(num_entries: int) -> np.ndarray:
    """Magnitudes in ascending order: 0, then the middles of equal parts of each decade, and 1.
    Args: num_entries: 128 for signed numbers, 256 for positive ones."""
    per_decade = [num_entries * 2**decade // 2**_NUM_DECADES for decade in range(_NUM_DECADES)]
    middles = [
        10.0 ** (decade + 1 - _NUM_DECADES) * (0.1 + 0.9 * (np.arange(count) + 0.5) / count)
        for decade, count in enumerate(per_decade)
    ]
    table = np.concatenate([[0.0], *middles])[: num_entries - 1]
    return np.append(table, 1.0).astype(np.float32)


_SIGNED = make_table(128)
_POSITIVE = make_table(256)


class Quantized(NamedTuple):
    """A moment of a matrix in 8 bits."""

    codes: Any
    """int8 with the number's sign, or uint8: indices of the table. Code 0 is the number 0."""
    scales: Any
    """Largest magnitude of each block, float32 [rows, blocks]."""


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam (optax.scale_by_adam) of one matrix, with moments in 8 bits between updates."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def init(matrix: Any) -> optax.ScaleByAdamState:
        rows, columns = matrix.shape
        scales = jnp.zeros((rows, -(-columns // BLOCK_SIZE)), jnp.float32)
        return optax.ScaleByAdamState(
            count=jnp.int32(0),
            mu=Quantized(codes=jnp.zeros(matrix.shape, jnp.int8), scales=scales),
            nu=Quantized(codes=jnp.zeros(matrix.shape, jnp.uint8), scales=scales),
        )

    def update(gradient: Any, state: Any, matrix: Any = None) -> tuple[Any, Any]:
        whole = state._replace(mu=dequantize(state.mu), nu=dequantize(state.nu))
        direction, new = adam.update(gradient, whole)
        mu = quantize(new.mu, is_signed=True)
        return direction, new._replace(mu=mu, nu=quantize(new.nu, is_signed=False))

    return optax.GradientTransformation(init, update)


def dequantize(moment: Quantized) -> Float32[Array, "o i"]:
    """The moment in float32."""
    codes = moment.codes.astype(jnp.int32)
    is_signed = moment.codes.dtype == jnp.int8
    table = jnp.asarray(_SIGNED if is_signed else _POSITIVE)
    numbers = table[jnp.abs(codes)]
    if is_signed:
        numbers = jnp.where(codes < 0, -numbers, numbers)
    return numbers * _spread(moment.scales, codes.shape[1])


def quantize(numbers: Float[Array, "o i"], *, is_signed: bool) -> Quantized:
    magnitudes = jnp.abs(numbers)
    rows, columns = numbers.shape
    padded = jnp.pad(magnitudes, [(0, 0), (0, -columns % BLOCK_SIZE)])
    scales = padded.reshape(rows, -1, BLOCK_SIZE).max(-1)
    spread = _spread(scales, columns)
    table = _SIGNED if is_signed else _POSITIVE
    boundaries = jnp.asarray((table[1:] + table[:-1]) / 2)
    relative = magnitudes / jnp.where(spread > 0, spread, 1.0)
    codes = jnp.searchsorted(boundaries, relative, side="left").astype(jnp.int32)
    if is_signed:
        codes = jnp.where(numbers < 0, -codes, codes).astype(jnp.int8)
    else:
        codes = jnp.where(numbers > 0, jnp.maximum(codes, 1), codes).astype(jnp.uint8)
    return Quantized(codes=codes, scales=scales)


def _spread(scales: Float32[Array, "o b"], columns: int) -> Float32[Array, "o i"]:
    """The scale of each number."""
    return jnp.repeat(scales, BLOCK_SIZE, axis=1)[:, :columns]
