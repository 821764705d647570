"""Activation rematerialization: what a layer keeps for the backward pass, and what is recomputed.

    remat                    kept per layer, besides its input           recomputed
    none                     results of matrix products, all-to-alls     elementwise operations,
                             and attention                               tiles
    save_attention_and_mlp   attention's output and log-sum-exp, the     the rest
                             MLP's gate and up projections
    save_attention           attention's output and log-sum-exp          all except attention
    full                     nothing                                     all

Keeping gate and up takes 4 x intermediate_size bytes per token and layer, and saves two products of
the MLP in the backward pass. For Llama-3.1-8B on 8 H100s at 8,192 tokens each, that is 11 % of the
estimated time (0.813 to 0.726 s), for 13.8 GiB. `none` saves 2 % more for another 5 GiB. At 16,384
tokens it leaves too little arithmetic to overlap the collectives with. With `kept_mlp_layers`, only
the last layers keep them: those of the first ones would be in memory longer.

With `offload_every` or `offload_during_attention`, layer_stack.py replaces JAX's backward pass, and
this module has only the options.

Whole weights are never kept; they are gathered again. (A name-based policy cannot exclude them:
`checkpoint_name` returns a new value, so saving the unnamed original would be allowed.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxsp.blocks import layers, registry
from jaxsp.blocks.config import LayerKind, LayerSegment, ModelConfig

_LAYER_INPUT = "layer_input"

_SAVED_PRIMITIVES = ("dot_general", "all_to_all")
"""Names of the JAX primitives whose results `none` keeps, besides those of linear layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """Saved and offloaded activations, as in `training.step_config.MemoryConfig`.

    The values of remat and offload_activations are compared only here.
    """

    remat: str = "save_attention"
    kept_mlp_layers: int | None = None
    """Number of layers, the last ones, that keep the MLP's products, if `is_mlp_saved`; None: all.
    """
    offload_activations: str = "none"
    offload_every: int = 1
    offloads_during_attention: bool = False

    @property
    def has_own_backward_pass(self) -> bool:
        """True if the layers need the backward pass of layer_stack.py, not JAX's."""
        return self.offload_every > 1 or self.offloads_during_attention

    def with_whole_periods(self, model: ModelConfig) -> "RematPolicy":
        """The policy with groups of whole periods, if the kinds of the model's layers repeat."""
        if not self.has_own_backward_pass:
            return self
        period = max(len(segment.period) for segment in model.segments)
        return dataclasses.replace(self, offload_every=-(-self.offload_every // period) * period)

    @property
    def can_split_layers(self) -> bool:
        """True if the backward pass of layer_stack.py can be used: it keeps layer inputs only."""
        return self.remat == "full" and self.is_input_offloaded

    def divide(self, segment: LayerSegment, num_layers: int) -> list[tuple[range, "RematPolicy"]]:
        """Periods of a segment of a model with `num_layers` layers, and what each of them keeps."""
        periods = range(segment.repeats)
        if not self.is_mlp_saved or self.kept_mlp_layers is None:
            return [(periods, self)]
        first_kept = num_layers - self.kept_mlp_layers
        num_recomputed = -(-(first_kept - segment.first) // len(segment.period))
        num_recomputed = min(max(num_recomputed, 0), segment.repeats)
        parts = (
            (periods[:num_recomputed], dataclasses.replace(self, remat="save_attention")),
            (periods[num_recomputed:], self),
        )
        return [part for part in parts if part[0]]

    def count_kept(self, model: ModelConfig) -> int:
        """Number of layers that keep products of their feed-forward, if `is_mlp_saved`. Whole
        periods of layers keep them."""
        return sum(
            len(periods) * sum(has_products(model, kind) for kind in segment.period)
            for segment in model.segments
            for periods, of_part in self.divide(segment, model.num_layers)
            if of_part.is_mlp_saved
        )

    def num_groups(self, num_layers: int) -> int:
        """Number of groups of layers of which one input is kept until the backward pass."""
        return -(-num_layers // self.offload_every)

    def num_offloaded_inputs(self, num_layers: int) -> int:
        """Largest number of arrays of a layer input's size in host memory at one time."""
        waiting = self.offload_every if self.offload_every > 1 else 0
        return self.num_groups(num_layers) + waiting + self.offloads_during_attention

    def num_extra_passes(self, num_layers: int) -> float:
        """Forward passes of all layers in the backward pass, besides that of each layer before its
        own backward pass."""
        return 1 - self.num_groups(num_layers) / num_layers

    @property
    def are_products_saved(self) -> bool:
        return self.remat == "none"

    @property
    def is_mlp_saved(self) -> bool:
        return self.remat == "save_attention_and_mlp"

    @property
    def is_attention_saved(self) -> bool:
        return self.remat != "full"

    @property
    def is_input_offloaded(self) -> bool:
        return self.offload_activations != "none"

    @property
    def is_attention_offloaded(self) -> bool:
        return self.offload_activations == "layer_inputs_and_attention"


def has_products(model: ModelConfig, kind: LayerKind) -> bool:
    """False if `save_attention_and_mlp` keeps no more than `save_attention` in layers of a kind:
    experts are recomputed."""
    return registry.FEED_FORWARDS[kind.feed_forward].has_kept_products(model.of_kind(kind))


def list_kept(model: ModelConfig) -> list[int]:
    """Number of layers that keep products with `kept_mlp_layers` of 0, 1, ... up to all."""
    make = functools.partial(RematPolicy, remat="save_attention_and_mlp")
    numbers = range(model.num_layers + 1)
    return [make(kept_mlp_layers=number).count_kept(model) for number in numbers]


def name_layer_input(x: Array) -> Array:
    """Returns a layer's input under a name; the layer must use the result instead of its argument.

    Only a layer's input can be offloaded. JAX silently ignores the name of a layer's output, and
    offloading any other value leaves the input on the device too.
    """
    return checkpoint_name(x, _LAYER_INPUT)


def checkpoint_layer(
    function: Callable[..., Any], policy: RematPolicy, kind: LayerKind
) -> Callable[..., Any]:
    """Applies the policy to the function of a layer of this kind."""
    assert policy.is_attention_saved or not policy.is_attention_offloaded, "a config refuses it"
    mixer = registry.MIXERS[kind.mixer]
    kept: set[str] = set()
    offloaded: set[str] = set()
    if policy.are_products_saved:
        kept.add(layers.PRODUCT_NAME)
    if policy.is_attention_saved:
        kept.update(mixer.checkpoint_names)
    if policy.is_mlp_saved:
        kept.update(registry.FEED_FORWARDS[kind.feed_forward].checkpoint_names)
    if policy.is_input_offloaded:
        offloaded.add(_LAYER_INPUT)
    if policy.is_attention_offloaded:
        offloaded.update(mixer.checkpoint_names)
    named: Callable[..., Any] = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(kept - offloaded),
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def should_save(primitive: Any, *avals: Any, **params: Any) -> Any:
        if policy.are_products_saved and primitive.name in _SAVED_PRIMITIVES:
            return True
        return named(primitive, *avals, **params)

    # The recomputation runs in another scan, where CSE cannot undo it.
    return jax.checkpoint(function, policy=should_save, prevent_cse=False)
