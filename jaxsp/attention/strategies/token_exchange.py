"""Exchange of tokens: how devices that hold parts of the same rows attend to each other's tokens.

To add one, write a subclass of `TokenExchange` in a file of its own and add it to
`TOKEN_EXCHANGES` (registry.py); a value of `attention.strategy` makes it available.
"""

import abc
import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Bool

from jaxsp.attention.chunks.chunk_group import DeviceGroup
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    Kernel,
    KernelSettings,
    KernelWorkload,
    ScoreConfig,
)
from jaxsp.attention.kernels.residuals import AttentionFunctions
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.attention.strategies.workload import LayerWorkload
from jaxsp.core.layout import KEPT_ORDER, Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenExchange(DeviceGroup, abc.ABC):
    """A group of devices that attend to each other's tokens.

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

    @classmethod
    def from_config(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, degree: int
    ) -> "TokenExchange":
        """Makes the exchange that a config requests among `degree` devices."""
        return cls(degree=degree)

    def find_problem(self, workload: LayerWorkload) -> str | None:
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

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens. If they keep it, kernels compute whole rows, otherwise
        chunks."""
        return KEPT_ORDER

    @abc.abstractmethod
    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        """Returns what the kernel of one device computes at a time."""

    @abc.abstractmethod
    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
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

    @property
    def description(self) -> str:
        return ""

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        return workload.to_kernel_workload()

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
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
