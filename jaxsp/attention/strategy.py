"""A strategy: an exchange of heads among neighbors, times an exchange of tokens between their sets.

With 8 devices along `seq`, Ulysses of 4 and a ring of 2, devices 0 to 3 exchange heads among
themselves, and so do 4 to 7; then device 0 forms a ring with 4, 1 with 5, and so on. Ulysses of 8
leaves each device whole rows, and Ulysses of 1 exchanges nothing, so that the ring has 8 devices.

To add an exchange of tokens, write a subclass of `TokenExchange` in a file of its own and add it to
`selection.TOKEN_EXCHANGES`; a value of `attention.strategy` makes it available.

Source: Fang and Zhao 2024, arXiv:2405.07719 (USP).
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxsp.attention import nodes
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    AttentionWorkload,
    Kernel,
    KernelSettings,
    ScoreConfig,
)
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.ulysses import Ulysses
from jaxsp.core import axes
from jaxsp.core.layout import KEPT_ORDER, Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenExchange(abc.ABC):
    """Devices that hold different tokens of the same rows, for the same heads, and attend to each
    other's tokens.

    Workloads are those of the heads that a device has after the exchange of heads.
    """

    name: ClassVar[str]
    """Value of attention.strategy."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of the config's attention that only exchanges with them use."""
    is_automatic: ClassVar[bool] = True
    """True if attention.strategy=auto considers it."""
    has_ring_steps: ClassVar[bool] = False
    """True if the devices of a group wait for each other at each hop of a ring."""

    degree: int
    """Number of devices in a group."""
    stride: int = 1
    """Distance along `seq` between two devices of a group. The neighbors between them hold the same
    tokens for other heads."""

    @property
    def groups(self) -> list[list[int]]:
        """All groups, as positions along the mesh's `seq`."""
        size = self.degree * self.stride
        return [list(range(first, size, self.stride)) for first in range(self.stride)]

    @property
    def index(self) -> Array:
        """Position of this device in its group, inside shard_map."""
        if self.degree == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(axes.SEQ) // self.stride

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens. If they keep it, kernels compute whole rows, otherwise
        chunks."""
        return KEPT_ORDER

    def chunk_numbers(self, device: Array) -> Int32[Array, "k"]:
        """Numbers of the layout's chunks that a device of the group holds."""
        index_k = jnp.arange(self.layout.chunks_per_device, dtype=jnp.int32)
        return index_k * self.degree + jnp.where(index_k % 2, self.degree - 1 - device, device)

    @classmethod
    def from_config(
        cls, requested: AttentionConfig, workload: AttentionWorkload, *, degree: int
    ) -> "TokenExchange":
        """Makes the exchange that a config requests among `degree` devices."""
        return cls(degree=degree)

    def find_problem(self, workload: AttentionWorkload) -> str | None:
        """Returns an error message if the options do not fit the heads; None if they do."""
        return None

    @property
    def description(self) -> str:
        """Name in sentences, with the degree. Example: `ring of 2`."""
        return f"{self.name} of {self.degree}"

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields of the config's attention, except strategy and ulysses_degree, that request it."""
        return {}

    @abc.abstractmethod
    def kernel_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        """Returns what the kernel of one device computes at a time."""

    @abc.abstractmethod
    def sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        """Returns the bytes that one device sends to others per layer and microbatch, forward and
        backward, by collective operation."""

    @abc.abstractmethod
    def make_functions(
        self, kernel: Kernel, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        """Returns the forward and backward pass of one kind of layer, inside shard_map."""

    def make_tables(
        self, kernel: Kernel, settings: KernelSettings, rows: Segments, row_tokens: int
    ) -> Any:
        """Returns what all layers of a microbatch share about the segments; None for nothing.
        Called inside shard_map."""
        return None

    @abc.abstractmethod
    def segment_mask(
        self, starts_BM: Array, lengths_BM: Array, num_tokens: int
    ) -> Bool[Array, "B l"]:
        """True for this device's tokens that belong to a segment."""

    def on_one_device(self) -> "TokenExchange | None":
        """Returns an exchange that computes chunks in the same way on one device, for tests of a
        kernel; None if this one computes no chunks."""
        return None


class WholeRows(TokenExchange):
    """Each device has all tokens of its rows: nothing is exchanged."""

    name = "whole_rows"
    description = ""

    def kernel_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        return workload

    def sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        return {}

    def make_functions(
        self, kernel: Kernel, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        return kernel.make_row_functions(settings, score)

    def make_tables(
        self, kernel: Kernel, settings: KernelSettings, rows: Segments, row_tokens: int
    ) -> Any:
        return kernel.make_tables(settings, rows, row_tokens)

    def segment_mask(
        self, starts_BM: Array, lengths_BM: Array, num_tokens: int
    ) -> Bool[Array, "B L"]:
        return segments.segment_mask(starts_BM, lengths_BM, num_tokens)


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

    def find_problem(self, workload: AttentionWorkload) -> str | None:
        """Returns an error message if the options do not fit the heads; None if they do."""
        return self.tokens.find_problem(self.heads.exchange_workload(workload))

    def kernel_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        """Returns what the kernel of one device computes at a time."""
        return self.tokens.kernel_workload(self.heads.exchange_workload(workload))

    def sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
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
