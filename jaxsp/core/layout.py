"""The order of a row's tokens before it is cut into equal contiguous shares.

Causal attention has most to do for a row's last tokens. Where devices keep their queries and wait for each other, a row is cut
into 2 P chunks, and each of P devices holds one from the front and that from the back which mirrors it. With P = 4:

    chunk     0  7 | 1  6 | 2  5 | 3  4
    device      0  |   1  |   2  |   3

P is the layout's degree. With P = 1 a device holds the two halves in their order: the row as it is.
"""

import numpy as np


def chunk_order(degree: int) -> tuple[int, ...]:
    """The chunks of a row in the order in which they are laid out."""
    return tuple(chunk for device in range(degree) for chunk in (device, 2 * degree - 1 - device))


def spans(begin: int, end: int, *, row_tokens: int, degree: int) -> list[tuple[int, int]]:
    """Begin and end of the row's tokens that lie from place `begin` to `end`, in the order in which they lie there.

    Example: of 16 tokens with degree 4, places 1 to 6 hold tokens 1 to 2, 14 to 16 and 2 to 4.
    """
    if degree == 1:
        return [(begin, end)] if begin < end else []
    assert row_tokens % (2 * degree) == 0, (row_tokens, degree)
    size, order, found = row_tokens // (2 * degree), chunk_order(degree), list[tuple[int, int]]()
    while begin < end:
        place, inside = divmod(begin, size)
        length = min(end, (place + 1) * size) - begin
        first = order[place] * size + inside
        if found and found[-1][1] == first:  # the last device's two chunks are neighbours
            found[-1] = (found[-1][0], first + length)
        else:
            found.append((first, first + length))
        begin += length
    return found


def token_order(row_tokens: int, degree: int) -> np.ndarray:
    """The token of each place. Shapes: [row_tokens]."""
    return np.concatenate(
        [np.arange(*span) for span in spans(0, row_tokens, row_tokens=row_tokens, degree=degree)]
    )


def place_of_token(row_tokens: int, degree: int) -> np.ndarray:
    """The place of each token. Shapes: [row_tokens]."""
    return np.argsort(token_order(row_tokens, degree))
