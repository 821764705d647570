"""Order of a row's tokens before the row is cut into equal contiguous shards.

Causal attention has most work for a row's last tokens. Where devices keep their queries and wait
for each other, a row is cut into 2 P chunks. Each of P devices holds one chunk from the front and
its mirror image from the back. With P = 4:

    chunk     0  7 | 1  6 | 2  5 | 3  4
    device      0  |   1  |   2  |   3

P is the degree of the layout. With P = 1, the row keeps its order.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


def chunk_order(degree: int) -> tuple[int, ...]:
    """Returns the chunks of a row in the order of the layout."""
    last = 2 * degree - 1
    return tuple(chunk for device in range(degree) for chunk in (device, last - device))


def spans(begin: int, end: int, *, row_tokens: int, degree: int) -> list[tuple[int, int]]:
    """Returns the begin and end of the token ranges in places `begin` to `end` of the layout.

    Example: with 16 tokens and degree 4, places 1 to 6 hold tokens 1 to 2, 14 to 16 and 2 to 4.
    """
    if degree == 1:
        return [(begin, end)] if begin < end else []
    assert row_tokens % (2 * degree) == 0, (row_tokens, degree)
    chunk_tokens = row_tokens // (2 * degree)
    order = chunk_order(degree)
    ranges: list[tuple[int, int]] = []
    while begin < end:
        place, offset = divmod(begin, chunk_tokens)
        length = min(end, (place + 1) * chunk_tokens) - begin
        first = order[place] * chunk_tokens + offset
        if ranges and ranges[-1][1] == first:  # the last device's two chunks are adjacent
            ranges[-1] = (ranges[-1][0], first + length)
        else:
            ranges.append((first, first + length))
        begin += length
    return ranges


def tokens_in_places(
    places: Int32[Array, "l"], *, row_tokens: int, degree: int
) -> Int32[Array, "l"]:
    """Returns the tokens in some places of the layout, inside jit."""
    if degree == 1:
        return places
    chunk_tokens = row_tokens // (2 * degree)
    chunks = jnp.asarray(chunk_order(degree), jnp.int32)[places // chunk_tokens]
    return chunks * chunk_tokens + places % chunk_tokens


def token_order(row_tokens: int, degree: int) -> np.ndarray:
    """Returns the token in each place. Shapes: [row_tokens]."""
    ranges = spans(0, row_tokens, row_tokens=row_tokens, degree=degree)
    return np.concatenate([np.arange(begin, end) for begin, end in ranges])


def place_of_token(row_tokens: int, degree: int) -> np.ndarray:
    """Returns the place of each token. Shapes: [row_tokens]."""
    return np.argsort(token_order(row_tokens, degree))
