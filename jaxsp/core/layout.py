"""Order of a row's tokens before the row is cut into equal contiguous shards.

Causal attention has most work for a row's last tokens. Where devices keep their queries and wait
for each other, a row is cut into chunks, which are dealt to the devices back and forth. With 4
devices and 2 or 4 chunks for each:

    device      0             1             2             3
    2 chunks    0 7           1 6           2 5           3 4
    4 chunks    0 7 8 15      1 6 9 14      2 5 10 13     3 4 11 12

Each device keeps its chunks in order. More chunks share short documents better: those that lie in
few chunks.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Division of rows into chunks, and their devices. By default, rows keep their order."""

    degree: int = 1
    """Number of devices that the chunks of a row are dealt to."""
    chunks_per_device: int = 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a row."""
        return self.degree * self.chunks_per_device

    @property
    def keeps_order(self) -> bool:
        """True if the tokens of a row keep their order."""
        return self.degree == 1 or self.chunks_per_device == 1

    def chunk_order(self) -> tuple[int, ...]:
        """Returns the chunks of a row in the order of the layout."""
        return tuple(
            index * self.degree + (self.degree - 1 - device if index % 2 else device)
            for device in range(self.degree)
            for index in range(self.chunks_per_device)
        )

    def chunk_tokens(self, row_tokens: int) -> int:
        """Returns the number of tokens of a chunk."""
        assert row_tokens % self.num_chunks == 0, (row_tokens, self)
        return row_tokens // self.num_chunks

    def spans(self, begin: int, end: int, *, row_tokens: int) -> list[tuple[int, int]]:
        """Returns the begin and end of the token ranges in places `begin` to `end`.

        Example: with 16 tokens, degree 4 and 2 chunks per device, places 1 to 6 hold tokens 1 to 2,
            14 to 16 and 2 to 4.
        """
        if self.keeps_order:
            return [(begin, end)] if begin < end else []
        chunk_tokens = self.chunk_tokens(row_tokens)
        order = self.chunk_order()
        ranges: list[tuple[int, int]] = []
        while begin < end:
            place, offset = divmod(begin, chunk_tokens)
            length = min(end, (place + 1) * chunk_tokens) - begin
            first = order[place] * chunk_tokens + offset
            if ranges and ranges[-1][1] == first:  # chunks where the dealing turns are adjacent
                ranges[-1] = (ranges[-1][0], first + length)
            else:
                ranges.append((first, first + length))
            begin += length
        return ranges

    def tokens_in_places(self, places: Int32[Array, "l"], *, row_tokens: int) -> Int32[Array, "l"]:
        """Returns the tokens in some places, inside jit."""
        if self.keeps_order:
            return places
        chunk_tokens = self.chunk_tokens(row_tokens)
        chunks = jnp.asarray(self.chunk_order(), jnp.int32)[places // chunk_tokens]
        return chunks * chunk_tokens + places % chunk_tokens

    def token_order(self, row_tokens: int) -> np.ndarray:
        """Returns the token in each place. Shapes: [row_tokens]."""
        ranges = self.spans(0, row_tokens, row_tokens=row_tokens)
        return np.concatenate([np.arange(begin, end) for begin, end in ranges])

    def place_of_token(self, row_tokens: int) -> np.ndarray:
        """Returns the place of each token. Shapes: [row_tokens]."""
        return np.argsort(self.token_order(row_tokens))


KEPT_ORDER = Layout()  # the layout of rows that keep their order
