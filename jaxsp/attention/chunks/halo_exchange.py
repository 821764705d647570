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
        received = _send(group, [x[:, :, -tokens:] for x in received])
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
        returned = _send(group, sums, is_back=True)
        begin += tokens
    return returned


def _send(group: ChunkGroup, chunks: Sequence[Array], *, is_back: bool = False) -> list[Array]:
    """Sends arrays of all chunks to the next chunk of the row, or back to the previous one, and
    returns those received. The chunk at the row's end, to which none is sent, gets 0."""
    zeros = jnp.zeros_like(chunks[0])
    here = [*chunks[1:], zeros] if is_back else [zeros, *chunks[:-1]]
    if group.degree == 1:
        return here
    up = [pair for devices in group.groups for pair in itertools.pairwise(devices)]
    down = [(target, source) for source, target in up]
    pairs = [down, up] if is_back else [up, down]
    ends = [group.degree - 1, 0] if is_back else [0, group.degree - 1]
    # Even chunks are dealt up, and odd ones down: an end device holds two neighbors itself
    received = [jax.lax.ppermute(jnp.stack(chunks[i::2]), axes.SEQ, pairs[i]) for i in (0, 1)]
    first, last = (
        jnp.where(group.index == ends[i], jnp.stack(here[i::2]), received[i]) for i in (0, 1)
    )
    return [x for pair in zip(first, last, strict=True) for x in pair]


def add_to_last(x: Array, term: Array, *, axis: int = 1) -> Array:
    """Adds an array, which may be shorter along `axis`, to the last tokens of a float32 array."""
    begin = x.shape[axis] - term.shape[axis]
    kept, changed = jnp.split(x, [begin], axis)
    return jnp.concatenate([kept, changed + term.astype(x.dtype)], axis)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
