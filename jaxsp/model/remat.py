"""Activation rematerialization: what the backward pass keeps of a layer, where it is kept, and what is recomputed.

    remat               kept of each layer, in addition to its input      recomputed
    none                results of matrix products, all-to-alls and       elementwise operations, tiles
                        attention
    save_attention_and_mlp   attention's output and log-sum-exp, the MLP's     the rest
                        gate and up projections
    attention           attention's output and log-sum-exp                all except attention
    full                nothing                                           all

Keeping gate and up, 4 x intermediate_size bytes per token and layer, saves two products of the MLP in the backward pass: 11 %
of the estimated time of Llama-3.1-8B on 8 H100s at 8,192 tokens each (0.813 to 0.726 s), for 13.8 GiB. `none` saves 2 % more,
for another 5 GiB, and at 16,384 tokens leaves too little arithmetic to overlap the collectives with.

Whole weights are never kept; they are gathered again. (A policy by name could not exclude them: a function that gets a named
value also gets what it was made from.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxsp import attention
from jaxsp.model import layers

LAYER_INPUT = "layer_input"

_SAVED_PRIMITIVES = ("dot_general", "all_to_all")
"""What `none` keeps the results of, by the names of JAX's operations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """Fields of core.config.Memory: see there."""

    remat: str = "save_attention"
    offload_activations: str = "none"

    @property
    def is_attention_saved(self) -> bool:
        return self.remat != "full"

    @property
    def is_attention_offloaded(self) -> bool:
        return self.offload_activations == "layer_inputs_and_attention"


def name_layer_input(x: Array) -> Array:
    """A layer's input, to be used instead of what it is given: only what a layer *begins* with can be offloaded.

    Offloading a layer's output, by name, is silently ignored; offloading anything else leaves the input on the device too.
    """
    return checkpoint_name(x, LAYER_INPUT)


def checkpoint_layer(function: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """The function of a layer, (x, shards) -> (x, None), for jax.lax.scan."""
    assert policy.is_attention_saved or not policy.is_attention_offloaded, "refused by core.given"
    kept = set(attention.CHECKPOINT_NAMES if policy.is_attention_saved else ())
    kept |= set(layers.MLP_CHECKPOINT_NAMES if policy.remat == "save_attention_and_mlp" else ())
    offloaded = set() if policy.offload_activations == "none" else {LAYER_INPUT}
    if policy.is_attention_offloaded:
        offloaded |= set(attention.CHECKPOINT_NAMES)
    named: Callable[..., Any] = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(kept - offloaded),
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def should_save(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (
            True
            if policy.remat == "none" and primitive.name in _SAVED_PRIMITIVES
            else named(primitive, *avals, **params)
        )

    # CSE would not undo what is done in another iteration of the scan
    return jax.checkpoint(function, policy=should_save, prevent_cse=False)
