"""Devices that hold the chunks of the same rows, and their places along `seq`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxsp.core import axes
from jaxsp.core.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGroup:
    """A group of devices that each hold several chunks of a row: see core/layout.py."""

    seq: int
    """Number of devices in a group: they hold different chunks of the same rows, for the same
    heads."""
    stride: int = 1
    """Distance along `seq` between two devices of a group. In a hybrid, the neighbors between them
    hold the same chunks for other heads."""
    chunks_per_device: int = 2
    """Number of chunks of a row that a device holds: a power of 2, at least 2."""

    @property
    def index(self) -> Array:
        """Position of this device in its group."""
        if self.seq == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(axes.SEQ) // self.stride

    @property
    def axis_index_groups(self) -> list[list[int]]:
        """All groups, as positions along the mesh's `seq`."""
        size = self.seq * self.stride
        return [list(range(first, size, self.stride)) for first in range(self.stride)]

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens."""
        return Layout(degree=self.seq, chunks_per_device=self.chunks_per_device)

    def chunk_numbers(self, device: Array) -> Int32[Array, "k"]:
        """Numbers of the chunks of a device."""
        index_k = jnp.arange(self.chunks_per_device, dtype=jnp.int32)
        return index_k * self.seq + jnp.where(index_k % 2, self.seq - 1 - device, device)
