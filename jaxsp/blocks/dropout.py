"""Dropout whose mask depends on the step, the row and the token, and not on the mesh."""

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

Keys = UInt32[Array, "B l two"]
"""Data of one random key for each token, as of `jax.random.key_data`."""


def make_token_keys(
    *,
    seed: int,
    step: Int32[Array, ""],
    rows_B: Int32[Array, "B"],
    tokens_l: Int32[Array, "l"],
) -> Keys:
    """Keys of tokens in a step. Args: rows_B: rows' indices in the step. tokens_l: in the row."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(step_key, rows_B)
    return jax.random.key_data(fold(row_keys_B, tokens_l))


def fold_layer(keys: Keys | None, layer: Int32[Array, ""] | None) -> Keys | None:
    """Keys of the tokens in a layer; None without dropout."""
    if keys is None or layer is None:
        return None
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
    return jax.random.key_data(fold(jax.random.wrap_key_data(keys), layer))


def drop(x: Float[Array, "B l i"], keys: Keys, *, name: str, rate: float) -> Float[Array, "B l i"]:
    """x with a fraction `rate` of its elements set to 0, and the others divided by 1 - rate.

    Args: name: what is dropped; different names have different masks.
    """
    salt = zlib.crc32(name.encode())

    def draw(key_data: UInt32[Array, "two"]) -> UInt32[Array, "i"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), salt)
        return jax.random.bits(key, x.shape[-1:], jnp.uint32)

    bits = jax.vmap(jax.vmap(draw))(keys)
    is_kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(is_kept, x / jnp.asarray(1 - rate, x.dtype), 0)
