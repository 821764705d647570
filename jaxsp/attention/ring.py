"""Ring: devices keep their queries; keys and values travel around the ring.

Chunks are dealt to the devices back and forth (core/layout.py), and a ring step computes the blocks
of chunk_calls.py. With 4 devices of 2 chunks each, chunks 0 to 7, device 1 (chunks 1 and 6)
computes:

    keys of device (chunks)   0 (0, 7)    1 (1, 6)                 2 (2, 5)    3 (3, 4)
    queries x keys            6x0, 1x0    6x1, 1x1 and 6x6 causal  6x2, 6x5    6x3, 6x4

A segment needs the hop from one device to another if it has keys on the first and later queries on
the second. Segments within one chunk need none, and those of a few chunks need few: chunks that
follow each other are on neighboring devices. All devices of the mesh must make the same hops,
although only a group knows its rows, so one small all-reduce per microbatch finds what any needs.

Source: Liu et al. 2023, arXiv:2310.01889. The balanced order is that of Megatron-LM and
zhuzilin/ring-flash-attention. Differs: rows are packed, and only one segment can have tokens in
both halves of an off-diagonal block; the gradients of k and v travel in float32; hops that no
segment needs are left out.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxsp.attention import chunk_calls, partial_attention
from jaxsp.attention.chunk_calls import Call, ChunkTokens
from jaxsp.attention.kernels.kernel import (
    AttentionWorkload,
    ChunkKernel,
    Gradients,
    Kernel,
    KernelSettings,
    Saved,
)
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.partial_attention import PartialAttention, Sums
from jaxsp.attention.zigzag import Zigzag
from jaxsp.core import axes
from jaxsp.core.layout import Layout

HOPS_SCOPE = "ring_hops_up_to_all"
"""Scope of the conditional that selects the hops. Its last branch makes all hops."""

NO_HOPS, NEAR_HOPS, ALL_HOPS = range(3)
"""Values of `RingHops.extent`."""


class RingHops(NamedTuple):
    """Hops that any row of a microbatch needs, on any device of the mesh."""

    extent: Int32[Array, ""]
    """NO_HOPS, NEAR_HOPS, or ALL_HOPS. All are made one after another if a far one is needed."""
    needs_near: Bool[Array, "n"]
    """True for the near hops that are needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Zigzag):
    """Each device keeps its queries; keys and values travel around the ring."""

    name = "ring"
    has_ring_steps = True

    def chunk_sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        if self.degree == 1:
            return {}
        tokens = workload.num_rows * workload.tokens_per_device
        kv_elements = tokens * 2 * workload.num_kv_heads * workload.head_dim
        hops = 2 * (self.degree - 1)
        if workload.remat == "full":
            hops += self.degree - 1
        # Gradients make seq - 1 hops in float32, and the last one, to the device that owns them, in
        # the dtype of k and v
        elements_bytes = (hops + 1) * workload.itemsize + (self.degree - 1) * 4
        return {"collective-permute": kv_elements * elements_bytes}

    def make_tables(
        self, kernel: Kernel, settings: KernelSettings, rows: Segments, row_tokens: int
    ) -> RingHops | None:
        return find_hops(self.layout, *rows[:2], row_tokens=row_tokens)

    def forward(
        self, kernel: ChunkKernel, q: Array, k: Array, v: Array, segments: Segments
    ) -> tuple[Array, Array]:
        """Moves: k and v to all other devices."""
        tokens = ChunkTokens(*segments[:2], q.shape[1] // self.chunks_per_device)

        def visit(results: PartialAttention, kv: list[Array], hop: Array | int) -> PartialAttention:
            """Merges in the attention to the keys that arrive after `hop` hops."""
            calls = self._find_remote_calls(tokens, hop)
            return partial_attention.add_calls_forward(kernel, calls, q, kv, results, in_order=True)

        def next_step(
            carry: tuple[PartialAttention, list[Array]], hop: Array
        ) -> tuple[tuple[PartialAttention, list[Array]], None]:
            results, kv = carry
            return (visit(results, kv, hop), self.shift(kv)), None

        def visit_all(results: PartialAttention) -> PartialAttention:
            hops = jnp.arange(1, self.degree - 1)
            (results, kv), _ = jax.lax.scan(next_step, (results, self.shift([k, v])), hops)
            return visit(results, kv, self.degree - 1)

        def visit_near(results: PartialAttention, index: Array) -> PartialAttention:
            """Adds attention to the keys of a near device, which one hop brings here."""
            kv = jax.lax.switch(index, self._shifts(), [k, v])
            return visit(results, kv, jnp.asarray(_near_hops(self.degree))[index])

        local = self.find_local_segments(*segments[:2], tokens.chunk_tokens)
        results = partial_attention.diagonal_forward(kernel, local, q, k, v)
        calls = chunk_calls.find_local_calls(tokens, self.chunk_numbers(self.index))
        results = partial_attention.add_calls_forward(
            kernel, calls, q, [k, v], results, in_order=True
        )
        results = self._visit_needed(segments.tables, visit_all, visit_near, results)
        return results.out_BCHK.astype(q.dtype), results.lse_BCH.swapaxes(1, 2)

    def backward(self, kernel: ChunkKernel, saved: Saved, segments: Segments) -> Gradients:
        """Moves: k and v to all other devices, and their gradients all the way around."""
        q, k, v, out, dout, lse = saved
        tokens = ChunkTokens(*segments[:2], q.shape[1] // self.chunks_per_device)
        results = (out, lse.swapaxes(1, 2), dout)

        def visit(dq: Array, dkv: list[Array], kv: list[Array], hop: Array | int) -> Sums:
            """Adds the gradients of the queries, and of the keys that arrive after `hop` hops."""
            calls = self._find_remote_calls(tokens, hop)
            return partial_attention.add_calls_backward(
                kernel, calls, q, kv, results, (dq, dkv), in_order=True
            )

        def next_step(
            carry: tuple[Array, list[Array], list[Array]], hop: Array
        ) -> tuple[tuple, None]:
            dq, dkv, kv = carry
            received = self.shift([*dkv, *kv])
            dq, dkv = visit(dq, received[:2], kv, hop)
            return (dq, dkv, received[2:]), None

        def visit_all(gradients: Sums) -> Sums:
            # Gradients are sent one ring step after their keys, so that the transfer overlaps the
            # next step's computation
            hops = jnp.arange(1, self.degree - 1)
            carry = (*gradients, self.shift([k, v]))
            (dq, dkv, kv), _ = jax.lax.scan(next_step, carry, hops)
            dq, dkv = visit(dq, self.shift(dkv), kv, self.degree - 1)
            own_dkv = self.shift([x.astype(k.dtype) for x in dkv])  # to their own device
            return dq, [x.astype(jnp.float32) for x in own_dkv]

        def visit_near(gradients: Sums, index: Array) -> Sums:
            """Adds the gradients of a near device's keys, and sends them back in one hop."""
            dq, dkv = gradients
            kv = jax.lax.switch(index, self._shifts(), [k, v])
            zeros = [jnp.zeros(x.shape, jnp.float32) for x in kv]
            dq, terms = visit(dq, zeros, kv, jnp.asarray(_near_hops(self.degree))[index])
            terms = jax.lax.switch(index, self._shifts(back=True), terms)
            return dq, [x + y for x, y in zip(dkv, terms, strict=True)]

        local = self.find_local_segments(*segments[:2], tokens.chunk_tokens)
        gradients = partial_attention.diagonal_backward(kernel, local, q, [k, v], results)
        calls = chunk_calls.find_local_calls(tokens, self.chunk_numbers(self.index))
        gradients = partial_attention.add_calls_backward(
            kernel, calls, q, [k, v], results, gradients, in_order=True
        )
        dq, (dk, dv) = self._visit_needed(segments.tables, visit_all, visit_near, gradients)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _find_remote_calls(self, tokens: ChunkTokens, hop: Array | int) -> list[Call]:
        """Calls of the ring step in which keys arrive after `hop` hops."""
        here = self.index
        there = (here - hop) % self.degree
        chunks_k = self.chunk_numbers(here)
        return chunk_calls.find_remote_calls(
            tokens, chunks_k, self.chunk_numbers(there), there < here
        )

    def _visit_needed(
        self,
        hops: RingHops | None,
        visit_all: Callable[[Any], Any],
        visit_near: Callable[[Any, Array], Any],
        start: Any,
    ) -> Any:
        """Visits the devices whose keys are needed.

        Args:
            hops: None: visits all devices.
            visit_all: visits them one after another, around the ring.
            visit_near: visits the device after the hop with this index in `_near_hops`:
                one at a distance of 1 or 2, in either direction.
        """
        if self.degree == 1:
            return start
        if hops is None:
            return visit_all(start)

        def visit_near_hops(carry: Any) -> Any:
            if self.degree == 2:
                return carry  # the only hop is all hops

            def next_hop(carry: Any, index: Array) -> tuple[Any, None]:
                def visit(carry: Any) -> Any:
                    return visit_near(carry, index)

                return jax.lax.cond(hops.needs_near[index], visit, lambda carry: carry, carry), None

            return jax.lax.scan(next_hop, carry, jnp.arange(len(hops.needs_near)))[0]

        # Every device of the mesh takes the same branch: otherwise devices would wait for transfers
        # that never begin
        with jax.named_scope(HOPS_SCOPE):
            # In the order NO_HOPS, NEAR_HOPS, ALL_HOPS
            branches = [lambda carry: carry, visit_near_hops, visit_all]
            return jax.lax.switch(hops.extent, branches, start)

    def _shifts(self, *, back: bool = False) -> list[Callable[[list[Array]], list[Array]]]:
        """Functions that send arrays as far as each of the near hops, or the same way back."""
        sign = -1 if back else 1
        return [
            functools.partial(self.shift, distance=sign * hop)
            for hop in _near_hops(self.degree).tolist()
        ]

    def shift(self, arrays: list[Array], *, distance: int = 1) -> list[Array]:
        """Sends arrays to the device at a distance after this one, and returns those received.

        They travel in one message, because XLA overlaps only one with computation (jax 0.12).
        """
        pairs = [
            pair
            for group in self.groups
            for pair in zip(group, np.roll(group, -distance).tolist(), strict=True)
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


def _near_hops(degree: int) -> np.ndarray:
    """Hops to devices at a distance of 1 or 2 in both directions, made without the hops between."""
    hops = {hop % degree for hop in (1, -1, 2, -2)} - {0}
    return np.array(sorted(hops), np.int32)


def find_hops(
    layout: Layout,
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
) -> RingHops | None:
    """Finds the hops of a microbatch, inside shard_map over the whole mesh; None for one device."""
    if layout.degree == 1:
        return None
    needed_P = needs_hop(layout, starts_BM, lengths_BM, row_tokens=row_tokens)
    needed_P = jax.lax.pmax(needed_P.astype(jnp.int32), axes.ALL) > 0
    near = _near_hops(layout.degree)
    is_far = np.ones(layout.degree, bool)
    is_far[[0, *near]] = False
    needs_all = (needed_P & is_far).any() | needed_P[1:].all()
    extent = jnp.where(needs_all, ALL_HOPS, jnp.where(needed_P.any(), NEAR_HOPS, NO_HOPS))
    return RingHops(extent.astype(jnp.int32), needed_P[near])


def needs_hop(
    layout: Layout,
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    row_tokens: int,
) -> Bool[Array, "P"]:
    """True for each number of hops that keys of a segment make to its queries."""
    chunk_tokens = layout.chunk_tokens(row_tokens)
    first_chunk_BM = starts_BM // chunk_tokens
    last_chunk_BM = (starts_BM + lengths_BM - 1) // chunk_tokens
    reached_by_PN = jnp.asarray(_find_reached_chunks(layout))
    is_needed_PBM = last_chunk_BM[None] >= reached_by_PN[:, first_chunk_BM]
    return (is_needed_PBM & (lengths_BM > 0)[None]).any((1, 2))


@functools.lru_cache
def _find_reached_chunks(layout: Layout) -> np.ndarray:
    """First chunk with which a segment that begins in a chunk needs a number of hops.

    Shapes: [P, chunks of a row].
    """
    never = 2**30  # number of a chunk that no row has
    device = np.zeros(layout.num_chunks, np.int64)
    for place, chunk in enumerate(layout.chunk_order()):
        device[chunk] = place // layout.chunks_per_device
    reached = np.full((layout.degree, layout.num_chunks + 1), never, np.int32)
    for keys in reversed(range(layout.num_chunks)):
        reached[:, keys] = reached[:, keys + 1]
        queries = np.arange(keys + 1, layout.num_chunks)
        hops = (device[queries] - device[keys]) % layout.degree
        np.minimum.at(reached[:, keys], hops, queries.astype(np.int32))
    reached[0] = never
    return reached[:, :-1]
