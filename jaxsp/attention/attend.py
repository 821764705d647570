"""Attention over packed rows, as the model calls it inside shard_map.

    q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM -> out_BlHK

It is causal within each segment, with nothing between segments. Tokens outside segments have
output 0 and gradient 0. `selection.choose_attention` decides on a strategy (how the devices of a
group share attention) and a kernel (how one device computes its part). To add a strategy, see
`strategy.py`; to add a kernel, `kernels/kernel.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention import selection
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    Kernel,
    KernelSettings,
    Saved,
    ScoreConfig,
)
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.selection import AttentionChoice
from jaxsp.attention.strategy import Strategy, combine
from jaxsp.core.layout import Layout

CHECKPOINT_NAMES = ("attention_out", "attention_lse")
"""Names to keep so that the backward pass does not recompute attention."""

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
    layer_scores: tuple[ScoreConfig, ...]
    """Scores of each layer. Layers with equal scores are of one kind."""
    kernels: tuple[tuple[Kernel, KernelSettings], ...]
    """Kernel of each kind of layer."""

    @functools.cached_property
    def kinds(self) -> tuple[ScoreConfig, ...]:
        """Scores of each kind of layer, in the order in which the kinds first occur."""
        return tuple(dict.fromkeys(self.layer_scores))

    @functools.cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Kind of each layer, as an index into `kinds`."""
        return tuple(map(self.kinds.index, self.layer_scores))

    @functools.cached_property
    def _functions(self) -> list[AttentionFunctions]:
        """Forward and backward pass of each kind."""
        make = self.strategy.tokens.make_functions
        return [
            make(*kernel, score) for kernel, score in zip(self.kernels, self.kinds, strict=True)
        ]

    @property
    def _kernel(self) -> tuple[Kernel, KernelSettings]:
        (kernel,) = {*self.kernels}  # `select` gives the layers with one kernel
        return kernel

    def select(self, layer_kinds: Sequence[int]) -> "Attend":
        """Attention of some layers, which have one kernel. Args: layer_kinds: theirs."""
        chosen = dict.fromkeys(layer_kinds)
        if len(chosen) in (0, len(self.kinds)):
            return self
        return dataclasses.replace(
            self,
            layer_scores=tuple(self.kinds[kind] for kind in layer_kinds),
            kernels=tuple(self.kernels[kind] for kind in chosen),
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
        heads = self.strategy.heads
        with jax.named_scope(self._scope):
            # Make the segment arrays depend on q. Otherwise JAX hoists everything computed from
            # only them out of the layer scan, and a ring's masks for all its steps, as wide as q,
            # stay live (8 GiB at 1M tokens on 32 devices)
            arrays = starts_BM, lengths_BM, tables, jax.lax.stop_gradient(q_BlHK)
            starts_BM, lengths_BM, tables, _ = jax.lax.optimization_barrier(arrays)
            q_BLhK, k_BLgK, v_BLgK = heads.to_heads(q_BlHK, k_BlGK, v_BlGK)
            segment_mask = self.strategy.tokens.segment_mask
            mask: Callable[[Array], Array] = lambda x: x
            # Whatever a kernel computes at padding, even NaN, is dropped. Kernels that mask padding
            # themselves do so with fewer passes over their inputs
            if not kernel.masks_padding:
                inside_BL = segment_mask(starts_BM, lengths_BM, q_BLhK.shape[1])
                inside_BL11 = inside_BL[..., None, None]
                mask = lambda x: jnp.where(inside_BL11, x, jnp.zeros((), x.dtype))
            out_BLhK = _attend_heads(
                self._functions,
                segment_mask,
                [mask(x) for x in (q_BLhK, k_BLgK, v_BLgK)],
                Segments(starts_BM, lengths_BM, tables),
                kind=kind if len(self.kinds) > 1 else 0,
                sinks_h=None if sinks_H is None else heads.own_heads(sinks_H),
            )
            return heads.to_tokens(mask(out_BLhK))


def _attend_heads(
    kinds: Sequence[AttentionFunctions],
    segment_mask: Callable[..., Bool[Array, "B L"]],
    qkv: Sequence[Array],
    segments: Segments,
    *,
    kind: Array | int,
    sinks_h: Array | None,
) -> Float[Array, "B L h K"]:
    """Attention whose backward pass starts from the output and the log-sum-exp.

    Both have names, so that a remat policy can keep or offload them. Layers of several kinds share
    them: the kind only selects the functions that compute them.

    Args:
        kinds: functions of each kind of layer.
        segment_mask: `(starts, lengths, L)` -> mask of the tokens that are in a segment.
        kind: index into `kinds`; it may be traced.
    """
    if isinstance(kind, int):
        kinds = [kinds[kind]]

    def compute(functions: Sequence[Callable[..., Any]], kind: Any, *arrays: Any) -> Any:
        if len(functions) == 1:
            return functions[0](*arrays)
        branches = [lambda *arrays, f=f: tuple(f(*arrays)) for f in functions]
        return jax.lax.switch(kind, branches, *arrays)

    def save(
        q: Array, k: Array, v: Array, segments: Segments, kind: Any, sinks_h: Array | None
    ) -> tuple[Array, tuple[Any, ...]]:
        out, lse = compute([pair.forward for pair in kinds], kind, q, k, v, segments)
        if sinks_h is not None:
            mask_BL = segment_mask(*segments[:2], q.shape[1])
            out, lse = _add_sinks(out, lse, sinks_h, mask_BL)
        out, lse = map(checkpoint_name, (out, lse), CHECKPOINT_NAMES)
        return out, (q, k, v, segments, kind, sinks_h, out, lse)

    def differentiate(residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
        q, k, v, segments, kind, sinks_h, out, lse = residuals
        saved = Saved(q, k, v, out, dout, lse)
        gradients = compute([pair.backward for pair in kinds], kind, saved, segments)
        dsinks_h = None
        if sinks_h is not None:
            mask_BL = segment_mask(*segments[:2], q.shape[1])
            # Summed over these tokens in float32
            delta_BhL = jnp.einsum("BLhK,BLhK->BhL", dout, out, preferred_element_type=jnp.float32)
            weight_BhL = jnp.exp(sinks_h.astype(jnp.float32)[None, :, None] - lse)
            terms_BhL = jnp.where(mask_BL[:, None], weight_BhL * delta_BhL, 0.0)
            dsinks_h = -terms_BhL.sum((0, 2)).astype(sinks_h.dtype)
        return *gradients, None, None, dsinks_h

    attend_kind = jax.custom_vjp(lambda *inputs: save(*inputs)[0])
    attend_kind.defvjp(save, differentiate)
    return attend_kind(*qkv, segments, None if len(kinds) == 1 else kind, sinks_h)


def _add_sinks(
    out_BLhK: Float[Array, "B L h K"],
    lse_BhL: Float32[Array, "B h L"],
    sinks_h: Float[Array, "h"],
    mask_BL: Bool[Array, "B L"],
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output and log-sum-exp with one more score for each head, whose value is 0.

    A kernel's backward pass needs no change for them: its weights are exp(score - lse).

    Args: mask_BL: tokens in a segment. At the others, the log-sum-exp is ignored, and an output of
        0 stays 0.
    Source: gpt-oss (`sinks` of eager_attention_forward in transformers).
    """
    mask_B1L = mask_BL[:, None]
    new_lse_BhL = jnp.logaddexp(lse_BhL, sinks_h.astype(jnp.float32)[None, :, None])
    weight_BhL = jnp.where(mask_B1L, jnp.exp(lse_BhL - new_lse_BhL), 0.0)
    scaled_BLhK = out_BLhK.astype(jnp.float32) * weight_BhL.swapaxes(1, 2)[..., None]
    return scaled_BLhK.astype(out_BLhK.dtype), jnp.where(mask_B1L, new_lse_BhL, 0.0)


def make_attend(
    *,
    kernel: str | Kernel,
    strategy: Strategy | None = None,
    seq: int = 1,
    settings: KernelSettings | None = None,
    layer_scores: Sequence[ScoreConfig] = (ScoreConfig(),),
) -> Attend:
    """Makes attention of a strategy and a kernel.

    Args:
        strategy: None: Ulysses among `seq` devices.
        layer_scores: scores of each layer. If all layers are of one kind, one entry is enough.
    """
    kernel = selection.KERNELS[kernel] if isinstance(kernel, str) else kernel
    return Attend(
        strategy=strategy or combine(seq),
        layer_scores=tuple(layer_scores),
        kernels=((kernel, settings or KernelSettings()),) * len({*layer_scores}),
    )


def make_chosen_attend(choice: AttentionChoice) -> Attend:
    """Makes the attention that `choose_attention` chose."""
    kinds = dict.fromkeys(choice.layer_scores)
    return Attend(
        strategy=choice.strategy,
        layer_scores=choice.layer_scores,
        kernels=tuple(choice.find_kernel(score.heads) for score in kinds),
    )


def find_collectives(program: str) -> list[str]:
    """Finds the lines of a compiled program's text that are collective operations of attention."""
    operations = (" all-to-all", " all-gather", " collective-permute", " reduce-scatter")
    return [
        line.strip()
        for line in program.splitlines()
        if f"/{SCOPE}/" in line and any(operation in line for operation in operations)
    ]
