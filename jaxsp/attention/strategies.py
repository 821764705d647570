"""The kinds of attention by which a group's devices share rows, and what each sends.

Devices along `seq` are numbered through. `inner` neighbours swap shares of the row for shares of the heads (Ulysses), and so
hold the same tokens; between these, over `degree` places, queries stay and keys come to them (ring or gather):

    kind      inner   degree
    ulysses   seq     1
    ring      1       seq
    gather    1       seq
    hybrid    1 < inner < seq, degree = seq / inner
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

from jaxsp.attention import all_gather, ring, ulysses
from jaxsp.config import schema
from jaxsp.core import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How the devices of a group share attention."""

    seq: int
    """Devices of a group."""
    inner: int
    """Neighbours that share the heads."""
    outer: Literal["ring", "gather"] = "ring"
    """How keys come to queries, where degree is more than 1."""
    kv_heads: int = 1
    """K/V heads that are gathered at a time."""

    @property
    def degree(self) -> int:
        """Places that hold different tokens after the neighbours' swap: the degree of the rows' layout."""
        return self.seq // self.inner

    @property
    def name(self) -> str:
        """ulysses, ring, gather or hybrid."""
        if self.degree == 1:
            return "ulysses"
        return self.outer if self.inner == 1 else "hybrid"

    @property
    def words(self) -> str:
        """The kind as people read it, such as `Ulysses of 4 x ring of 2`."""
        lots = f" by {self.kv_heads}" * (self.outer == "gather")
        parts = [f"Ulysses of {self.inner}"] * (self.inner > 1) + [f"{self.outer} of {self.degree}{lots}"] * (self.degree > 1)
        return " x ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What a layer's attention is of, on each device."""

    rows: int
    """That a group holds together."""
    share_tokens: int
    """Tokens of a row that one device holds."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an element of q, k, v and the output."""
    remat: str = "attention"
    """none, attention or full."""


def own_heads(kind: Kind, *, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Query and K/V heads of a device while it attends."""
    repeats = ulysses.kv_repeats(num_kv_heads=num_kv_heads, seq=kind.inner)
    return num_heads // kind.inner, num_kv_heads * repeats // kind.inner


def cost(kind: Kind, layer: Layer) -> dict[str, int]:
    """Bytes that one device sends to others for a layer in a turn, forward and backward, by kind of collective."""
    found = {}
    if kind.inner > 1:
        found["all-to-all"] = ulysses.cost(seq=kind.inner, **dataclasses.asdict(layer))
    if kind.degree > 1:
        heads, kv_heads = own_heads(kind, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads)
        of = ring.cost if kind.outer == "ring" else functools.partial(all_gather.cost, kv_heads=kind.kv_heads)
        found |= of(
            degree=kind.degree,
            rows=layer.rows,
            # the neighbours have swapped
            share_tokens=layer.share_tokens * kind.inner,
            num_kv_heads=kv_heads,
            head_dim=layer.head_dim,
            itemsize=layer.itemsize,
            remat=layer.remat,
        )
    return found


def inner_degrees(*, seq: int, num_heads: int) -> list[int]:
    """How many neighbours can share the heads, from the whole group to each device by itself."""
    return [n for n in range(seq, 0, -1) if seq % n == 0 and num_heads % n == 0]


def possible(
    *, seq: int, num_heads: int, num_kv_heads: int, outer: Literal["ring", "gather"], kv_heads: int | None
) -> Iterator[Kind]:
    """Every way in which these heads can be shared, from Ulysses alone to none."""
    for inner in inner_degrees(seq=seq, num_heads=num_heads):
        kind = Kind(seq=seq, inner=inner, outer=outer, kv_heads=kv_heads or 1)
        own = own_heads(kind, num_heads=num_heads, num_kv_heads=num_kv_heads)[1]
        if outer == "ring" or kind.degree == 1 or own % kind.kv_heads == 0:
            yield kind


def choose(asked: schema.Attention, layer: Layer, *, seq: int, window: int | None) -> Kind:
    """The kind that a config asks for, or that `auto` means: Ulysses where it can be, else what sends least.

    A group of one device shares nothing, whatever is asked for: so a config can be tried on any mesh.

    Args:   window: the model's, where it keeps any token of a row from seeing another.
    Raises: UserError for heads that cannot be shared so, and for a window that the kind cannot serve.
    """
    heads = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}
    if seq == 1:
        return Kind(seq=1, inner=1)
    fits = [n for n in range(1, layer.num_heads + 1) if layer.num_heads % n == 0]
    kind, outer = asked.kind, asked.outer
    if kind == "ulysses" and layer.num_heads % seq:
        instead = ", or attention.kind=auto" * (window is None)
        raise errors.UserError(
            f"mesh.seq = {seq}: {layer.num_heads} query heads cannot be shared by {seq} devices, and attention.kind is "
            f"ulysses. Use mesh.seq={errors.choices(fits)}{instead}."
        )
    if window is not None and (asked.kind not in ("auto", "ulysses") or layer.num_heads % seq):
        among = asked.kind if asked.kind != "auto" else f"{asked.outer} or hybrid"
        raise errors.UserError(
            f"attention.kind = {asked.kind}: the model's tokens see the last {window:,} alone, and {among} attention has no "
            f"windows. Use attention.kind=ulysses with mesh.seq={errors.choices(fits)}."
        )
    if outer == "gather" and kind in ("ulysses", "ring"):
        raise errors.UserError(
            f"attention.outer = gather: is of hybrid attention, and attention.kind is {kind}. Use attention.outer=ring, which "
            "changes nothing here, or attention.kind=hybrid or gather."
        )
    if asked.inner_degree is not None and kind != "hybrid":
        raise errors.UserError(
            f"attention.inner_degree = {asked.inner_degree}: is of hybrid attention, and attention.kind is {kind}. Use "
            "attention.inner_degree=null, or attention.kind=hybrid."
        )
    if kind in ("ring", "gather"):
        found = [Kind(seq=seq, inner=1, outer=kind, kv_heads=asked.kv_heads_per_gather or 1)]
    elif kind == "hybrid":
        found = _hybrids(asked, layer, seq)
    else:
        found = list(possible(seq=seq, outer=outer, kv_heads=None, **heads))
        found = [one for one in found if one.degree == 1] or found
    lot = asked.kv_heads_per_gather or 1
    found = [one for one in found if own_heads(one, **heads)[1] % lot == 0] or found
    best = min(found, key=lambda one: (sum(cost(one, layer).values()), -one.inner))
    return _with_lots(best, asked, layer)


def _hybrids(asked: schema.Attention, layer: Layer, seq: int) -> list[Kind]:
    legal = sorted(n for n in inner_degrees(seq=seq, num_heads=layer.num_heads) if 1 < n < seq)
    if not legal:
        raise errors.UserError(
            f"attention.kind = hybrid: no number between 1 and mesh.seq = {seq} divides both that and {layer.num_heads} query "
            "heads. Use attention.kind=auto."
        )
    if asked.inner_degree is not None and asked.inner_degree not in legal:
        raise errors.UserError(
            f"attention.inner_degree = {asked.inner_degree}: has to divide mesh.seq = {seq} and {layer.num_heads} query heads, "
            f"and to be neither 1 (attention.kind=ring or gather) nor {seq} (ulysses). Use {errors.choices(legal)}, or null."
        )
    return [Kind(seq=seq, inner=n, outer=asked.outer) for n in legal if asked.inner_degree in (None, n)]


def _with_lots(kind: Kind, asked: schema.Attention, layer: Layer) -> Kind:
    """The kind with the K/V heads that are gathered at a time. Raises: UserError where they do not divide, or none are."""
    lot = asked.kv_heads_per_gather
    if lot is None:
        return kind
    if kind.degree == 1 or kind.outer != "gather":
        raise errors.UserError(
            f"attention.kv_heads_per_gather = {lot}: is of gather attention, and this is {kind.words}. Use "
            f"attention.kv_heads_per_gather=null, or {'attention.outer' if kind.name == 'hybrid' else 'attention.kind'}=gather."
        )
    own = own_heads(kind, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads)[1]
    if own % lot:
        legal = [n for n in range(1, own + 1) if own % n == 0]
        raise errors.UserError(
            f"attention.kv_heads_per_gather = {lot}: has to divide the K/V heads of a device, which are {own} here. Use "
            f"{errors.choices(legal)}."
        )
    return dataclasses.replace(kind, kv_heads=lot)
