"""Incoming states of the sections of a row, from what each section does to any state.

A section maps the state X that enters it to M X + U. Maps compose: first (M1, U1), then (M2, U2) is
(M2 M1, M2 U1 + U2). So the states that enter all sections of all devices are a prefix over their
maps. Products of M do not grow: each is a product of matrices whose norms are at most 1, for
strengths from 0 to 2.

In a backward pass, gradients of states are mapped the same way, by M^T, from the last section to
the first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxsp.core import axes
from jaxsp.delta_rule.spans import RowSpans


class AffineMap(NamedTuple):
    """X -> m X + u, for any dims before the last two."""

    m: Float32[Array, "... K K"]
    u: Float32[Array, "... K V"]

    def __call__(self, x: Float32[Array, "... K V"]) -> Float32[Array, "... K V"]:
        return _multiply(self.m, x) + self.u

    def after(self, first: "AffineMap") -> "AffineMap":
        """The map that applies `first`, then this one."""
        return AffineMap(_multiply(self.m, first.m), self(first.u))


def _multiply(a: Array, b: Array) -> Array:
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
