"""Floating-point operations of a training step, and peak rates of GPUs."""

import jax
import numpy as np

from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16 TFLOP/s of a device, from NVIDIA's data sheets (SXM), by a word of its name."""


def step_flops(model: ModelConfig, segment_lengths: np.ndarray) -> float:
    """Floating-point operations that a step over pieces of these lengths needs, forward and backward.

    A matrix costs 2 per element and token, attention 4 per head element and pair of tokens that see each other, of which
    a piece of n has n (n + 1) / 2; with a window of w, its tokens from the w-th on have w each. Backward costs twice as much
    as forward.
    """
    table = decoder.param_table(model)
    stacked = [row for row in jax.tree.leaves(table["layers"]) if row.is_matrix]
    matrices = sum(row.size * row.num_layers for row in stacked) + decoder.lm_head(table).size
    return 3 * (
        2 * matrices * float(segment_lengths.sum()) + attention_flops(model, segment_lengths)
    )


def attention_flops(model: ModelConfig, segment_lengths: np.ndarray) -> float:
    """Of these, what attention needs forward."""
    lengths = segment_lengths.astype(np.float64)
    near = lengths if model.sliding_window is None else np.minimum(lengths, model.sliding_window)
    pairs = float(np.sum(near * (near + 1) / 2 + (lengths - near) * near))
    return 4 * model.num_layers * model.num_heads * model.head_dim * pairs


def num_parameters(table: layers.Weights) -> int:
    """Elements of all weights, padding not counted."""
    return sum(row.size * (row.num_layers or 1) for row in jax.tree.leaves(table))


def peak_tflops(device_kind: str) -> float | None:
    """The bfloat16 peak of a device, by JAX's name of its kind; None when we do not know it."""
    words = device_kind.replace("-", " ").split()
    return next((PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)
