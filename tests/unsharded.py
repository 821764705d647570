"""A `layers.Gather` for unsharded weights on one device, without collectives."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class UnshardedGather:
    """Casts weights to a dtype; gradients are float32."""

    dtype: str = "float32"

    def __call__(self, params, weights):
        return jax.tree.map(self.all_gather, params, weights)

    def all_gather(self, param, weight):
        return weight.astype(self.dtype)

    def reduce_scatter(self, param, gradient):
        return gradient.astype(jnp.float32)

    def has_gradient(self, weight):
        return True

    def split_holders(self, weights):
        return weights, jax.tree.map(lambda weight: (), weights)

    def merge_holders(self, holders, values):
        return holders
