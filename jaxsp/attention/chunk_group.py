"""Devices that hold the chunks of the same rows, and their places along `seq`."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.core import axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGroup:
    """A group of devices with rows in zigzag (core/layout.py): each holds two chunks of a row."""

    seq: int
    """Number of devices in a group: they hold different chunks of the same rows, for the same
    heads."""
    stride: int = 1
    """Distance along `seq` between two devices of a group. In a hybrid, the neighbors between them
    hold the same chunks for other heads."""

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

    def chunk_numbers(self, device: Array) -> tuple[Array, Array]:
        """Numbers of the two chunks of a device."""
        return device, 2 * self.seq - 1 - device
