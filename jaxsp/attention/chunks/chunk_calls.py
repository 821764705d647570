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

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.segments import Chunks, OffDiagonalBlock


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


class Call(abc.ABC):
    """Blocks that are rows of one call of the kernel."""

    blocks: OffDiagonalBlock

    @abc.abstractmethod
    def take_queries(self, x_Bl: Array) -> Array:
        """Selects the queries of the blocks from all tokens: rows of one call."""

    @abc.abstractmethod
    def take_keys(self, x_Bl: Array) -> Array:
        """Selects the keys of the blocks."""

    @abc.abstractmethod
    def place_queries(self, x_R: Array, fill: float = 0.0) -> list[Array]:
        """Returns values of all tokens, given those of the queries: arrays to merge one by one.

        Args: fill: value of other tokens.
        """

    @abc.abstractmethod
    def place_keys(self, x_R: Array) -> Array:
        """Returns values of all tokens, given those of the keys; 0 for others."""


@dataclasses.dataclass(frozen=True)
class SquareCall(Call):
    """Squares of one size: n for each row.

    The chunks of the queries, and those of the keys, are divided into n equal parts. A square has
    the queries of a part's second half and the keys of its first half.

    Shapes: x_Bl are all tokens, [B, l, ...]; x_R are the rows of one call, [B n, l / (2 n), ...].
    """

    num_squares: int
    blocks: OffDiagonalBlock

    @classmethod
    def make(
        cls, tokens: ChunkTokens, queries_k: Array, keys_k: Array, *, num_squares: int
    ) -> "SquareCall":
        """Finds the blocks of `num_squares` squares of each row.

        Args: queries_k, keys_k: numbers of the chunks that queries and keys are from.
        """
        queries_n = queries_k.reshape(num_squares, 2, -1)[:, 1]
        keys_n = keys_k.reshape(num_squares, 2, -1)[:, 0]
        return cls(num_squares, tokens.find_blocks(queries_n, keys_n))

    def take_queries(self, x_Bl: Array) -> Array:
        return _split_halves(x_Bl, self.num_squares)[:, 1]

    def take_keys(self, x_Bl: Array) -> Array:
        return _split_halves(x_Bl, self.num_squares)[:, 0]

    def place_queries(self, x_R: Array, fill: float = 0.0) -> list[Array]:
        return [_join_halves(jnp.full_like(x_R, fill), x_R, self.num_squares)]

    def place_keys(self, x_R: Array) -> Array:
        return _join_halves(x_R, jnp.zeros_like(x_R), self.num_squares)


@dataclasses.dataclass(frozen=True)
class PairCall(Call):
    """Squares of single chunks, with another device's keys: two for each pair of chunks.

    Row 2 i has the queries of pair i's second chunk and the keys of the first. Row 2 i + 1
    ("either") has the first chunks of both devices if `is_earlier`, or else the second chunks.

    Shapes: x_Bl are all tokens, [B, l, ...]; x_R are the rows of one call, [2 B P, l / (2 P), ...]
        with P = num_pairs.
    """

    num_pairs: int
    is_earlier: Array
    """True if the keys are those of an earlier device."""
    blocks: OffDiagonalBlock

    @classmethod
    def make(
        cls, tokens: ChunkTokens, queries_k: Array, keys_k: Array, is_earlier: Array
    ) -> "PairCall":
        """Args: queries_k, keys_k: numbers of both devices' chunks."""
        queries_n2 = queries_k.reshape(-1, 2)
        keys_n2 = keys_k.reshape(-1, 2)
        either_queries = jnp.where(is_earlier, queries_n2[:, 0], queries_n2[:, 1])
        either_keys = jnp.where(is_earlier, keys_n2[:, 0], keys_n2[:, 1])
        queries_n2 = jnp.stack([queries_n2[:, 1], either_queries], axis=1)
        keys_n2 = jnp.stack([keys_n2[:, 0], either_keys], axis=1)
        blocks = tokens.find_blocks(queries_n2.reshape(-1, 1), keys_n2.reshape(-1, 1))
        return cls(len(queries_n2), is_earlier, blocks)

    def take_queries(self, x_Bl: Array) -> Array:
        return self._take(x_Bl, 1)

    def take_keys(self, x_Bl: Array) -> Array:
        return self._take(x_Bl, 0)

    def _take(self, x_Bl: Array, half: int) -> Array:
        """Selects a half of each pair for rows 2 i, and the "either" half for rows 2 i + 1."""
        x_P2 = _split_halves(x_Bl, self.num_pairs)
        either_P = jnp.where(self.is_earlier, x_P2[:, 0], x_P2[:, 1])
        x_P2 = jnp.stack([x_P2[:, half], either_P], axis=1)
        return x_P2.reshape(-1, *x_P2.shape[2:])

    def place_queries(self, x_R: Array, fill: float = 0.0) -> list[Array]:
        always, first, second = self._split(x_R, fill)
        return [
            _join_halves(first, always, self.num_pairs),
            _join_halves(jnp.full_like(second, fill), second, self.num_pairs),
        ]

    def place_keys(self, x_R: Array) -> Array:
        always, first, second = self._split(x_R, 0.0)
        return _join_halves(always + first, second, self.num_pairs)

    def _split(self, x_R: Array, fill: float) -> tuple[Array, Array, Array]:
        """Rows 2 i, and rows 2 i + 1 as those of first and of second chunks."""
        always = x_R[0::2]
        either = x_R[1::2]
        first = jnp.where(self.is_earlier, either, fill)
        second = jnp.where(self.is_earlier, fill, either)
        return always, first, second


@dataclasses.dataclass(frozen=True)
class HalfCall(Call):
    """Single chunks, with the keys of all devices in two rounds: one row for each pair of chunks.

    Rows have the queries of the pair's first or second chunk.

    Shapes: x_Bl are all tokens of this device, [B, l, ...], and x_BL those of all devices. x_R are
        the rows of one call, with P = num_pairs: [B P, l / (2 P), ...] for queries and
        [B P, L / P, ...] for keys.
    """

    num_pairs: int
    half: int
    """0 for first chunks, 1 for second chunks."""
    blocks: OffDiagonalBlock

    @classmethod
    def make(
        cls, tokens: ChunkTokens, queries_k: Array, *, half: int, num_devices: int
    ) -> "HalfCall":
        """Args: queries_k: numbers of this device's chunks."""
        num_pairs = len(queries_k) // 2
        pair_tokens = 2 * num_devices * tokens.chunk_tokens
        first_keys_n = jnp.arange(num_pairs, dtype=jnp.int32) * pair_tokens
        queries_n = queries_k[half::2]
        num_keys_n = queries_n * tokens.chunk_tokens - first_keys_n
        keys = Chunks(first_keys_n[:, None], num_keys_n)
        return cls(num_pairs, half, tokens.find_blocks_before(queries_n[:, None], keys))

    def take_queries(self, x_Bl: Array) -> Array:
        return _split_halves(x_Bl, self.num_pairs)[:, self.half]

    def take_keys(self, x_BL: Array) -> Array:
        return x_BL.reshape(len(x_BL) * self.num_pairs, -1, *x_BL.shape[2:])

    def place_queries(self, x_R: Array, fill: float = 0.0) -> list[Array]:
        others = jnp.full_like(x_R, fill)
        first, second = (others, x_R) if self.half else (x_R, others)
        return [_join_halves(first, second, self.num_pairs)]

    def place_keys(self, x_R: Array) -> Array:
        return x_R.reshape(len(x_R) // self.num_pairs, -1, *x_R.shape[2:])


def find_local_calls(tokens: ChunkTokens, chunks_k: Array) -> list[Call]:
    """Finds the calls of a device's own keys, except those of chunks to themselves."""
    return [
        SquareCall.make(tokens, chunks_k, chunks_k, num_squares=number)
        for number in _powers_below(len(chunks_k))
    ]


def find_remote_calls(
    tokens: ChunkTokens, queries_k: Array, keys_k: Array, is_earlier: Array
) -> list[Call]:
    """Finds the calls of another device's keys."""
    squares: list[Call] = [
        SquareCall.make(tokens, queries_k, keys_k, num_squares=number)
        for number in _powers_below(len(queries_k) // 2)
    ]
    return [*squares, PairCall.make(tokens, queries_k, keys_k, is_earlier)]


def find_gathered_calls(tokens: ChunkTokens, queries_k: Array, *, num_devices: int) -> list[Call]:
    """Finds the calls of the keys of all devices, in the order of the row, except those of chunks
    to themselves."""
    keys_N = jnp.arange(num_devices * len(queries_k), dtype=jnp.int32)
    squares: list[Call] = [
        SquareCall.make(tokens, queries_k, keys_N, num_squares=number)
        for number in _powers_below(len(queries_k) // 2)
    ]
    halves = [
        HalfCall.make(tokens, queries_k, half=half, num_devices=num_devices) for half in (0, 1)
    ]
    return [*squares, *halves]


def _powers_below(number: int) -> list[int]:
    """Powers of 2 below a power of 2. Example: 8 gives [1, 2, 4]."""
    return [2**exponent for exponent in range(number.bit_length() - 1)]


def _split_halves(x_Bl: Array, number: int) -> Array:
    """Divides the tokens of each row into `number` parts, each of two halves: [B n, 2, ...]."""
    B, l = x_Bl.shape[:2]
    return x_Bl.reshape(B * number, 2, l // (2 * number), *x_Bl.shape[2:])


def _join_halves(first: Array, second: Array, number: int) -> Array:
    """Undoes `_split_halves`."""
    x = jnp.stack([first, second], axis=1)
    return x.reshape(len(x) // number, -1, *x.shape[3:])
