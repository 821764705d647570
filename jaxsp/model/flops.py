"""Floating-point operations of a training step, and peak rates of GPUs."""

from collections import Counter

import jax
import numpy as np

from jaxsp.blocks import layers, registry
from jaxsp.blocks.config import ATTENTION, ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.model import decoder
from jaxsp.system import hardware


def step_flops(
    model: ModelConfig, segment_lengths: np.ndarray, table: layers.Weights | None = None
) -> float:
    """Floating-point operations of a step over segments of these lengths, forward and backward.

    A matrix costs 2 per element that a token is multiplied with, and each mixer costs what it says
    itself. The backward pass costs twice the forward pass, and once for a frozen matrix.

    Args: table: parameter table of the run; None: all weights are trained.
    """
    table = table or decoder.param_table(model)
    per_token = _matrix_flops(decoder.lm_head(table))
    for kind, params in decoder.split_kinds(model, table["layers"]).items():
        feed_forward = registry.FEED_FORWARDS[kind.feed_forward]
        of_feed_forward = jax.tree.leaves(params["post_attention"]["mlp"])
        for param in jax.tree.leaves(params):
            if not param.is_matrix or param.is_lookup:
                continue
            fraction = 1.0
            if any(param is part for part in of_feed_forward):
                fraction = feed_forward.active_fraction(model.of_kind(kind), param)
            per_token += fraction * _matrix_flops(param)
    mixing = 3 * sum(_count_mixer_flops(model, segment_lengths).values())
    return per_token * float(segment_lengths.sum()) + mixing


def _matrix_flops(param: Parameter) -> float:
    """Operations of a matrix for a token, forward and backward."""
    return 2 * param.size * (param.num_layers or 1) * (3 if param.is_trainable else 2)


def attention_flops(model: ModelConfig, segment_lengths: np.ndarray) -> float:
    """Floating-point operations of attention in the forward pass."""
    return _count_mixer_flops(model, segment_lengths)[ATTENTION]


def _count_mixer_flops(model: ModelConfig, segment_lengths: np.ndarray) -> dict[str, float]:
    """Floating-point operations of the forward pass, by mixer."""
    counts: dict[str, float] = dict.fromkeys((ATTENTION, *registry.MIXERS), 0.0)
    for layer, num_layers in Counter(model.layers).items():
        sizes = model.of_kind(layer.kind)
        flops = registry.MIXERS[layer.mixer].forward_flops(sizes, layer, segment_lengths)
        counts[layer.mixer] += num_layers * flops
    return counts


def num_parameters(table: layers.Weights | list[Parameter]) -> int:
    """Number of elements of all weights, without padding."""
    return sum(param.size * (param.num_layers or 1) for param in jax.tree.leaves(table))


def peak_tflops(device_kind: str) -> float | None:
    """Peak bfloat16 TFLOP/s of a device, by JAX's `device_kind`; None if unknown."""
    name = f" {device_kind.replace('-', ' ')} "
    return next(
        (peak for words, peak in hardware.PEAK_TFLOPS.items() if f" {words} " in name), None
    )
