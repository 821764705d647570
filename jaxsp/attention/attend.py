"""Attention over packed rows, as the model calls it inside shard_map.

    q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM -> out_BlHK

It is causal within each segment, with nothing between segments. Tokens outside segments have
output 0 and gradient 0. `selection.choose_attention` decides on a strategy (how the devices of a
group share attention) and a kernel (how one device computes its part). To add a strategy, see
`strategies/token_exchange.py`; to add a kernel, `kernels/kernel.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention import selection
from jaxsp.attention.kernels import residuals
from jaxsp.attention.kernels.kernel import (
    FunctionKernel,
    Kernel,
    KernelSettings,
    ScoreConfig,
)
from jaxsp.attention.kernels.residuals import AttentionFunctions
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.selection import AttentionChoice
from jaxsp.attention.strategies.strategy import Strategy, combine
from jaxsp.core.layout import Layout

SCOPE = "attend"
"""Scope of all operations of attention in a compiled program."""

KINDS_SCOPE = "layers_of_kinds"
"""Beginning of the scope of attention in a model whose layers are of several kinds.

The number of layers of each kind follows, as in `layers_of_kinds_52_10`, so that a compiled program
shows how often each branch of the switch between kinds runs.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attend:
    """Causal attention within each segment, to be called inside shard_map with this device's shard
    of rows; output and gradients are 0 at padding."""

    strategy: Strategy
    kernels: tuple[tuple[Kernel, KernelSettings], ...]
    """Kernel of each kind of layer."""
    kinds: tuple[ScoreConfig, ...]
    """Scores of each kind of layer, in the order in which the kinds first occur."""
    layer_kinds: tuple[int, ...]
    """Kind of each layer, as an index into `kinds`."""
    functions: tuple[AttentionFunctions, ...]
    """Forward and backward pass of each kind."""

    @property
    def _kernel(self) -> tuple[Kernel, KernelSettings]:
        (kernel,) = {*self.kernels}  # `select` gives the layers with one kernel
        return kernel

    def select(self, layer_kinds: Sequence[int]) -> "Attend":
        """Attention of some layers, which have one kernel. Args: layer_kinds: theirs."""
        chosen = tuple(dict.fromkeys(layer_kinds))
        if len(chosen) in (0, len(self.kinds)):
            return self
        return dataclasses.replace(
            self,
            kernels=tuple(self.kernels[kind] for kind in chosen),
            kinds=tuple(self.kinds[kind] for kind in chosen),
            layer_kinds=tuple(map(chosen.index, layer_kinds)),
            functions=tuple(self.functions[kind] for kind in chosen),
        )

    @property
    def layout(self) -> Layout:
        """Order that the rows' tokens must have."""
        return self.strategy.layout

    @property
    def _scope(self) -> str:
        """Scope of the operations of a layer."""
        if len(self.kinds) == 1:
            return SCOPE
        num_layers = (str(self.layer_kinds.count(kind)) for kind in range(len(self.kinds)))
        return f"{SCOPE}/{KINDS_SCOPE}_{'_'.join(num_layers)}"

    def make_segment_tables(
        self,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        tokens_per_device: int,
    ) -> Any:
        """Segment tables that all layers of a microbatch share, to be passed to every call; None if
        none are needed. Call inside shard_map.

        Args: tokens_per_device: tokens of a row that one device holds.
        """
        row_tokens = tokens_per_device * self.strategy.seq
        with jax.named_scope(SCOPE):
            rows = Segments(starts_BM, lengths_BM)
            return self.strategy.tokens.make_tables(*self._kernel, rows, row_tokens)

    def __call__(
        self,
        q_BlHK: Float[Array, "B l H K"],
        k_BlGK: Float[Array, "B l G K"],
        v_BlGK: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        tables: Any = None,
        *,
        kind: Array | int = 0,
        sinks_H: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B l H K"]:
        """Computes the attention of a layer for this device's tokens.

        Args:
            tables: result of `make_segment_tables`.
            kind: kind of the layer, as an index into `kinds`; it may be traced.
            sinks_H: one more score per head in the softmax of every token; its value vector is 0.
                Each device returns its term of the gradient, to be summed over the group.
        """
        kernel, _ = self._kernel
        assert sinks_H is None or kernel.has_lse, "sinks need a log-sum-exp"
        heads = self.strategy.heads
        tokens = self.strategy.tokens
        with jax.named_scope(self._scope):
            # Make the segment arrays depend on q. Otherwise JAX hoists everything computed from
            # only them out of the layer scan, and a ring's masks for all its steps, as wide as q,
            # stay live (8 GiB at 1M tokens on 32 devices)
            arrays = starts_BM, lengths_BM, tables, jax.lax.stop_gradient(q_BlHK)
            starts_BM, lengths_BM, tables, _ = jax.lax.optimization_barrier(arrays)
            q_BLhK, k_BLgK, v_BLgK = heads.to_heads(q_BlHK, k_BlGK, v_BlGK)
            mask: Callable[[Array], Array] = lambda x: x
            # Whatever a kernel computes at padding, even NaN, is dropped. Kernels that mask padding
            # themselves do so with fewer passes over their inputs
            if not kernel.masks_padding:
                inside_BL = tokens.segment_mask(starts_BM, lengths_BM, q_BLhK.shape[1])
                inside_BL11 = inside_BL[..., None, None]
                mask = lambda x: jnp.where(inside_BL11, x, jnp.zeros((), x.dtype))
            out_BLhK = residuals.attend(
                self.functions,
                tokens.segment_mask,
                [mask(x) for x in (q_BLhK, k_BLgK, v_BLgK)],
                Segments(starts_BM, lengths_BM, tables),
                kind=kind if len(self.kinds) > 1 else 0,
                sinks_H=None if sinks_H is None else heads.own_heads(sinks_H),
            )
            return heads.to_tokens(mask(out_BLhK))


def as_kernel(kernel: str | Kernel | Callable[..., Array]) -> Kernel:
    """Returns a kernel, given itself, its name, or a function for whole rows."""
    if isinstance(kernel, str):
        return selection.KERNELS[kernel]
    return kernel if isinstance(kernel, Kernel) else FunctionKernel(kernel)


def make_attend(
    *,
    kernel: str | Kernel | Callable[..., Array],
    strategy: Strategy | None = None,
    seq: int = 1,
    settings: KernelSettings | None = None,
    layer_scores: Sequence[ScoreConfig] = (ScoreConfig(),),
    exceptions: Mapping[tuple[int, int] | None, tuple[Kernel, KernelSettings]] | None = None,
) -> Attend:
    """Makes attention of a strategy and a kernel.

    Args:
        kernel: a kernel or its name, or a function for whole rows.
        strategy: None: Ulysses among `seq` devices.
        layer_scores: scores of each layer. Layers with equal scores are of one kind, and if all
            are, one entry is enough.
        exceptions: other kernels, by the `ScoreConfig.heads` that have them.
    Raises: UserError for a kernel that computes whole rows only, if the strategy needs chunks.
    """
    if strategy is None:
        strategy = combine(seq)
    kernel = as_kernel(kernel)
    settings = settings or KernelSettings()
    selection.raise_if_whole_rows_only(kernel, strategy)
    kinds = tuple(dict.fromkeys(layer_scores))
    if isinstance(kernel, FunctionKernel):
        assert len(kinds) == 1, f"a function has one kind of layer, and there are {len(kinds)}"
    kernels = tuple((exceptions or {}).get(score.heads, (kernel, settings)) for score in kinds)
    make = strategy.tokens.make_functions
    return Attend(
        strategy=strategy,
        kernels=kernels,
        kinds=kinds,
        layer_kinds=tuple(map(kinds.index, layer_scores)),
        functions=tuple(make(*of_kind, kinds[i]) for i, of_kind in enumerate(kernels)),
    )


def make_chosen_attend(choice: AttentionChoice) -> Attend:
    """Makes the attention that `choose` chose."""
    return make_attend(
        kernel=choice.kernel,
        strategy=choice.strategy,
        settings=choice.settings,
        layer_scores=choice.layer_scores,
        exceptions={x.heads: (x.kernel, x.settings) for x in choice.exceptions},
    )


def find_collectives(program: str) -> list[str]:
    """Finds the lines of a compiled program's text that are collective operations of attention."""
    operations = (" all-to-all", " all-gather", " collective-permute", " reduce-scatter")
    return [
        line.strip()
        for line in program.splitlines()
        if f"/{SCOPE}/" in line and any(operation in line for operation in operations)
    ]
