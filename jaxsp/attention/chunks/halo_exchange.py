"""Exchange of halos between devices that hold several chunks of rows each: see halo.py."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.chunks.chunk_group import ChunkGroup
from jaxsp.core import axes

_ROW_MULTIPLES = (2048, 512)
"""Preferred divisors of a row. cuDNN divides rows of several segments by 4 and by 16, into bins of
a multiple of 128 tokens: see `cudnn_bins.plan_calls`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halo:
    """Sizes of the halos and of the rows that a kernel computes."""

    window: int
    """Number of tokens that a token sees, including itself."""
    chunk_tokens: int
    num_chunks: int
    """Number of chunks of a row."""

    @property
    def num_tokens(self) -> int:
        """Tokens before a chunk that its queries may see; the last chunk has most before it."""
        return min(self.window - 1, (self.num_chunks - 1) * self.chunk_tokens)

    @property
    def hop_tokens(self) -> list[int]:
        """Tokens that a chunk sends in each hop."""
        whole_chunks, rest = divmod(self.num_tokens, max(self.chunk_tokens, 1))
        tokens = [self.chunk_tokens] * whole_chunks
        return [*tokens, rest] if rest else tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of a halo and its chunk, and padding.

        Padded to a multiple of 2,048 or 512 if the chunk is one, and if the padding is at most an
        eighth of the tokens.
        """
        tokens = self.num_tokens + self.chunk_tokens
        for preferred in _ROW_MULTIPLES:
            padded = _round_up(tokens, preferred)
            if self.chunk_tokens % preferred == 0 and 8 * (padded - tokens) <= tokens:
                return padded
        return _round_up(tokens, math.gcd(self.chunk_tokens, 128))


def receive_halos(group: ChunkGroup, halo: Halo, chunks: Sequence[Array]) -> list[Array]:
    """k and v of the tokens before each chunk.

    Shapes: one array for each of this device's chunks, [2, B, C, G, K] to [2, B, num_tokens, G, K]:
        k and v, B rows, C tokens of a chunk, G K/V heads, head_dim K.
    """
    received = list(chunks)
    # Parts of 0 tokens: with a window of 1 token, a halo has no others
    parts = [[x[:, :, :0] for x in received]]
    for tokens in halo.hop_tokens:
        received = _send_to_next(group, [x[:, :, -tokens:] for x in received])
        parts.append(received)
    return [jnp.concatenate(x[::-1], axis=2) for x in zip(*parts, strict=True)]


def return_halos(
    group: ChunkGroup, halo: Halo, dkv: Sequence[Array], dtype: jnp.dtype
) -> list[Array]:
    """Sends the gradients of halos back to the devices that hold their tokens, and sums them there.

    The hops are those of `receive_halos` in reverse. The first hop to run uses `dtype`, because its
    gradients are not sums yet, and so does the last one; the hops between them use float32.
    Shapes: one array for each chunk, [2, B, num_tokens, G, K] to [2, B, tokens of the first hop, G,
        K], as in `receive_halos`.
    """
    returned = [x[:, :, :0] for x in dkv]
    begin = 0
    for hop, tokens in reversed(list(enumerate(halo.hop_tokens))):
        sums = [
            add_to_last(x[:, :, begin : begin + tokens], y, axis=2)
            for x, y in zip(dkv, returned, strict=True)
        ]
        if hop in (0, len(halo.hop_tokens) - 1):
            sums = [x.astype(dtype) for x in sums]
        returned = _send_to_previous(group, sums)
        begin += tokens
    return returned


def _send_to_next(group: ChunkGroup, chunks: Sequence[Array]) -> list[Array]:
    """Sends arrays of all chunks to the next chunk, and returns those of the previous chunks.

    The row's first chunk receives 0.
    """
    previous = [jnp.zeros_like(chunks[0]), *chunks[:-1]]
    if group.degree == 1:
        return previous
    up, down = _find_pairs(group)
    from_before = jax.lax.ppermute(jnp.stack(chunks[0::2]), axes.SEQ, up)
    from_after = jax.lax.ppermute(jnp.stack(chunks[1::2]), axes.SEQ, down)
    return _alternate(
        jnp.where(group.index == 0, jnp.stack(previous[0::2]), from_before),
        jnp.where(group.index == group.degree - 1, jnp.stack(previous[1::2]), from_after),
    )


def _send_to_previous(group: ChunkGroup, chunks: Sequence[Array]) -> list[Array]:
    """Sends arrays of all chunks to the previous chunk, and returns those of the next chunks.

    Those of the row's first chunk are dropped. The row's last chunk receives 0.
    """
    following = [*chunks[1:], jnp.zeros_like(chunks[0])]
    if group.degree == 1:
        return following
    up, down = _find_pairs(group)
    from_after = jax.lax.ppermute(jnp.stack(chunks[0::2]), axes.SEQ, down)
    from_before = jax.lax.ppermute(jnp.stack(chunks[1::2]), axes.SEQ, up)
    return _alternate(
        jnp.where(group.index == group.degree - 1, jnp.stack(following[0::2]), from_after),
        jnp.where(group.index == 0, jnp.stack(following[1::2]), from_before),
    )


def _alternate(first: Array, last: Array) -> list[Array]:
    """Arrays of chunks in order, from those of first and of last chunks."""
    return [x for pair in zip(first, last, strict=True) for x in pair]


def _find_pairs(group: ChunkGroup) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of neighbors: from each device to the one after it, and the other way."""
    up = [pair for devices in group.groups for pair in itertools.pairwise(devices)]
    return up, [(target, source) for source, target in up]


def add_to_last(x: Array, term: Array, *, axis: int = 1) -> Array:
    """Adds an array, which may be shorter along `axis`, to the last tokens of a float32 array."""
    begin = x.shape[axis] - term.shape[axis]
    kept, changed = jnp.split(x, [begin], axis)
    return jnp.concatenate([kept, changed + term.astype(x.dtype)], axis)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
