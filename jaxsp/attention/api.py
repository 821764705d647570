"""Attention as the model calls it: see `Attend`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from jaxsp.attention import registry, selection
from jaxsp.attention.kernels import checkpoint_names
from jaxsp.attention.kernels.kernel import FunctionKernel, Kernel, KernelSettings, RowKernel
from jaxsp.attention.selection import AttentionChoice
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.ulysses import Ulysses

SCOPE = "attend"
"""Scope of all operations of attention in a compiled program."""

CHECKPOINT_NAMES = checkpoint_names.CHECKPOINT_NAMES
"""Names of what a kernel saves for its backward pass."""


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
            # them alone out of the layer scan, and a ring's masks for all its steps, as wide as q,
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
