"""Ring: devices keep their queries; keys and values travel around the ring.

Rows are in zigzag order (core/layout.py): each device holds a first chunk, from the front of the
row, and a last chunk, its mirror image from the back. So every device computes two off-diagonal
blocks in each ring step, queries x keys, depending on the device that the keys belong to:

    always                     its last chunk x the first chunk of the keys' device
    keys of an earlier device  its first chunk x the first chunk of the keys' device
    keys of a later device     its last chunk x the last chunk of the keys' device

With 4 devices and chunks 0 to 7, device 1 (chunks 1 and 6) computes:

    keys of device (chunks)   0 (0, 7)    1 (1, 6)                 2 (2, 5)    3 (3, 4)
    queries x keys            6x0, 1x0    6x1, 1x1 and 6x6 causal  6x2, 6x5    6x3, 6x4

Source: Liu et al. 2023, arXiv:2310.01889. The balanced order is that of Megatron-LM and
zhuzilin/ring-flash-attention. Differs: rows are packed, and only one segment can have tokens in
both chunks of an off-diagonal block; the gradients of k and v travel in float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.attention import zigzag
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import ChunkKernel
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.strategy import LayerWorkload
from jaxsp.attention.zigzag import LocalSegments, PartialAttention, ZigzagStrategy
from jaxsp.core import axes

_ChunkResults = tuple[PartialAttention, PartialAttention]
"""Attention of the first and of the last chunk over the keys visited so far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(ZigzagStrategy):
    """Each device keeps its queries; keys and values travel around the ring."""

    name = "ring"

    def chunk_sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        tokens = workload.num_rows * workload.tokens_per_device
        kv_elements = tokens * 2 * workload.num_kv_heads * workload.head_dim
        hops = 2 * (self.seq - 1)
        if workload.recomputes_attention and workload.has_other_kinds:
            hops += self.seq - 1
        elif workload.recomputes_attention and self.seq > 3:
            # The recomputed forward pass repeats its hops, except the first, which XLA merges with
            # the same hop of the backward pass. With 3 devices, the loop has one ring step, which
            # XLA unrolls, and then it merges all hops
            hops += self.seq - 2
        # Gradients make seq - 1 hops in float32, and the last one, to the device that owns them, in
        # the dtype of k and v
        elements_bytes = (hops + 1) * workload.itemsize + (self.seq - 1) * 4
        return {"collective-permute": kv_elements * elements_bytes}

    def forward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
    ) -> tuple[Float[Array, "B l H K"], Float32[Array, "B H l"]]:
        """Output and log-sum-exp of this device's queries. Moves: k and v to all other devices."""
        B, l, H, _ = q.shape
        q_B2CHK, *kv = (zigzag.split_chunks(x) for x in (q, k, v))
        work = _LocalWork(self, starts_BM, lengths_BM, l // 2)

        def visit(results: _ChunkResults, kv: list[Array], hop: Array | int) -> _ChunkResults:
            """Merges in the attention to the keys that arrive after `hop` hops."""
            step = work.ring_step(hop)
            part = zigzag.off_diagonal_forward(
                kernel, step.blocks, step.take_queries(q_B2CHK), *(step.take_keys(x) for x in kv)
            )
            last_part, either_part = part.split_chunks()
            first, last = results
            first = zigzag.merge(first, zigzag.mask_partial(either_part, step.is_earlier))
            last = zigzag.merge(last, last_part)
            last = zigzag.merge(last, zigzag.mask_partial(either_part, ~step.is_earlier))
            return first, last

        def next_step(
            carry: tuple[_ChunkResults, list[Array]], hop: Array
        ) -> tuple[tuple[_ChunkResults, list[Array]], None]:
            results, kv = carry
            return (visit(results, kv, hop), self.shift(kv)), None

        results = work.forward(kernel, q_B2CHK, *kv)
        if self.seq > 1:
            hops = jnp.arange(1, self.seq - 1)
            (results, kv), _ = jax.lax.scan(next_step, (results, self.shift(kv)), hops)
            results = visit(results, kv, self.seq - 1)
        out_B2CHK = jnp.stack([part.out_BCHK for part in results], axis=1)
        out = out_B2CHK.reshape(q.shape).astype(q.dtype)
        lse = jnp.stack([part.lse_BHC for part in results], axis=2).reshape(B, H, l)
        return out, lse

    def backward(
        self,
        kernel: ChunkKernel,
        q: Float[Array, "B l H K"],
        k: Float[Array, "B l G K"],
        v: Float[Array, "B l G K"],
        out: Float[Array, "B l H K"],
        lse: Float32[Array, "B H l"],
        dout: Float[Array, "B l H K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
    ) -> tuple[Float[Array, "B l H K"], Float[Array, "B l G K"], Float[Array, "B l G K"]]:
        """dq, dk and dv.

        Moves: k and v to all other devices, and their gradients all the way around.
        """
        B, l, H, _ = q.shape
        arrays = (q, k, v, out, dout)
        q_B2CHK, *kv, out_B2CHK, dout_B2CHK = map(zigzag.split_chunks, arrays)
        lse_B2HC = lse.reshape(B, H, 2, l // 2).swapaxes(1, 2)
        work = _LocalWork(self, starts_BM, lengths_BM, l // 2)
        forward_results = (out_B2CHK, lse_B2HC, dout_B2CHK)

        def visit(
            dq: Array, dkv: list[Array], kv: list[Array], hop: Array | int
        ) -> tuple[Array, list[Array]]:
            """Adds the gradients of the queries, and of the keys that arrive after `hop` hops."""
            step = work.ring_step(hop)
            dq_rows, *dkv_rows = zigzag.off_diagonal_backward(
                kernel,
                step.blocks,
                step.take_queries(q_B2CHK),
                *(step.take_keys(x) for x in kv),
                *(step.take_queries(x) for x in forward_results),
            )
            dq = dq + step.sum_queries(dq_rows)
            return dq, [x + step.sum_keys(rows) for x, rows in zip(dkv, dkv_rows, strict=True)]

        def next_step(
            carry: tuple[Array, list[Array], list[Array]], hop: Array
        ) -> tuple[tuple, None]:
            dq, dkv, kv = carry
            received = self.shift([*dkv, *kv])
            dq, dkv = visit(dq, received[:2], kv, hop)
            return (dq, dkv, received[2:]), None

        dq, *dkv = work.backward(kernel, q_B2CHK, *kv, *forward_results)
        # Gradients are sent one ring step after their keys, so that the transfer overlaps the next
        # step's computation
        if self.seq > 1:
            hops = jnp.arange(1, self.seq - 1)
            (dq, dkv, kv), _ = jax.lax.scan(next_step, (dq, dkv, self.shift(kv)), hops)
            dq, dkv = visit(dq, self.shift(dkv), kv, self.seq - 1)
            dkv = self.shift([x.astype(k.dtype) for x in dkv])  # to their own device
        dk, dv = dkv
        return (
            dq.reshape(q.shape).astype(q.dtype),
            dk.reshape(k.shape).astype(k.dtype),
            dv.reshape(v.shape).astype(v.dtype),
        )

    def shift(self, arrays: list[Array]) -> list[Array]:
        """Sends arrays to the next device, and returns those of the previous one.

        They travel in one message, because XLA overlaps only one with computation (jax 0.12).
        """
        pairs = [
            pair
            for group in self.axis_index_groups
            for pair in zip(group, [*group[1:], group[0]], strict=True)
        ]
        message_dtype = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
        if any(array.dtype != message_dtype for array in arrays):
            message_dtype = jnp.dtype(f"uint{8 * message_dtype.itemsize}")
        words = [jax.lax.bitcast_convert_type(array, message_dtype) for array in arrays]
        ends = np.cumsum([word.size for word in words]).tolist()[:-1]
        message = jnp.concatenate([word.ravel() for word in words])
        received = jnp.split(jax.lax.ppermute(message, axes.SEQ, pairs), ends)
        return [
            jax.lax.bitcast_convert_type(part.reshape(word.shape), array.dtype)
            for part, word, array in zip(received, words, arrays, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _RingStep:
    """The two off-diagonal blocks of a ring step, stacked as R = 2 B rows (see the module).

    Rows 2 b have the queries of the last chunk and the keys of the first. Rows 2 b + 1 ("either")
    have the first chunks of both devices if `is_earlier`, or else their last chunks.
    """

    is_earlier: Array
    """True if the keys are those of an earlier device."""
    blocks: OffDiagonalBlock

    def take_queries(self, x_B2: Array) -> Array:
        """Selects the queries of both blocks from this device's two chunks."""
        either_B = jnp.where(self.is_earlier, x_B2[:, 0], x_B2[:, 1])
        return zigzag.flatten_chunks(jnp.stack([x_B2[:, 1], either_B], axis=1))

    def take_keys(self, x_B2: Array) -> Array:
        """Selects the keys of both blocks from the keys' device's two chunks."""
        either_B = jnp.where(self.is_earlier, x_B2[:, 0], x_B2[:, 1])
        return zigzag.flatten_chunks(jnp.stack([x_B2[:, 0], either_B], axis=1))

    def sum_queries(self, x_R: Array) -> Array:
        """Sums values of the blocks' queries for each of the two chunks."""
        last = x_R[0::2]
        either = x_R[1::2]
        first_sum = jnp.where(self.is_earlier, either, 0)
        last_sum = last + jnp.where(self.is_earlier, 0, either)
        return jnp.stack([first_sum, last_sum], axis=1)

    def sum_keys(self, x_R: Array) -> Array:
        """Sums values of the blocks' keys for each of the two chunks."""
        first = x_R[0::2]
        either = x_R[1::2]
        first_sum = first + jnp.where(self.is_earlier, either, 0)
        last_sum = jnp.where(self.is_earlier, 0, either)
        return jnp.stack([first_sum, last_sum], axis=1)


@dataclasses.dataclass(frozen=True)
class _LocalWork:
    """Blocks of the attention matrix that this device computes, for the segments of its rows."""

    ring: Ring
    starts_BM: Array
    lengths_BM: Array
    chunk_tokens: int

    @property
    def local_segments(self) -> LocalSegments:
        return self.ring.find_local_segments(self.starts_BM, self.lengths_BM, self.chunk_tokens)

    def forward(
        self, kernel: ChunkKernel, q_B2CHK: Array, k_B2CGK: Array, v_B2CGK: Array
    ) -> _ChunkResults:
        """Attention of this device's queries to its own keys."""
        inputs = (q_B2CHK, k_B2CGK, v_B2CGK)
        diagonal = zigzag.diagonal_forward(
            kernel, self.local_segments, *map(zigzag.flatten_chunks, inputs)
        )
        first, last = diagonal.split_chunks()
        inner = zigzag.off_diagonal_forward(
            kernel, self.inner_block, q_B2CHK[:, 1], k_B2CGK[:, 0], v_B2CGK[:, 0]
        )
        return first, zigzag.merge(last, inner)

    def backward(
        self,
        kernel: ChunkKernel,
        q_B2CHK: Array,
        k_B2CGK: Array,
        v_B2CGK: Array,
        *forward_results: Array,
    ) -> tuple[Array, Array, Array]:
        """dq, dk and dv of the attention of this device's queries to its own keys."""
        inputs = (q_B2CHK, k_B2CGK, v_B2CGK, *forward_results)
        diagonal = zigzag.diagonal_backward(
            kernel, self.local_segments, *map(zigzag.flatten_chunks, inputs)
        )
        dq, dk, dv = (x.reshape(-1, 2, *x.shape[1:]) for x in diagonal)
        dq_last, dk_first, dv_first = zigzag.off_diagonal_backward(
            kernel,
            self.inner_block,
            q_B2CHK[:, 1],
            k_B2CGK[:, 0],
            v_B2CGK[:, 0],
            *(x[:, 1] for x in forward_results),
        )
        return dq.at[:, 1].add(dq_last), dk.at[:, 0].add(dk_first), dv.at[:, 0].add(dv_first)

    @property
    def inner_block(self) -> OffDiagonalBlock:
        """Queries of this device's last chunk over keys of its first."""
        first, last = self.ring.chunk_numbers(self.ring.index)
        return self._block(last, first)

    def ring_step(self, hop: Array | int) -> _RingStep:
        """The ring step in which keys arrive after `hop` hops."""
        here = self.ring.index
        there = (here - hop) % self.ring.seq
        is_earlier = there < here
        first, last = self.ring.chunk_numbers(here)
        first_there, last_there = self.ring.chunk_numbers(there)
        either_queries = jnp.where(is_earlier, first, last)
        either_keys = jnp.where(is_earlier, first_there, last_there)
        blocks = self._block(last, first_there), self._block(either_queries, either_keys)
        return _RingStep(is_earlier, OffDiagonalBlock(*zigzag.stack_chunks(*blocks)))

    def _block(self, queries: Array, keys: Array) -> OffDiagonalBlock:
        """Off-diagonal block of a chunk of queries and a chunk of keys, given by their numbers."""
        tokens = self.chunk_tokens
        return segments.find_off_diagonal_block(
            self.starts_BM,
            self.lengths_BM,
            first_query=queries * tokens,
            num_queries=tokens,
            first_key=keys * tokens,
            num_keys=tokens,
        )
