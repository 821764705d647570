"""Hybrid: neighbors exchange heads by Ulysses, and a ring or an all-gather connects neighborhoods.

With 8 devices along `seq`, Ulysses of 4 and a ring of 2, devices 0 to 3 exchange heads among
themselves, and so do 4 to 7; then device 0 forms a ring with 4, 1 with 5, and so on.

Source: Fang and Zhao 2024, arXiv:2405.07719 (USP).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int32

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.kernels.kernel import (
    Kernel,
    KernelSettings,
    KernelWorkload,
    RowKernel,
    ScoreConfig,
)
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import LayerWorkload, Strategy
from jaxsp.attention.ulysses import Ulysses
from jaxsp.attention.zigzag import ZigzagStrategy
from jaxsp.config.schema import AttentionConfig
from jaxsp.core import errors, nodes
from jaxsp.core.errors import UserError
from jaxsp.core.layout import Layout

OUTER_STRATEGIES: dict[str, type[ZigzagStrategy]] = {
    strategy.name: strategy for strategy in (Ring, AllGather)
}
"""Strategies between neighborhoods, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(Strategy):
    """Ulysses among neighbors, another strategy between them: see `combine`."""

    name = "hybrid"
    options = frozenset({"chunks_per_device", "ulysses_degree", "outer_strategy"})

    seq: int
    inner: Ulysses
    outer: ZigzagStrategy

    @classmethod
    def combine(cls, inner: Ulysses, outer: ZigzagStrategy) -> "Hybrid":
        """Every device of a neighborhood is in an outer group of its own."""
        outer = dataclasses.replace(outer, stride=inner.seq)
        return cls(seq=inner.seq * outer.seq, inner=inner, outer=outer)

    @classmethod
    def candidates(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> Sequence[Strategy]:
        outer_class = OUTER_STRATEGIES[requested.outer_strategy]
        hybrids: list[Strategy] = []
        for degree in reversed(legal_ulysses_degrees(workload.num_heads, seq=seq)):
            if requested.ulysses_degree in (None, degree):
                inner = Ulysses(seq=degree)
                outers = outer_class.candidates(requested, workload, seq=seq // degree)
                hybrids += [cls.combine(inner, outer) for outer in outers]
        return hybrids

    @classmethod
    def raise_if_impossible(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> None:
        heads = workload.num_heads
        degree = requested.ulysses_degree
        legal = legal_ulysses_degrees(heads, seq=seq)
        if not legal:
            raise UserError(
                f"attention.strategy = hybrid: a number between 1 and mesh.seq = {seq} must divide "
                f"both that and the {heads} query heads, and none does. Use "
                "attention.strategy=auto."
            )
        if degree is not None and degree not in legal:
            raise UserError(
                f"attention.ulysses_degree = {degree}: must divide mesh.seq = {seq} and {heads} "
                "query heads, and must be neither 1 (attention.strategy=ring or all_gather) nor "
                f"{seq} (ulysses). Use {errors.format_choices(legal)}, or null."
            )

    def find_problem(self, workload: LayerWorkload) -> str | None:
        return self.outer.find_problem(self.inner.exchange_workload(workload))

    @property
    def label(self) -> str:
        default = AttentionConfig.model_fields["outer_strategy"].default
        suffix = "" if self.outer.name == default else f" {self.outer.name}"
        return f"{self.name} {self.inner.seq}{suffix}"

    @property
    def description(self) -> str:
        return f"{self.inner.description} x {self.outer.description}"

    @property
    def config_fields(self) -> dict[str, Any]:
        return {
            **self.outer.config_fields,
            "strategy": self.name,
            "ulysses_degree": self.inner.seq,
            "outer_strategy": self.outer.name,
        }

    @property
    def layout(self) -> Layout:
        return self.outer.layout

    @property
    def has_ring_steps(self) -> bool:
        return self.outer.has_ring_steps

    @property
    def all_to_all_size(self) -> int:
        return self.inner.seq

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        return self.inner.local_heads(num_heads, num_kv_heads)

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        chunks = self.outer.kernel_workload(self.inner.exchange_workload(workload))
        return dataclasses.replace(chunks, ulysses_degree=self.inner.seq)

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        outer = self.outer.sent_bytes(self.inner.exchange_workload(workload))
        return self.inner.sent_bytes(workload) | outer

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        return self.outer.backward_bytes(self.inner.exchange_workload(workload), settings)

    @property
    def neighborhoods(self) -> list[list[int]]:
        """Devices that exchange heads, as positions along `seq`."""
        size = self.inner.seq
        return [list(range(first, first + size)) for first in range(0, self.seq, size)]

    def device_groups(self, operation: str) -> list[list[int]]:
        if operation == nodes.ALL_TO_ALL:
            return self.neighborhoods
        return self.outer.device_groups(operation)

    def communicators(self) -> list[list[int]]:
        return self.inner.communicators() + self.outer.communicators()

    def build(
        self, kernel: Kernel, settings: KernelSettings, *, kinds: Sequence[ScoreConfig]
    ) -> RowKernel:
        chunks = self.outer.build(kernel, settings, kinds=kinds)
        return self.inner.wrap_kernel(chunks, axis_index_groups=self.neighborhoods)

    def make_tables(
        self, starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], *, row_tokens: int
    ) -> Any:
        return self.outer.make_tables(starts_BM, lengths_BM, row_tokens=row_tokens)

    def on_one_device(self) -> Strategy | None:
        return self.outer.on_one_device()


def legal_ulysses_degrees(num_heads: int, *, seq: int) -> list[int]:
    """Numbers of neighbors that can share the heads, except 1 and all."""
    return [n for n in range(2, seq) if seq % n == 0 and num_heads % n == 0]
