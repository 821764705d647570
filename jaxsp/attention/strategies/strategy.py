"""A strategy: an exchange of heads among neighbors, times an exchange of tokens between their sets.

With 8 devices along `seq`, Ulysses of 4 and a ring of 2, devices 0 to 3 exchange heads among
themselves, and so do 4 to 7; then device 0 forms a ring with 4, 1 with 5, and so on. Ulysses of 8
leaves each device whole rows, and Ulysses of 1 exchanges nothing, so that the ring has 8 devices.

Source: Fang and Zhao 2024, arXiv:2405.07719 (USP).
"""

import dataclasses
from typing import Any

from jaxsp.attention.kernels.kernel import KernelWorkload
from jaxsp.attention.strategies import nodes
from jaxsp.attention.strategies.token_exchange import TokenExchange, WholeRows
from jaxsp.attention.strategies.ulysses import Ulysses
from jaxsp.attention.strategies.workload import LayerWorkload
from jaxsp.core.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way for the devices along `seq` to share attention: see `combine`."""

    heads: Ulysses
    tokens: TokenExchange

    @property
    def seq(self) -> int:
        """Number of devices that share rows."""
        return self.heads.degree * self.tokens.degree

    @property
    def label(self) -> str:
        """Name in tables. Example: `ulysses 4 x ring`."""
        if self.tokens.degree == 1:
            return self.heads.name
        neighbors = f"{self.heads.name} {self.heads.degree} x " if self.heads.degree > 1 else ""
        return neighbors + self.tokens.name

    @property
    def description(self) -> str:
        """Name in sentences, with degrees. Example: `Ulysses of 4 x ring of 2`."""
        return " x ".join(filter(None, (self.heads.description, self.tokens.description)))

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields of the config's attention that request this strategy."""
        if self.tokens.degree == 1:
            return {"strategy": self.heads.name}
        fields = {"strategy": self.tokens.name, "ulysses_degree": self.heads.degree}
        return fields | self.tokens.config_fields

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens."""
        return self.tokens.layout

    def find_problem(self, workload: LayerWorkload) -> str | None:
        """Returns an error message if the options do not fit the heads; None if they do."""
        return self.tokens.find_problem(self.heads.exchange_workload(workload))

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        """Returns what the kernel of one device computes at a time."""
        own = self.tokens.kernel_workload(self.heads.exchange_workload(workload))
        return dataclasses.replace(own, ulysses_degree=self.heads.degree)

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        """Returns the bytes that one device sends to others per layer and microbatch, forward and
        backward, by collective operation."""
        exchanged = self.heads.exchange_workload(workload)
        return self.heads.sent_bytes(workload) | self.tokens.sent_bytes(exchanged)

    def device_groups(self, operation: str) -> list[list[int]]:
        """Returns the groups of devices that a collective operation connects, as positions along
        `seq`."""
        return self.heads.groups if operation == nodes.ALL_TO_ALL else self.tokens.groups

    def communicators(self) -> list[list[int]]:
        """Returns the groups in which the first device communicates, as positions along `seq`."""
        return [self.heads.groups[0], self.tokens.groups[0]]


def combine(ulysses_degree: int, tokens: TokenExchange | None = None) -> Strategy:
    """Ulysses among `ulysses_degree` neighbors; every neighbor is in a group of its own that
    exchanges tokens. Args: tokens: None: whole rows."""
    tokens = dataclasses.replace(tokens or WholeRows(degree=1), stride=ulysses_degree)
    return Strategy(heads=Ulysses(degree=ulysses_degree, num_sets=tokens.degree), tokens=tokens)
