"""The gated delta rule on rows that devices share: see `compute`.

A device's tokens are P sections of S chunks. Chunks of a section follow one another; sections are
independent until `stitching` joins them, so that `together` of them are computed at a time.

    forward     1  the map of states by each section
                   stitch: the state that enters each section
                2  outputs
    backward    3  the same for gradients of states
                   stitch: the gradient of the state that leaves each section
                4  states of all chunks, then gradients from the last chunk to the first

JAX's own backward pass would differentiate pass 1 too, and keep the states of all chunks.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.delta_rule import chunk, stitching
from jaxsp.delta_rule.chunk import Tokens
from jaxsp.delta_rule.spans import RowSpans
from jaxsp.delta_rule.stitching import AffineMap

CHUNK_TOKENS = 64

SECTION_TOKENS = 1024
"""Tokens of a section, if a span has as many."""

MATRICES_AT_A_TIME = 512
"""Heads times sections that are computed at a time: fewer leave a GPU idle, more only take
memory."""

_EPS = 1e-6
"""Added to the sum of squares that q and k are divided by the root of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sections:
    """Division of a device's tokens into sections of chunks. Spans are padded to whole ones."""

    spans: RowSpans
    num_chunks: int
    """Chunks of a section."""
    per_span: int
    """Sections of a span."""
    together: int
    """Sections that are computed at a time."""

    @classmethod
    def divide(cls, spans: RowSpans, *, num_heads: int) -> "Sections":
        """Divides spans into sections. Args: num_heads: value heads."""
        num_chunks = max(1, min(SECTION_TOKENS, spans.span_tokens) // CHUNK_TOKENS)
        per_span = math.ceil(spans.span_tokens / (num_chunks * CHUNK_TOKENS))
        limit = max(1, MATRICES_AT_A_TIME // num_heads)
        together = min(1 << (limit.bit_length() - 1), spans.count * per_span)
        while spans.count * per_span % together:
            per_span += 1  # of padding
        return cls(spans=spans, num_chunks=num_chunks, per_span=per_span, together=together)

    @property
    def num_groups(self) -> int:
        """Number of groups of sections that are computed at a time."""
        return self.spans.count * self.per_span // self.together

    @property
    def padded_tokens(self) -> int:
        """Tokens of this device, with the padding of its spans."""
        return self.num_groups * self.together * self.num_chunks * CHUNK_TOKENS

    def split(self, x: Array) -> Array:
        """[l, ...] -> [groups, together, S, C, ...]. Padding is 0, which changes no state."""
        spans = self.spans
        padded = self.per_span * self.num_chunks * CHUNK_TOKENS
        x = x.reshape(spans.count, spans.span_tokens, *x.shape[1:])
        widths = [(0, 0), (0, padded - spans.span_tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths).reshape(
            self.num_groups, self.together, self.num_chunks, CHUNK_TOKENS, *x.shape[2:]
        )

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        spans = self.spans
        x = x.reshape(spans.count, -1, *x.shape[4:])[:, : spans.span_tokens]
        return x.reshape(spans.tokens_per_device, *x.shape[2:])


def compute(
    q: Float[Array, "B l G K"],
    k: Float[Array, "B l G K"],
    v: Float[Array, "B l H V"],
    g: Float32[Array, "B l H"],
    beta: Float32[Array, "B l H"],
    is_first: Bool[Array, "B l"],
    *,
    spans: RowSpans,
) -> Float[Array, "B l H V"]:
    """Outputs of this device's tokens: see `chunk`. Call inside shard_map.

    Args:
        q, k: not normalized. Each head serves H / G consecutive heads of v.
        g: logarithm of the decay, at most 0. It and beta are 0 at padding.
        is_first: True at the first token of a segment.
    Precision: products in the dtype of v, summed in float32; states are float32.
    """
    rule = _Rule(q, v, spans)
    run = jax.custom_vjp(lambda *inputs: rule.run_forward(*inputs)[0])
    run.defvjp(rule.run_forward, rule.run_backward)
    return jax.vmap(run)(q, k, v, g, beta, is_first)


def compute_with_state(
    *inputs: Array, spans: RowSpans
) -> tuple[Float[Array, "B l H V"], Float32[Array, "B G R K V"]]:
    """The same without gradients; and the state after each row's last token, on every device."""
    rule = _Rule(inputs[0], inputs[2], spans)

    def run(*inputs: Array) -> tuple[Array, Array]:
        out, maps, states, _ = rule.run(inputs)
        after_spans = maps(states).reshape(spans.count, -1, *states.shape[1:])[:, -1]
        return out, spans.take_last(after_spans)

    return jax.vmap(run)(*inputs)


def compute_token(
    state: Float32[Array, "B G R K V"],
    q: Float[Array, "B 1 G K"],
    k: Float[Array, "B 1 G K"],
    v: Float[Array, "B 1 H V"],
    g: Float32[Array, "B 1 H"],
    beta: Float32[Array, "B 1 H"],
) -> tuple[Float[Array, "B 1 H V"], Float32[Array, "B G R K V"]]:
    """Output of the next token of each row, and the state after it. Args: see `compute`."""
    tokens = _prepare(q, k, v, g, beta, jnp.zeros(q.shape[:2], bool))
    inverse = jnp.ones((*tokens.g.shape, 1), v.dtype)
    out, state = chunk.run(tokens, state, inverse, v.dtype)
    return out.reshape(v.shape).astype(v.dtype), state


class _Rule:
    """Passes over the tokens of one row. Args: q, v: those of all rows, [B, l, heads, ...]."""

    def __init__(self, q: Array, v: Array, spans: RowSpans):
        self.sections = Sections.divide(spans, num_heads=v.shape[2])
        self.num_key_heads = q.shape[2]
        self.dtype = v.dtype

    def run_forward(self, *inputs: Array) -> tuple[Array, tuple[Any, ...]]:
        """Outputs, and what the backward pass needs."""
        out, maps, states, inverses = self.run(inputs)
        return out, (inputs, maps.m, states, inverses)

    def run(self, inputs: Sequence[Array]) -> tuple[Array, AffineMap, Array, Array]:
        """Outputs, the map of each section, the states that enter them, and inverses."""
        arrays = [self.sections.split(x) for x in inputs]
        maps, inverses = self._map_sections(arrays)
        states = stitching.stitch(maps, self.sections.spans)
        out = self._compute_outputs(arrays, self._group(states), inverses)
        return self.sections.join(out), maps, states, inverses

    def run_backward(self, residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
        inputs, m, states, inverses = residuals
        arrays = [self.sections.split(x) for x in inputs]
        dout = self.sections.split(dout)
        maps = AffineMap(jnp.swapaxes(m, -1, -2), self._pull_sections(arrays, dout, inverses))
        dstates = stitching.stitch(maps, self.sections.spans, is_reversed=True)
        gradients = self._differentiate(
            arrays, dout, self._group(states), self._group(dstates), inverses
        )
        return (*(self.sections.join(x) for x in gradients), None)

    def _group(self, x: Array) -> Array:
        """[P, ...] -> [groups, together, ...]."""
        return x.reshape(self.sections.num_groups, self.sections.together, *x.shape[1:])

    def _tokens(self, arrays: Sequence[Array], group: Array, index: Array) -> Tokens:
        """Chunk `index` of each section of a group."""
        return _prepare(*(x[group, :, index] for x in arrays))

    def _map_sections(self, arrays: Sequence[Array]) -> tuple[AffineMap, Array]:
        """Pass 1: the map of each section, [P, ...], and the inverse of each chunk."""
        sections = self.sections
        K = arrays[0].shape[-1]
        V = arrays[2].shape[-1]
        heads = (self.num_key_heads, arrays[2].shape[-2] // self.num_key_heads)
        T = sections.together
        # U and M as one state [M | U]: the columns of M start as the identity, and nothing is
        # added to them
        start = jnp.concatenate([jnp.eye(K), jnp.zeros((K, V))], -1)
        start = jnp.broadcast_to(start, (T, *heads, K, K + V))

        def map_group(group: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            def run_chunk(index: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
                x, inverses = done
                tokens = self._tokens(arrays, group, index)
                decays = chunk.compute_decays(tokens)
                inverse = chunk.compute_inverse(tokens, decays, self.dtype)
                update = chunk.compute_update(tokens, decays, inverse, self.dtype)
                widths = [(0, 0)] * (update.u.ndim - 1) + [(K, 0)]
                update = update._replace(u=jnp.pad(update.u, widths))
                inverses = _write(inverses, inverse, group, index)
                return chunk.update_state(x, update, self.dtype)[0], inverses

            maps, inverses = done
            x, inverses = jax.lax.fori_loop(0, sections.num_chunks, run_chunk, (start, inverses))
            return _write(maps, x, group), inverses

        empty = (
            jnp.zeros((sections.num_groups, *start.shape), jnp.float32),
            jnp.zeros(
                (sections.num_groups, sections.num_chunks, T, *heads, CHUNK_TOKENS, CHUNK_TOKENS),
                self.dtype,
            ),
        )
        maps, inverses = jax.lax.fori_loop(0, sections.num_groups, map_group, empty)
        maps = maps.reshape(-1, *maps.shape[2:])
        return AffineMap(maps[..., :K], maps[..., K:]), inverses

    def _compute_outputs(self, arrays: Sequence[Array], states: Array, inverses: Array) -> Array:
        """Pass 2: outputs [groups, together, S, C, H, V]."""

        def run_group(group: Array, out: Array) -> Array:
            def run_chunk(index: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
                x, out = done
                tokens = self._tokens(arrays, group, index)
                chunk_out, x = chunk.run(tokens, x, inverses[group, index], self.dtype)
                heads = jnp.moveaxis(chunk_out, -2, 1)
                heads = heads.reshape(*heads.shape[:2], -1, heads.shape[-1])
                return x, _write_chunk(out, heads, group, index)

            start = (states[group], out)
            return jax.lax.fori_loop(0, self.sections.num_chunks, run_chunk, start)[1]

        out = jnp.zeros(arrays[2].shape, arrays[2].dtype)
        return jax.lax.fori_loop(0, self.sections.num_groups, run_group, out)

    def _pull_sections(self, arrays: Sequence[Array], dout: Array, inverses: Array) -> Array:
        """Pass 3: gradient of the state that enters each section if that of the state that leaves
        it is 0. [P, ...]"""
        count = self.sections.num_chunks

        def pull_group(group: Array) -> Array:
            def pull_chunk(i: Array, dx: Array) -> Array:
                index = count - 1 - i
                tokens = self._tokens(arrays, group, index)
                decays = chunk.compute_decays(tokens)
                update = chunk.compute_update(tokens, decays, inverses[group, index], self.dtype)
                readout = chunk.compute_readout(tokens, decays, self.dtype)
                chunk_dout = _split_values(dout[group, :, index], self.num_key_heads)
                return chunk.pull_state(dx, chunk_dout, update, readout, self.dtype)

            state = (arrays[0].shape[-1], dout.shape[-1])
            shape = (self.sections.together, *inverses.shape[3:5], *state)
            return jax.lax.fori_loop(0, count, pull_chunk, jnp.zeros(shape, jnp.float32))

        pulled = jax.lax.map(pull_group, jnp.arange(self.sections.num_groups))
        return pulled.reshape(-1, *pulled.shape[2:])

    def _differentiate(
        self, arrays: Sequence[Array], dout: Array, states: Array, dstates: Array, inverses: Array
    ) -> list[Array]:
        """Pass 4: gradients of q, k, v, g and beta. Args: dstates: of the states that leave."""
        count = self.sections.num_chunks
        *floats, is_first = arrays

        def run_group(group: Array, gradients: list[Array]) -> list[Array]:
            def keep_state(index: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
                x, kept = done
                tokens = self._tokens(arrays, group, index)
                decays = chunk.compute_decays(tokens)
                update = chunk.compute_update(tokens, decays, inverses[group, index], self.dtype)
                return chunk.update_state(x, update, self.dtype)[0], _write(kept, x, index)

            def pull_chunk(i: Array, done: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
                dx, gradients = done
                index = count - 1 - i

                def run(
                    x: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
                ) -> tuple[Array, Array]:
                    tokens = _prepare(q, k, v, g, beta, is_first[group, :, index])
                    return chunk.run(tokens, x, inverses[group, index], self.dtype)

                _, pull = jax.vjp(run, kept[index], *(x[group, :, index] for x in floats))
                dx, *new = pull((_split_values(dout[group, :, index], self.num_key_heads), dx))
                pairs = zip(gradients, new, strict=True)
                return dx, [_write_chunk(whole, part, group, index) for whole, part in pairs]

            kept = jnp.zeros((count, *states.shape[1:]), jnp.float32)
            _, kept = jax.lax.fori_loop(0, count, keep_state, (states[group], kept))
            return jax.lax.fori_loop(0, count, pull_chunk, (dstates[group], gradients))[1]

        zeros = [jnp.zeros_like(x) for x in floats]
        return jax.lax.fori_loop(0, self.sections.num_groups, run_group, zeros)


def _prepare(q: Array, k: Array, v: Array, g: Array, beta: Array, is_first: Array) -> Tokens:
    """Tokens [T, C, heads, ...] as heads [T, heads, C, ...], q and k normalized."""
    num_key_heads, K = q.shape[-2:]

    def normalize(x: Array) -> Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPS)
        return jnp.moveaxis(x, -3, -2)

    return Tokens(
        q=normalize(q) * K**-0.5,
        k=normalize(k),
        v=_split_values(v, num_key_heads),
        g=_split_heads(g, num_key_heads),
        beta=_split_heads(beta, num_key_heads),
        is_first=is_first,
    )


def _split_heads(x: Array, num_key_heads: int) -> Array:
    """[T, C, H] -> [T, G, R, C]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_key_heads, -1), 1, -1)


def _split_values(x: Array, num_key_heads: int) -> Array:
    """[T, C, H, V] -> [T, G, R, C, V], float32."""
    T, C, _, V = x.shape
    heads = x.astype(jnp.float32).reshape(T, C, num_key_heads, -1, V)
    return jnp.moveaxis(heads, 1, -2)


def _write(whole: Array, part: Array, *indices: Array) -> Array:
    """Replaces the part at these indices of the first dims."""
    part = part.astype(whole.dtype)[(None,) * len(indices)]
    return jax.lax.dynamic_update_slice(whole, part, (*indices, *(0,) * (part.ndim - len(indices))))


def _write_chunk(whole: Array, part: Array, group: Array, index: Array) -> Array:
    """Replaces chunk `index` of each section of a group: [T, ...] of [groups, T, S, ...]."""
    part = part.astype(whole.dtype)[None, :, None]
    return jax.lax.dynamic_update_slice(whole, part, (group, 0, index, *(0,) * (whole.ndim - 3)))
