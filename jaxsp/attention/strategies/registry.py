"""All exchanges of tokens. To add one, write its file and add a line here; a value of
`attention.strategy` makes it available to users."""

from jaxsp.attention.strategies.all_gather import AllGather
from jaxsp.attention.strategies.ring import Ring
from jaxsp.attention.strategies.token_exchange import TokenExchange

TOKEN_EXCHANGES: dict[str, type[TokenExchange]] = {
    exchange.name: exchange for exchange in (Ring, AllGather)
}
"""Exchanges of tokens by name, in the order in which alternatives are listed."""
