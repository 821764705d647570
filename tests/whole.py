"""Weights that one device holds whole: a layers.Gather without shards or collectives."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Whole:
    """Casts weights; their gradients are float32."""

    dtype: str = "float32"

    def __call__(self, rows, weights):
        return jax.tree.map(self.join, rows, weights)

    def join(self, row, weight):
        return weight.astype(self.dtype)

    def split(self, row, gradient):
        return gradient.astype(jnp.float32)
