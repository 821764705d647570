"""Attention of a device's chunks to earlier chunks, of one device or of all, in few large calls.

A device's chunk i is after the chunks 0 to i - 1 of every device, and before the chunks from i + 1
on. So the pairs of chunks to compute form a triangle, and it is divided into squares. With 4 chunks
per device (queries x keys):

         0  1  2  3        a: one block of 2 chunks x 2 chunks
    0    d                 b: two blocks of 1 chunk x 1 chunk
    1    b  d              d: on another device's keys, either chunks 0 and 2 or chunks 1 and 3,
    2    a  a  d              depending on which device is earlier in this direction of the dealing;
    3    a  a  b  d           on the device's own keys, causal attention

Only one segment of a row can reach from the keys of a square to its queries, so each square is one
off-diagonal block: the first queries and the last keys. Squares of one size are rows of one call of
the kernel, in which each token occurs once: no gradient is written twice. k chunks need log2(k)
calls, because squares b and d share one.

If keys are those of all devices, `a` is 2 chunks x the whole first 2 rounds of dealing. For each
pair of rounds, one call has the first and one the second chunk of the device, with the keys of the
pair before it. So gradients of keys are written log2(k) / 2 + 1.5 times, and not k times.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.segments import Chunks, OffDiagonalBlock


class Call(NamedTuple):
    """Blocks that are rows of one call of the kernel: R of them, from all B rows.

    Shapes: x_Bl are all tokens of this device, [B, l, ...], and for keys also those of another
        device or of all devices; x_R are the rows of the call.
    """

    blocks: OffDiagonalBlock
    take_queries: Callable[[Array], Array]
    """x_Bl -> x_R: the queries of the blocks."""
    take_keys: Callable[[Array], Array]
    """x_Bl -> x_R: the keys of the blocks."""
    place_queries: Callable[[Array, float], list[Array]]
    """x_R, fill -> x_Bl: values of all tokens, given those of the queries, and `fill` for other
    tokens: arrays to merge one by one."""
    place_keys: Callable[[Array], Array]
    """x_R -> x_Bl: values of all tokens, given those of the keys; 0 for others."""


@dataclasses.dataclass(frozen=True)
class ChunkTokens:
    """Tokens of a device's chunks, and the segments of the rows."""

    starts_BM: Array
    lengths_BM: Array
    chunk_tokens: int

    def find_blocks(self, queries_nw: Array, keys_nw: Array) -> OffDiagonalBlock:
        """Finds n blocks of each row, [B n], from the numbers of the chunks of each."""
        sizes_n = jnp.full(len(keys_nw), self.chunk_tokens)
        return self.find_blocks_before(queries_nw, Chunks(keys_nw * self.chunk_tokens, sizes_n))

    def find_blocks_before(self, queries_nw: Array, keys: Chunks) -> OffDiagonalBlock:
        """Finds n blocks of each row, [B n]. Args: keys: fields are [n, chunks] and [n]."""

        def find(queries_w: Array, keys: Chunks) -> OffDiagonalBlock:
            return segments.find_off_diagonal_block(
                self.starts_BM,
                self.lengths_BM,
                queries=Chunks(queries_w * self.chunk_tokens, self.chunk_tokens),
                keys=keys,
            )

        blocks = jax.vmap(find, out_axes=1)(queries_nw, keys)
        return OffDiagonalBlock(*(x_Bn.reshape(-1) for x_Bn in blocks))


def find_local_calls(tokens: ChunkTokens, chunks_k: Array) -> list[Call]:
    """Finds the calls of a device's own keys, except those of chunks to themselves."""
    return _find_squares(tokens, chunks_k, chunks_k, max_number=len(chunks_k) // 2)


def find_remote_calls(
    tokens: ChunkTokens, queries_k: Array, keys_k: Array, is_earlier: Array
) -> list[Call]:
    """Finds the calls of another device's keys. Args: is_earlier: True if that is before this
    one."""
    squares = _find_squares(tokens, queries_k, keys_k, max_number=len(queries_k) // 4)
    return [*squares, _find_pairs(tokens, queries_k, keys_k, is_earlier)]


def find_gathered_calls(tokens: ChunkTokens, queries_k: Array, *, num_devices: int) -> list[Call]:
    """Finds the calls of the keys of all devices, in the order of the row, except those of chunks
    to themselves."""
    keys_N = jnp.arange(num_devices * len(queries_k), dtype=jnp.int32)
    squares = _find_squares(tokens, queries_k, keys_N, max_number=len(queries_k) // 4)
    halves = [_find_halves(tokens, queries_k, half, num_devices) for half in (0, 1)]
    return [*squares, *halves]


def _find_squares(
    tokens: ChunkTokens, queries_k: Array, keys_k: Array, *, max_number: int
) -> list[Call]:
    """Calls of n squares each for each row, for n = 1, 2, 4 ... max_number.

    The chunks of the queries, and those of the keys, are divided into n equal parts. A square has
    the queries of a part's second half and the keys of its first half.
    """

    def make(n: int) -> Call:
        queries_n = queries_k.reshape(n, 2, -1)[:, 1]
        keys_n = keys_k.reshape(n, 2, -1)[:, 0]
        return Call(
            blocks=tokens.find_blocks(queries_n, keys_n),
            take_queries=lambda x_Bl: _split_halves(x_Bl, n)[:, 1],
            take_keys=lambda x_Bl: _split_halves(x_Bl, n)[:, 0],
            place_queries=lambda x_R, fill: [_join_halves(jnp.full_like(x_R, fill), x_R, n)],
            place_keys=lambda x_R: _join_halves(x_R, jnp.zeros_like(x_R), n),
        )

    return [make(2**exponent) for exponent in range(max_number.bit_length())]


def _find_pairs(tokens: ChunkTokens, queries_k: Array, keys_k: Array, is_earlier: Array) -> Call:
    """The call of squares of single chunks, with another device's keys: two for each pair of
    chunks.

    Row 2 i has the queries of pair i's second chunk and the keys of the first. Row 2 i + 1
    ("either") has the first chunks of both devices if `is_earlier`, or else the second chunks.
    """
    n = len(queries_k) // 2

    def select(x_n2: Array, half: int) -> Array:
        """A half of each pair for rows 2 i, and the "either" half for rows 2 i + 1."""
        either_n = jnp.where(is_earlier, x_n2[:, 0], x_n2[:, 1])
        return jnp.stack([x_n2[:, half], either_n], axis=1)

    def take(x_Bl: Array, half: int) -> Array:
        x_n2 = select(_split_halves(x_Bl, n), half)
        return x_n2.reshape(-1, *x_n2.shape[2:])

    def split(x_R: Array, fill: float) -> tuple[Array, Array, Array]:
        """Rows 2 i, and rows 2 i + 1 as those of first and of second chunks."""
        either = x_R[1::2]
        first = jnp.where(is_earlier, either, fill)
        return x_R[0::2], first, jnp.where(is_earlier, fill, either)

    def place_queries(x_R: Array, fill: float) -> list[Array]:
        always, first, second = split(x_R, fill)
        others = jnp.full_like(second, fill)
        return [_join_halves(first, always, n), _join_halves(others, second, n)]

    def place_keys(x_R: Array) -> Array:
        always, first, second = split(x_R, 0.0)
        return _join_halves(always + first, second, n)

    queries_n2 = select(queries_k.reshape(n, 2), 1)
    keys_n2 = select(keys_k.reshape(n, 2), 0)
    return Call(
        blocks=tokens.find_blocks(queries_n2.reshape(-1, 1), keys_n2.reshape(-1, 1)),
        take_queries=lambda x_Bl: take(x_Bl, 1),
        take_keys=lambda x_Bl: take(x_Bl, 0),
        place_queries=place_queries,
        place_keys=place_keys,
    )


def _find_halves(tokens: ChunkTokens, queries_k: Array, half: int, num_devices: int) -> Call:
    """The call of single chunks, with the keys of all devices in two rounds: one row for each pair
    of chunks, with the queries of its first (half = 0) or second chunk."""
    n = len(queries_k) // 2
    first_keys_n = jnp.arange(n, dtype=jnp.int32) * (2 * num_devices * tokens.chunk_tokens)
    queries_n = queries_k[half::2]
    num_keys_n = queries_n * tokens.chunk_tokens - first_keys_n

    def place_queries(x_R: Array, fill: float) -> list[Array]:
        others = jnp.full_like(x_R, fill)
        return [_join_halves(*((others, x_R) if half else (x_R, others)), n)]

    return Call(
        blocks=tokens.find_blocks_before(
            queries_n[:, None], Chunks(first_keys_n[:, None], num_keys_n)
        ),
        take_queries=lambda x_Bl: _split_halves(x_Bl, n)[:, half],
        take_keys=lambda x_BL: x_BL.reshape(len(x_BL) * n, -1, *x_BL.shape[2:]),
        place_queries=place_queries,
        place_keys=lambda x_R: x_R.reshape(len(x_R) // n, -1, *x_R.shape[2:]),
    )


def _split_halves(x_Bl: Array, number: int) -> Array:
    """Divides the tokens of each row into `number` parts, each of two halves: [B n, 2, ...]."""
    B, l = x_Bl.shape[:2]
    return x_Bl.reshape(B * number, 2, l // (2 * number), *x_Bl.shape[2:])


def _join_halves(first: Array, second: Array, number: int) -> Array:
    """Undoes `_split_halves`."""
    x = jnp.stack([first, second], axis=1)
    return x.reshape(len(x) // number, -1, *x.shape[3:])
