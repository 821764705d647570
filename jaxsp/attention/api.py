"""Attention as the model calls it: see `Attend`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from jaxsp.attention import registry, selection
from jaxsp.attention.kernels.kernel import FunctionKernel, Kernel, KernelSettings, RowKernel
from jaxsp.attention.selection import AttentionChoice
from jaxsp.attention.strategy import HasHeads, Strategy
from jaxsp.attention.ulysses import Ulysses

SCOPE = "attend"
"""Scope of all operations of attention in a compiled program."""

_MIN_MENTIONED_LSE_BYTES = 64 * 2**20
"""Minimum memory of log-sum-exps that a description mentions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attend:
    """Causal attention within each segment, to be called inside shard_map with this device's shard
    of rows; output and gradients are 0 at padding."""

    strategy: Strategy
    kernel: Kernel
    settings: KernelSettings
    function: RowKernel

    @property
    def layout_degree(self) -> int:
        """Degree of the layout that rows must have: see core/layout.py."""
        return self.strategy.layout_degree

    def make_segment_tables(
        self,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        tokens_per_device: int,
    ) -> Any:
        """Segment tables that all layers of a microbatch share, to be passed to every call; None if
        the kernel needs none.

        Args: tokens_per_device: tokens of a row that one device holds.
        """
        if self.strategy.layout_degree > 1:
            return None
        with jax.named_scope(SCOPE):
            return self.kernel.make_tables(
                self.settings,
                starts_BM,
                lengths_BM,
                row_tokens=tokens_per_device * self.strategy.seq,
            )

    def __call__(
        self,
        q_BlHK: Float[Array, "B l H K"],
        k_BlGK: Float[Array, "B l G K"],
        v_BlGK: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        tables: Any = None,
    ) -> Float[Array, "B l H K"]:
        with jax.named_scope(SCOPE):
            # Make the segment arrays depend on q. Otherwise JAX hoists everything computed from
            # only them out of the layer scan, and a ring's masks for all its steps, as wide as q,
            # stay live (8 GiB at 1M tokens on 32 devices)
            arrays = starts_BM, lengths_BM, tables, jax.lax.stop_gradient(q_BlHK)
            starts_BM, lengths_BM, tables, _ = jax.lax.optimization_barrier(arrays)
            keywords = {} if tables is None else {"tables": tables}
            return self.function(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, **keywords)


def as_kernel(kernel: str | Kernel | Callable[..., Array]) -> Kernel:
    """Returns a kernel, given itself, its name, or a function for whole rows."""
    if isinstance(kernel, str):
        return registry.KERNELS[kernel]
    return kernel if isinstance(kernel, Kernel) else FunctionKernel(kernel)


def make_attend(
    *,
    kernel: str | Kernel | Callable[..., Array],
    strategy: Strategy | None = None,
    seq: int = 1,
    settings: KernelSettings | None = None,
    window: int | None = None,
) -> Attend:
    """Makes attention of a strategy and a kernel.

    Args:
        kernel: a kernel or its name, or a function for whole rows.
        strategy: None: Ulysses among `seq` devices.
        window: number of tokens that a token sees, including itself; None: all before it.
    Raises: UserError for a kernel that computes whole rows only, if the strategy needs chunks.
    """
    if strategy is None:
        strategy = Ulysses(seq=seq)
    kernel = as_kernel(kernel)
    settings = settings or KernelSettings()
    selection.raise_if_whole_rows_only(kernel, strategy)
    return Attend(
        strategy=strategy,
        kernel=kernel,
        settings=settings,
        function=strategy.build(kernel, settings, window=window),
    )


def make_chosen_attend(choice: AttentionChoice) -> Attend:
    """Makes the attention that `choose` chose."""
    return make_attend(
        kernel=choice.kernel,
        strategy=choice.strategy,
        settings=choice.settings,
        window=choice.window,
    )


def find_collectives(program: str) -> list[str]:
    """Finds the lines of a compiled program's text that are collective operations of attention."""
    operations = (" all-to-all", " all-gather", " collective-permute", " reduce-scatter")
    return [
        line.strip()
        for line in program.splitlines()
        if f"/{SCOPE}/" in line and any(operation in line for operation in operations)
    ]


def describe(choice: AttentionChoice, model: HasHeads) -> str:
    """Describes a choice in one line."""
    kernel = _describe_kernel(choice)
    reason = ""
    if choice.fallback_reason:
        reason = f" ({choice.kernel.name} because {choice.fallback_reason})"
    strategy = choice.strategy
    if strategy.seq == 1:
        return f"{kernel}, all heads on each device{reason}"
    heads, kv_heads = strategy.local_heads(model.num_heads, model.num_kv_heads)
    part = (
        f"each device has {heads} of {model.num_heads} query heads and "
        f"{kv_heads} of {model.num_kv_heads} K/V heads"
    )
    if strategy.layout_degree > 1:
        part += f", and 2 of {2 * strategy.layout_degree} chunks of each row"
    traffic = (
        f"it sends {_format_bytes(choice.sent_bytes)} per layer and microbatch "
        "if attention is not recomputed"
    )
    if choice.alternatives:
        alternatives = ", ".join(
            f"{description}: {_format_bytes(num_bytes)}"
            for description, num_bytes in choice.alternatives
        )
        traffic += f" (alternatives: {alternatives})"
    return f"{strategy.description}, {kernel}; {part}; {traffic}{reason}"


def _describe_kernel(choice: AttentionChoice) -> str:
    settings = choice.settings
    description = f"{choice.kernel.describe()} kernel"
    if settings.head_chunks > 1:
        description += f", heads in {settings.head_chunks} chunks"
    if settings.lse_bytes >= _MIN_MENTIONED_LSE_BYTES:
        description += f", whose log-sum-exps need {settings.lse_bytes / 2**20:,.0f} MiB"
    if choice.window is not None:
        description += f", each token sees the last {choice.window:,} of its document"
    return description


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
