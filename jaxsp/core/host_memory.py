"""Copies between device and host memory, inside jit.

The memory of an array is part of its type: `jax.typeof(x).memory_space`.
"""

from typing import Any

import jax
from jaxtyping import Array

MEMORY_KIND = "pinned_host"  # memory kind of a sharding whose arrays are in host memory


def is_on_host(x: Array) -> bool:
    """True if an array is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """Copies arrays to the device, unless they are there."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def to_host(tree: Any) -> Any:
    """Copies arrays to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)
