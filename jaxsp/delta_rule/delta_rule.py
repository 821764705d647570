"""The gated delta rule on rows that devices share: see `compute`.

A device's tokens are N chunks, P sections of S chunks. Sections are independent until `stitch`
joins them.

    forward     1  the map of each chunk, and from them that of each section
                   stitch: the state that enters each section
                2  the state that enters each chunk; outputs
    backward    3  the same for gradients of states, from the last chunk to the first
                4  gradients of the maps of chunks, and of what they were computed from

The passes over states take one product for each chunk of a section, for all sections at once. JAX's
own backward pass would keep float32 arrays of all chunks.

A section maps the state X that enters it to M X + U. Maps compose: first (M1, U1), then (M2, U2) is
(M2 M1, M2 U1 + U2). So the states that enter all sections of all devices are a prefix over their
maps. Products of M do not grow: each is a product of matrices whose norms are at most 1, for
strengths from 0 to 2.

In a backward pass, gradients of states are mapped the same way, by M^T, from the last section to
the first.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxsp.core import axes
from jaxsp.delta_rule import chunk
from jaxsp.delta_rule.chunk import ChunkMap, Tokens
from jaxsp.delta_rule.spans import RowSpans

CHUNK_TOKENS = 128

SECTION_CHUNKS = 16
"""Chunks of a section, if a span has as many."""

MATRICES_AT_ONCE = 4096
MATRICES_AT_A_TIME = 1024
"""Heads times chunks whose maps are computed at a time, unless all can be at once: a loop copies
its arrays, and more at a time take memory."""

_EPS = 1e-6
"""Number added to the sum of squares before q and k are divided by its root."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sections:
    """Division of a device's tokens into sections of chunks. Spans are padded to whole ones."""

    spans: RowSpans
    num_chunks: int
    """Chunks of a section."""
    per_span: int
    """Sections of a span."""
    at_a_time: int
    """Chunks whose maps are computed at a time."""

    @classmethod
    def divide(
        cls, spans: RowSpans, *, num_heads: int, max_chunks: int | None = None
    ) -> "Sections":
        """Divides spans into sections. Args: num_heads: value heads."""
        chunks = math.ceil(spans.span_tokens / CHUNK_TOKENS)
        num_chunks = min(max_chunks or SECTION_CHUNKS, chunks)
        per_span = math.ceil(chunks / num_chunks)
        total = spans.count * per_span * num_chunks
        limit = max(1, MATRICES_AT_A_TIME // num_heads)
        if total * num_heads <= MATRICES_AT_ONCE:
            limit = total
        return cls(
            spans=spans,
            num_chunks=num_chunks,
            per_span=per_span,
            at_a_time=max(n for n in range(1, limit + 1) if total % n == 0),
        )

    @property
    def count(self) -> int:
        """Sections of this device."""
        return self.spans.count * self.per_span

    @property
    def padded_tokens(self) -> int:
        """Tokens of this device, with the padding of its spans."""
        return self.count * self.num_chunks * CHUNK_TOKENS

    def split(self, x: Array) -> Array:
        """[l, ...] -> [groups, n, C, ...], n chunks at a time. Padding is 0, which changes no
        state."""
        spans = self.spans
        padding = self.padded_tokens // spans.count - spans.span_tokens
        x = x.reshape(spans.count, spans.span_tokens, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(-1, self.at_a_time, CHUNK_TOKENS, *x.shape[2:])

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        spans = self.spans
        x = x.reshape(spans.count, -1, *x.shape[3:])[:, : spans.span_tokens]
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
    max_chunks: int | None = None,
) -> Float[Array, "B l H V"]:
    """Outputs of this device's tokens: see `chunk`. Call inside shard_map.

    Args:
        q, k: not normalized. Each head serves H / G consecutive heads of v.
        g: logarithm of the decay, at most 0. It and beta are 0 at padding.
        is_first: True at the first token of a segment.
        max_chunks: maximum number of chunks of a section; None: SECTION_CHUNKS.
    Precision: products in the dtype of v, summed in float32; states are float32.
    """
    rule = _Rule.make(q, v, spans, max_chunks)
    run = jax.custom_vjp(lambda *inputs: rule.run_forward(*inputs)[0])
    run.defvjp(rule.run_forward, rule.run_backward)
    return jax.vmap(run)(q, k, v, g, beta, is_first)


def compute_with_state(
    *inputs: Array, spans: RowSpans
) -> tuple[Float[Array, "B l H V"], Float32[Array, "B G R K V"]]:
    """Outputs as of `compute`, without gradients; and the state after each row's last token, on
    every device."""
    rule = _Rule.make(inputs[0], inputs[2], spans)
    return jax.vmap(rule.run_with_state)(*inputs)


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
    token_map = chunk.compute_map(tokens, v.dtype)
    out = _read(token_map.q, token_map.out, state, v.dtype)
    return out.reshape(v.shape), chunk.update_state(state, *token_map[:3], v.dtype)


class _Residuals(NamedTuple):
    """Arrays that the backward pass needs."""

    inputs: tuple[Array, ...]
    maps: tuple[Array, Array, Array]
    """`decay`, `d` and `q` of the maps of chunks."""
    section_m: Float32[Array, "P G R K K"]
    states: Float[Array, "groups n G R K V"]
    """States that enter chunks."""


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Passes over the tokens of one row."""

    sections: Sections
    num_key_heads: int
    dtype: Any

    @classmethod
    def make(cls, q: Array, v: Array, spans: RowSpans, max_chunks: int | None = None) -> "_Rule":
        """Makes the passes over rows of these queries and values, [B, l, heads, ...]."""
        sections = Sections.divide(spans, num_heads=v.shape[2], max_chunks=max_chunks)
        return cls(sections, num_key_heads=q.shape[2], dtype=v.dtype)

    def run_forward(self, *inputs: Array) -> tuple[Array, _Residuals]:
        """Outputs, and what the backward pass needs."""
        out, _, residuals = self._run(inputs)
        return out, residuals

    def run_with_state(self, *inputs: Array) -> tuple[Array, Array]:
        """Outputs, and the state after the row's last token."""
        out, last, _ = self._run(inputs)
        spans = self.sections.spans
        return out, spans.take_last(last.reshape(spans.count, -1, *last.shape[1:])[:, -1])

    def _run(self, inputs: tuple[Array, ...]) -> tuple[Array, Array, _Residuals]:
        """Outputs, the states that leave sections, and what the backward pass needs."""
        sections = self.sections
        arrays = [sections.split(x) for x in inputs]
        maps = jax.lax.map(lambda group: chunk.compute_map(_prepare(*group), self.dtype), arrays)
        K, V = maps.u.shape[-2:]
        # M and U as one state [M | U]: the columns of M start as the identity, and nothing is
        # added to them
        start = jnp.broadcast_to(jnp.eye(K, K + V), (sections.count, *maps.u.shape[2:-1], K + V))
        of_sections, _ = self._pass_states(start, *maps[:3])
        section_maps = AffineMap(of_sections[..., :K], of_sections[..., K:])
        entering = stitch(section_maps, sections.spans)
        last, states = self._pass_states(entering, *maps[:3], keeps=True)
        read = lambda group: _join_heads(_read(group[0], group[1], group[2], self.dtype))
        out = jax.lax.map(read, (maps.q, maps.out, states))
        residuals = _Residuals(
            inputs=inputs,
            maps=(maps.decay, maps.d, maps.q),
            section_m=section_maps.m,
            states=states,
        )
        return sections.join(out), last, residuals

    def _pass_states(
        self,
        x: Float32[Array, "P G R K X"],
        decay: Array,
        d: Array,
        u: Array,
        *,
        is_reversed: bool = False,
        keeps: bool = False,
    ) -> tuple[Array, Array]:
        """States that leave sections, and those that enter chunks.

        Args:
            x: states that enter sections. Nothing is added to columns that u does not have.
            decay, d, u: of the maps of chunks, [groups, n, ...].
            is_reversed: gradients of states, from the last chunk to the first.
            keeps: True to keep the states that enter chunks, in the compute dtype.
        """
        count = self.sections.num_chunks
        by_section = lambda x: x.reshape(-1, count, *x.shape[2:])
        maps = [by_section(x) for x in (decay, d, u)]
        columns = x.shape[-1] - u.shape[-1]

        def step(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            x, kept = done
            index = count - 1 - i if is_reversed else i
            if keeps:
                kept = jax.lax.dynamic_update_index_in_dim(kept, x.astype(self.dtype), index, 1)
            decay, d, u = (jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False) for x in maps)
            u = _pad_front(u, columns)
            return chunk.update_state(x, decay, d, u, self.dtype, is_reversed=is_reversed), kept

        kept = jnp.zeros(maps[2].shape if keeps else (), self.dtype)
        x, kept = jax.lax.fori_loop(0, count, step, (x, kept))
        return x, kept.reshape(u.shape) if keeps else kept

    def run_backward(self, residuals: _Residuals, dout: Array) -> tuple[Array | None, ...]:
        sections = self.sections
        arrays = [sections.split(x) for x in residuals.inputs]
        decay, d, q = residuals.maps
        read = functools.partial(chunk.multiply, "...ck,...cv->...kv", dtype=self.dtype)
        split_heads = lambda x: _split_values(x, self.num_key_heads)
        douts = sections.split(dout)
        du = jax.lax.map(
            lambda group: read(group[0], split_heads(group[1]), out=self.dtype), (q, douts)
        )
        start = jnp.zeros((sections.count, *du.shape[2:]), jnp.float32)
        pass_gradients = functools.partial(self._pass_states, is_reversed=True)
        of_sections, _ = pass_gradients(start, decay, d, du)
        section_maps = AffineMap(jnp.swapaxes(residuals.section_m, -1, -2), of_sections)
        leaving = stitch(section_maps, sections.spans, is_reversed=True)
        _, dstates = pass_gradients(leaving, decay, d, du, keeps=True)

        def pull(group: tuple[Array, ...]) -> list[Array]:
            *floats, is_first, x, dx, dout = group

            def compute(*floats: Array) -> ChunkMap:
                return chunk.compute_map(_prepare(*(*floats, is_first)), self.dtype)

            _, pull = jax.vjp(compute, *floats)
            dout = split_heads(dout)
            product = functools.partial(chunk.multiply, dtype=self.dtype, out=self.dtype)
            dmap = ChunkMap(
                decay=jnp.sum(dx.astype(jnp.float32) * x.astype(jnp.float32), (-2, -1)),
                d=product("...kv,...lv->...kl", -dx, x),
                u=dx,
                q=product("...cv,...kv->...ck", dout, x),
                out=dout.astype(self.dtype),
            )
            return list(pull(dmap))

        gradients = jax.lax.map(pull, (*arrays, residuals.states, dstates, douts))
        return (*(sections.join(x) for x in gradients), None)


class AffineMap(NamedTuple):
    """X -> m X + u, for any dims before the last two."""

    m: Float32[Array, "... K K"]
    u: Float32[Array, "... K V"]

    def __call__(self, x: Float32[Array, "... K V"]) -> Float32[Array, "... K V"]:
        return _compose(self.m, x) + self.u

    def after(self, first: "AffineMap") -> "AffineMap":
        """The map that applies `first`, then this one."""
        return AffineMap(_compose(self.m, first.m), self(first.u))


def _compose(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def stitch(
    maps: AffineMap, spans: RowSpans, *, is_reversed: bool = False
) -> Float32[Array, "P ... K V"]:
    """State that enters each of this device's sections. The state before the row is 0.

    Args:
        maps: of this device's sections, [P, ...], those of a span after each other.
        is_reversed: True if states come from the end of the row.
    Sends: with rows that keep their order, log2(seq) + 1 times about one map; else one map for each
        span of the row.
    """
    split = lambda x: x.reshape(spans.count, -1, *x.shape[1:])
    by_section = AffineMap(*(jnp.swapaxes(split(x), 0, 1) for x in maps))
    if is_reversed:
        by_section = AffineMap(*(jnp.flip(x, 0) for x in by_section))

    size = maps.m.shape[-1]
    identity = AffineMap(
        jnp.broadcast_to(jnp.eye(size, dtype=maps.m.dtype), by_section.m.shape[1:]),
        jnp.zeros(by_section.u.shape[1:], maps.u.dtype),
    )
    add = lambda done, section: (section.after(done), None)
    of_span, _ = jax.lax.scan(add, identity, by_section)
    if spans.row_tokens == spans.span_tokens:
        incoming = jnp.zeros_like(of_span.u)
    elif spans.layout.keeps_order:
        incoming = _stitch_devices(of_span, spans, is_reversed=is_reversed)
    else:
        # from the maps of all spans of the row
        in_order = AffineMap(*(spans.gather_in_order(x) for x in of_span))
        start = jnp.zeros_like(of_span.u[0])
        step = lambda x, span: (span(x), x)
        _, entering = jax.lax.scan(step, start, in_order, reverse=is_reversed)
        incoming = entering[spans.own_ranks()]
    _, states = jax.lax.scan(lambda x, section: (section(x), x), incoming, by_section)
    if is_reversed:
        states = jnp.flip(states, 0)
    return jnp.swapaxes(states, 0, 1).reshape(maps.u.shape)


def _stitch_devices(own: AffineMap, spans: RowSpans, *, is_reversed: bool) -> Array:
    """State that enters each device, by a prefix over devices in log2(seq) exchanges.

    Source: Hillis and Steele 1986, Data parallel algorithms.
    """
    device = jax.lax.axis_index(axes.SEQ)
    place = spans.seq - 1 - device if is_reversed else device
    done = own
    distance = 1
    while distance < spans.seq:
        before = AffineMap(
            *(spans.shift(x, distance=distance, is_reversed=is_reversed) for x in done)
        )
        both = done.after(before)
        done = AffineMap(
            *(jnp.where(place >= distance, new, old) for new, old in zip(both, done, strict=True))
        )
        distance *= 2
    return spans.shift(done.u, distance=1, is_reversed=is_reversed)


def _read(q: Array, out: Array, x: Array, dtype: Any) -> Float[Array, "T G R C V"]:
    """Outputs of chunks with incoming states x: see `ChunkMap`."""
    read = chunk.multiply("...ck,...kv->...cv", q, x, dtype=dtype)
    return (read + out.astype(jnp.float32)).astype(dtype)


def _prepare(q: Array, k: Array, v: Array, g: Array, beta: Array, is_first: Array) -> Tokens:
    """Tokens [T, C, heads, ...] as heads [T, heads, C, ...], q and k normalized."""
    num_key_heads, K = q.shape[-2:]
    by_head = lambda x: jnp.moveaxis(normalize(x), -3, -2)
    return Tokens(
        q=by_head(q) * K**-0.5,
        k=by_head(k),
        v=_split_values(v, num_key_heads),
        g=_split_heads(g, num_key_heads),
        beta=_split_heads(beta, num_key_heads),
        is_first=is_first,
    )


def _split_heads(x: Array, num_key_heads: int) -> Array:
    """[T, C, H] -> [T, G, R, C]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_key_heads, -1), 1, -1)


def _split_values(x: Array, num_key_heads: int) -> Array:
    """[T, C, H, V] -> [T, G, R, C, V]."""
    T, C, _, V = x.shape
    heads = x.reshape(T, C, num_key_heads, -1, V)
    return jnp.moveaxis(heads, 1, -2)


def _join_heads(x: Array) -> Array:
    """[T, G, R, C, V] -> [T, C, H, V]."""
    heads = jnp.moveaxis(x, -2, 1)
    return heads.reshape(*heads.shape[:2], -1, heads.shape[-1])


def normalize(x: Array) -> Array:
    """x over the root of its sum of squares, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPS)


def _pad_front(x: Array, size: int) -> Array:
    """Zeros before the last dim."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(size, 0)])
