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
from jaxsp.config.schema import AttentionConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the devices of a group share attention."""

    seq: int
    """Devices of a group."""
    ulysses_degree: int
    """Neighbours that share the heads."""
    outer_strategy: Literal["ring", "all_gather"] = "ring"
    """How keys come to queries, where degree is more than 1."""
    kv_heads_per_gather: int = 1
    """K/V heads that are gathered at a time."""

    @property
    def outer_degree(self) -> int:
        """Places that hold different tokens after the neighbours' swap: the degree of the rows' layout."""
        return self.seq // self.ulysses_degree

    @property
    def name(self) -> str:
        """ulysses, ring, gather or hybrid."""
        if self.outer_degree == 1:
            return "ulysses"
        return self.outer_strategy if self.ulysses_degree == 1 else "hybrid"

    @property
    def description(self) -> str:
        """The kind as people read it, such as `Ulysses of 4 x ring of 2`."""
        lots = f" by {self.kv_heads_per_gather}" * (self.outer_strategy == "all_gather")
        parts = [f"Ulysses of {self.ulysses_degree}"] * (self.ulysses_degree > 1) + [
            f"{self.outer_strategy} of {self.outer_degree}{lots}"
        ] * (self.outer_degree > 1)
        return " x ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWorkload:
    """What a layer's attention is of, on each device."""

    num_rows: int
    """That a group holds together."""
    tokens_per_device: int
    """Tokens of a row that one device holds."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an element of q, k, v and the output."""
    remat: str = "save_attention"
    """none, attention or full."""


def local_heads(strategy: Strategy, *, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Query and K/V heads of a device while it attends."""
    repeats = ulysses.kv_repeats(num_kv_heads=num_kv_heads, seq=strategy.ulysses_degree)
    return num_heads // strategy.ulysses_degree, num_kv_heads * repeats // strategy.ulysses_degree


def sent_bytes(strategy: Strategy, workload: LayerWorkload) -> dict[str, int]:
    """Bytes that one device sends to others for a layer in a turn, forward and backward, by kind of collective."""
    found = {}
    if strategy.ulysses_degree > 1:
        found["all-to-all"] = ulysses.sent_bytes(
            seq=strategy.ulysses_degree, **dataclasses.asdict(workload)
        )
    if strategy.outer_degree > 1:
        heads, kv_heads = local_heads(
            strategy, num_heads=workload.num_heads, num_kv_heads=workload.num_kv_heads
        )
        of = (
            ring.sent_bytes
            if strategy.outer_strategy == "ring"
            else functools.partial(
                all_gather.sent_bytes, kv_heads_per_gather=strategy.kv_heads_per_gather
            )
        )
        found |= of(
            degree=strategy.outer_degree,
            num_rows=workload.num_rows,
            # the neighbours have swapped
            tokens_per_device=workload.tokens_per_device * strategy.ulysses_degree,
            num_kv_heads=kv_heads,
            head_dim=workload.head_dim,
            itemsize=workload.itemsize,
            remat=workload.remat,
        )
    return found


def legal_ulysses_degrees(*, seq: int, num_heads: int) -> list[int]:
    """How many neighbours can share the heads, from the whole group to each device by itself."""
    return [n for n in range(seq, 0, -1) if seq % n == 0 and num_heads % n == 0]


def list_strategies(
    *,
    seq: int,
    num_heads: int,
    num_kv_heads: int,
    outer_strategy: Literal["ring", "all_gather"],
    kv_heads_per_gather: int | None,
) -> Iterator[Strategy]:
    """Every way in which these heads can be shared, from Ulysses alone to none."""
    for inner in legal_ulysses_degrees(seq=seq, num_heads=num_heads):
        kind = Strategy(
            seq=seq,
            ulysses_degree=inner,
            outer_strategy=outer_strategy,
            kv_heads_per_gather=kv_heads_per_gather or 1,
        )
        own = local_heads(kind, num_heads=num_heads, num_kv_heads=num_kv_heads)[1]
        if (
            outer_strategy == "ring"
            or kind.outer_degree == 1
            or own % kind.kv_heads_per_gather == 0
        ):
            yield kind


def choose(
    requested: AttentionConfig, workload: LayerWorkload, *, seq: int, window: int | None
) -> Strategy:
    """The kind that a config asks for, or that `auto` means: Ulysses where it can be, else what sends least.

    A group of one device shares nothing, whatever is asked for: so a config can be tried on any mesh.

    Args:   window: the model's, where it keeps any token of a row from seeing another.
    Raises: UserError for heads that cannot be shared so, and for a window that the kind cannot serve.
    """
    heads = {"num_heads": workload.num_heads, "num_kv_heads": workload.num_kv_heads}
    if seq == 1:
        return Strategy(seq=1, ulysses_degree=1)
    fits = [n for n in range(1, workload.num_heads + 1) if workload.num_heads % n == 0]
    kind, outer = requested.strategy, requested.outer_strategy
    if kind == "ulysses" and workload.num_heads % seq:
        instead = ", or attention.strategy=auto" * (window is None)
        raise UserError(
            f"mesh.seq = {seq}: {workload.num_heads} query heads cannot be shared by {seq} devices, and attention.strategy is "
            f"ulysses. Use mesh.seq={errors.format_choices(fits)}{instead}."
        )
    if window is not None and (
        requested.strategy not in ("auto", "ulysses") or workload.num_heads % seq
    ):
        among = (
            requested.strategy
            if requested.strategy != "auto"
            else f"{requested.outer_strategy} or hybrid"
        )
        raise UserError(
            f"attention.strategy = {requested.strategy}: the model's tokens see the last {window:,} alone, and {among} attention has no "
            f"windows. Use attention.strategy=ulysses with mesh.seq={errors.format_choices(fits)}."
        )
    if outer == "all_gather" and kind in ("ulysses", "ring"):
        raise UserError(
            f"attention.outer_strategy = all_gather: is of hybrid attention, and attention.strategy is {kind}. Use attention.outer_strategy=ring, which "
            "changes nothing here, or attention.strategy=hybrid or all_gather."
        )
    if requested.ulysses_degree is not None and kind != "hybrid":
        raise UserError(
            f"attention.ulysses_degree = {requested.ulysses_degree}: is of hybrid attention, and attention.strategy is {kind}. Use "
            "attention.ulysses_degree=null, or attention.strategy=hybrid."
        )
    if kind in ("ring", "all_gather"):
        found = [
            Strategy(
                seq=seq,
                ulysses_degree=1,
                outer_strategy=kind,
                kv_heads_per_gather=requested.kv_heads_per_gather or 1,
            )
        ]
    elif kind == "hybrid":
        found = _hybrid_candidates(requested, workload, seq)
    else:
        found = list(
            list_strategies(seq=seq, outer_strategy=outer, kv_heads_per_gather=None, **heads)
        )
        found = [one for one in found if one.outer_degree == 1] or found
    lot = requested.kv_heads_per_gather or 1
    found = [one for one in found if local_heads(one, **heads)[1] % lot == 0] or found
    best = min(
        found, key=lambda one: (sum(sent_bytes(one, workload).values()), -one.ulysses_degree)
    )
    return _with_kv_heads_per_gather(best, requested, workload)


def _hybrid_candidates(
    requested: AttentionConfig, workload: LayerWorkload, seq: int
) -> list[Strategy]:
    legal = sorted(
        n for n in legal_ulysses_degrees(seq=seq, num_heads=workload.num_heads) if 1 < n < seq
    )
    if not legal:
        raise UserError(
            f"attention.strategy = hybrid: no number between 1 and mesh.seq = {seq} divides both that and {workload.num_heads} query "
            "heads. Use attention.strategy=auto."
        )
    if requested.ulysses_degree is not None and requested.ulysses_degree not in legal:
        raise UserError(
            f"attention.ulysses_degree = {requested.ulysses_degree}: has to divide mesh.seq = {seq} and {workload.num_heads} query heads, "
            f"and to be neither 1 (attention.strategy=ring or all_gather) nor {seq} (ulysses). Use {errors.format_choices(legal)}, or null."
        )
    return [
        Strategy(seq=seq, ulysses_degree=n, outer_strategy=requested.outer_strategy)
        for n in legal
        if requested.ulysses_degree in (None, n)
    ]


def _with_kv_heads_per_gather(
    strategy: Strategy, requested: AttentionConfig, workload: LayerWorkload
) -> Strategy:
    """The kind with the K/V heads that are gathered at a time. Raises: UserError where they do not divide, or none are."""
    lot = requested.kv_heads_per_gather
    if lot is None:
        return strategy
    if strategy.outer_degree == 1 or strategy.outer_strategy != "all_gather":
        raise UserError(
            f"attention.kv_heads_per_gather = {lot}: is of all_gather attention, and this is {strategy.description}. Use "
            f"attention.kv_heads_per_gather=null, or {'attention.outer_strategy' if strategy.name == 'hybrid' else 'attention.strategy'}=all_gather."
        )
    own = local_heads(strategy, num_heads=workload.num_heads, num_kv_heads=workload.num_kv_heads)[1]
    if own % lot:
        legal = [n for n in range(1, own + 1) if own % n == 0]
        raise UserError(
            f"attention.kv_heads_per_gather = {lot}: has to divide the K/V heads of a device, which are {own} here. Use "
            f"{errors.format_choices(legal)}."
        )
    return dataclasses.replace(strategy, kv_heads_per_gather=lot)
