"""Which piece of its row a token belongs to: what every kernel isolates documents by."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def piece_of_token(starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int) -> Int32[Array, "B L"]:
    """Number of each token's piece within its row, -1 for padding.

    Example: starts [0, 3, 0], lengths [3, 4, 0] and 8 tokens give [0, 0, 0, 1, 1, 1, 1, -1].
    """
    positions_L = jnp.arange(num_tokens, dtype=jnp.int32)
    starts_BM = jnp.where(lengths_BM > 0, starts_BM, num_tokens)  # unused slots are (0, 0): move them past the row

    def row(starts_M: Int32[Array, "M"], lengths_M: Int32[Array, "M"]) -> Int32[Array, "L"]:
        piece_L = jnp.searchsorted(starts_M, positions_L, side="right").astype(jnp.int32) - 1
        inside_L = (piece_L >= 0) & (positions_L < (starts_M + lengths_M)[piece_L])
        return jnp.where(inside_L, piece_L, -1)

    return jax.vmap(row)(starts_BM, lengths_BM)


def in_a_piece(starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], num_tokens: int) -> Bool[Array, "B L"]:
    """Whether each token belongs to a piece, that is, is no padding."""
    return piece_of_token(starts_BM, lengths_BM, num_tokens) >= 0
