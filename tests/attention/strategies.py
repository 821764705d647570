"""Strategies by their degrees, for tests of all of them."""

from jaxsp.attention.hybrid import OUTER_STRATEGIES, Hybrid
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.ulysses import Ulysses


def make_strategy(
    *, seq: int, ulysses_degree: int, outer_strategy: str = "ring", **options: int
) -> Strategy:
    """Ulysses among `ulysses_degree` neighbors, another strategy between them, or only one of both.

    Args: options: fields of the outer strategy.
    """
    if ulysses_degree == seq:
        return Ulysses(seq=seq)
    outer = OUTER_STRATEGIES[outer_strategy](seq=seq // ulysses_degree, **options)
    if ulysses_degree == 1:
        return outer
    return Hybrid.combine(Ulysses(seq=ulysses_degree), outer)
