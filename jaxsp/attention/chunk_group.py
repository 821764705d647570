"""Devices that hold the chunks of the same rows, and their places along `seq`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxsp.attention.token_exchange import TokenExchange
from jaxsp.core import axes
from jaxsp.core.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGroup(TokenExchange):
    """A group of devices that each hold several chunks of a row: see core/layout.py."""

    chunks_per_device: int = 2
    """Number of chunks of a row that a device holds: a power of 2, at least 2."""

    @property
    def index(self) -> Array:
        """Position of this device in its group."""
        if self.degree == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(axes.SEQ) // self.stride

    @property
    def layout(self) -> Layout:
        return Layout(degree=self.degree, chunks_per_device=self.chunks_per_device)

    def chunk_numbers(self, device: Array) -> Int32[Array, "k"]:
        """Numbers of the chunks of a device."""
        index_k = jnp.arange(self.chunks_per_device, dtype=jnp.int32)
        return index_k * self.degree + jnp.where(index_k % 2, self.degree - 1 - device, device)
