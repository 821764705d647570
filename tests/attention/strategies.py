"""Strategies by their degrees, for tests of all of them."""

from jaxsp.attention import selection
from jaxsp.attention.strategy import Strategy, combine


def make_strategy(
    *, seq: int, ulysses_degree: int | None = None, tokens: str = "ring", **options: int
) -> Strategy:
    """Ulysses among neighbors, default all of them, and an exchange of tokens between their sets.

    Args: options: fields of the exchange of tokens.
    """
    ulysses_degree = ulysses_degree or seq
    if ulysses_degree == seq:
        return combine(seq)
    degree = seq // ulysses_degree
    exchange = selection.TOKEN_EXCHANGES[tokens](degree=degree, **options)
    return combine(ulysses_degree, exchange)
