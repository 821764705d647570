"""Groups of devices along `seq`, and groups that hold the chunks of the same rows."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxsp.core import axes
from jaxsp.core.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices that hold different tokens of the same rows, for the same heads."""

    degree: int
    """Number of devices in a group."""
    stride: int = 1
    """Distance along `seq` between two devices of a group. The neighbors between them hold the same
    tokens for other heads."""

    @property
    def groups(self) -> list[list[int]]:
        """All groups, as positions along the mesh's `seq`."""
        size = self.degree * self.stride
        return [list(range(first, size, self.stride)) for first in range(self.stride)]

    @property
    def index(self) -> Array:
        """Position of this device in its group."""
        if self.degree == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(axes.SEQ) // self.stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGroup(DeviceGroup):
    """A group of devices that each hold several chunks of a row: see core/layout.py."""

    chunks_per_device: int = 2
    """Number of chunks of a row that a device holds: a power of 2, at least 2."""

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens."""
        return Layout(degree=self.degree, chunks_per_device=self.chunks_per_device)

    def chunk_numbers(self, device: Array) -> Int32[Array, "k"]:
        """Numbers of the chunks of a device."""
        index_k = jnp.arange(self.chunks_per_device, dtype=jnp.int32)
        return index_k * self.degree + jnp.where(index_k % 2, self.degree - 1 - device, device)
