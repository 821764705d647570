"""The spans of a row that its devices hold, the exchange of what one span needs of others, and a
convolution over them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jaxsp.core import axes
from jaxsp.core.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpans:
    """Division of a row into spans of consecutive tokens, equally many and equally long on each of
    the devices along `seq`. A device has one span if rows keep their order."""

    seq: int
    layout: Layout
    tokens_per_device: int

    @property
    def row_tokens(self) -> int:
        return self.seq * self.tokens_per_device

    @property
    def span_tokens(self) -> int:
        if self.layout.keeps_order:
            return self.tokens_per_device
        return math.gcd(self.tokens_per_device, self.layout.chunk_tokens(self.row_tokens))

    @property
    def count(self) -> int:
        """Number of spans of a device."""
        return self.tokens_per_device // self.span_tokens

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """Place in the row of each span, [seq, count]."""
        order = self.layout.token_order(self.row_tokens)
        first = order.reshape(self.seq, self.count, self.span_tokens)[..., 0]
        return first // self.span_tokens

    def own_tokens(self) -> Int32[Array, "l"]:
        """Number within the row of each of this device's tokens, inside shard_map."""
        device = jax.lax.axis_index(axes.SEQ) if self.seq > 1 else jnp.int32(0)
        places = device * self.tokens_per_device + jnp.arange(self.tokens_per_device)
        return self.layout.tokens_in_places(places.astype(jnp.int32), row_tokens=self.row_tokens)

    def shift(self, array: Array, *, distance: int, is_reversed: bool = False) -> Array:
        """Sends an array of each device to the one `distance` further along the row; 0 where there
        is none before. For rows that keep their order."""
        assert self.layout.keeps_order
        step = -distance if is_reversed else distance
        pairs = [(i, i + step) for i in range(self.seq) if 0 <= i + step < self.seq]
        return jax.lax.ppermute(array, axes.SEQ, pairs)

    def gather_in_order(self, array: Array) -> Array:
        """All spans' entries, [count, ...] on each device, in the order of the row."""
        if self.seq > 1:
            array = jax.lax.all_gather(array, axes.SEQ)
            array = array.reshape(-1, *array.shape[2:])
        return array[jnp.asarray(np.argsort(self.ranks.ravel()))]

    def own_ranks(self) -> Int32[Array, "count"]:
        """Place in the row of each of this device's spans, inside shard_map."""
        ranks = jnp.asarray(self.ranks, jnp.int32)
        return ranks[jax.lax.axis_index(axes.SEQ)] if self.seq > 1 else ranks[0]

    def halo(self, x_BlX: Array, *, size: int) -> Array:
        """The `size` tokens before each span, [B, count, size, X]; 0 before the row."""
        assert size <= self.span_tokens, (size, self)
        B, _, X = x_BlX.shape
        tails = x_BlX.reshape(B, self.count, self.span_tokens, X)[:, :, -size:]
        if self.row_tokens == self.span_tokens:
            return jnp.zeros_like(tails)
        if self.layout.keeps_order:
            return self.shift(tails, distance=1)
        in_order = self.gather_in_order(jnp.moveaxis(tails, 1, 0))
        before = jnp.concatenate([jnp.zeros_like(in_order[:1]), in_order[:-1]])
        return jnp.moveaxis(before[self.own_ranks()], 0, 1)

    def take_tokens(self, x_BlX: Array, tokens_Bt: Int32[Array, "B t"]) -> Array:
        """Entries of some tokens of each row, [B, t, X], on every device; 0 for tokens that are
        not in the row. Args: tokens_Bt: numbers within the row."""
        is_own_Btl = tokens_Bt[:, :, None] == self.own_tokens()[None, None]
        places_Bt = jnp.argmax(is_own_Btl, axis=-1)
        own_BtX = jnp.take_along_axis(x_BlX, places_Bt[..., None], axis=1)
        is_own_Bt1 = is_own_Btl.any(-1, keepdims=True)
        return self.sum_devices(jnp.where(is_own_Bt1, own_BtX, jnp.zeros((), x_BlX.dtype)))

    def take_last(self, x: Array) -> Array:
        """Entry of the row's last span, on every device. Shapes: [count, ...] -> [...]."""
        is_last = self.own_ranks() == self.seq * self.count - 1
        is_last = jnp.expand_dims(is_last, range(1, x.ndim))
        return self.sum_devices(jnp.where(is_last, x, jnp.zeros((), x.dtype)).sum(0))

    def sum_devices(self, x: Array) -> Array:
        """Sum over the devices that share the row."""
        return jax.lax.psum(x, axes.SEQ) if self.seq > 1 else x


@dataclasses.dataclass(frozen=True)
class OwnSegments:
    """Places of this device's tokens in their segments. Shapes: [B, l]."""

    age_Bl: Int32[Array, "B l"]
    """Tokens of the segment before the token; at padding, any number."""
    inside_Bl: Bool[Array, "B l"]
    """False at padding."""

    @property
    def is_first_Bl(self) -> Bool[Array, "B l"]:
        """True at the first token of a segment."""
        return self.inside_Bl & (self.age_Bl == 0)


def find_slots(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], tokens_l: Int32[Array, "l"]
) -> Int32[Array, "B l"]:
    """Slot of the segment of each token; -1 at padding. Args: see `find_segments`."""
    tokens_1l1 = tokens_l[None, :, None]
    ends_BM = starts_BM + lengths_BM
    is_inside_BlM = (starts_BM[:, None] <= tokens_1l1) & (tokens_1l1 < ends_BM[:, None])
    slots_M = jnp.arange(starts_BM.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(is_inside_BlM, slots_M[None, None], -1), axis=-1)


def find_segments(
    starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], tokens_l: Int32[Array, "l"]
) -> OwnSegments:
    """Places of tokens in their segments. Args: tokens_l: the tokens' numbers within the row."""
    is_begun_BlM = (starts_BM[:, None] <= tokens_l[None, :, None]) & (lengths_BM > 0)[:, None]
    ends_BM = starts_BM + lengths_BM
    start_Bl, end_Bl = (
        jnp.max(jnp.where(is_begun_BlM, x_BM[:, None], -1), axis=-1)
        for x_BM in (starts_BM, ends_BM)
    )
    return OwnSegments(tokens_l[None] - start_Bl, tokens_l[None] < end_Bl)


def convolve(
    x_BlX: Float[Array, "B l X"],
    filters_XW: Float[Array, "X W"],
    segments: OwnSegments,
    spans: RowSpans,
) -> Float[Array, "B l X"]:
    """silu of a filter of each channel over a token and the W - 1 before it in its segment.

    Precision: products are summed in float32, and rounded before silu, as in transformers.
    """
    B, l, X = x_BlX.shape
    W = filters_XW.shape[1]
    shape = (B, spans.count, spans.span_tokens)
    halo = spans.halo(x_BlX, size=W - 1)
    padded = jnp.concatenate([halo, x_BlX.reshape(*shape, X)], axis=2)
    # Otherwise the backward pass keeps float32 arrays of all tokens, several times
    filtered = jax.checkpoint(_filter)(padded, filters_XW, segments.age_Bl.reshape(shape))
    return filtered.reshape(B, l, X)


def convolve_token(
    before_BtX: Float[Array, "B t X"], x_B1X: Float[Array, "B 1 X"], filters_XW: Float[Array, "X W"]
) -> tuple[Float[Array, "B 1 X"], Float[Array, "B t X"]]:
    """Convolution of the next token of each row, and the tokens before the one after it.

    Args: before_BtX: the W - 1 tokens before; 0 before the row.
    """
    padded = jnp.concatenate([before_BtX, x_B1X], axis=1)
    age = jnp.full((len(x_B1X), 1, 1), filters_XW.shape[1], jnp.int32)
    return _filter(padded[:, None], filters_XW, age)[:, 0], padded[:, 1:]


def _filter(
    padded: Float[Array, "B n t X"], filters_XW: Float[Array, "X W"], age: Int32[Array, "B n s"]
) -> Float[Array, "B n s X"]:
    """The convolution of n spans of s tokens, each after the W - 1 before it."""
    W = filters_XW.shape[1]
    out = jnp.zeros((*age.shape, padded.shape[-1]), jnp.float32)
    for back in range(W):
        first = W - 1 - back
        tokens = padded[:, :, first : first + age.shape[-1]].astype(jnp.float32)
        # In float32 and broadcast, so that the filters' gradients are summed over tokens in float32
        tap_X = filters_XW[:, first].astype(jnp.float32)
        out += jnp.where((age >= back)[..., None], tokens * jnp.broadcast_to(tap_X, out.shape), 0)
    rounded = out.astype(padded.dtype).astype(jnp.float32)
    return jax.nn.silu(rounded).astype(padded.dtype)
