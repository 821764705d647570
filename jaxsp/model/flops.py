"""Floating-point operations of a training step, and peak rates of GPUs."""

from collections import Counter

import jax
import numpy as np

from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by words in the device's name; the first match
counts. Names without a form factor are SXM modules."""


def step_flops(
    model: ModelConfig, segment_lengths: np.ndarray, table: layers.Weights | None = None
) -> float:
    """Floating-point operations of a step over segments of these lengths, forward and backward.

    A matrix costs 2 per element and token. Attention costs 4 per head element and pair of a query
    and a key. A segment of n tokens has n (n + 1) / 2 pairs; with a window of w, each token from
    number w on has w. The backward pass costs twice the forward pass, and once for a frozen matrix.

    Args: table: parameter table of the run; None: all weights are trained.
    """
    table = table or decoder.param_table(model)
    matrices = [param for param in jax.tree.leaves(table["layers"]) if param.is_matrix]
    matrices.append(decoder.lm_head(table))
    per_token = sum(
        2 * param.size * (param.num_layers or 1) * (3 if param.is_trainable else 2)
        for param in matrices
    )
    attention = 3 * attention_flops(model, segment_lengths)
    return per_token * float(segment_lengths.sum()) + attention


def attention_flops(model: ModelConfig, segment_lengths: np.ndarray) -> float:
    """Floating-point operations of attention in the forward pass."""
    lengths = segment_lengths.astype(np.float64)
    pairs = 0.0
    for window, num_layers in Counter(layer.window for layer in model.layers).items():
        near = lengths if window is None else np.minimum(lengths, window)
        pairs += num_layers * float(np.sum(near * (near + 1) / 2 + (lengths - near) * near))
    return 4 * model.num_heads * model.head_dim * pairs


def num_parameters(table: layers.Weights | list[Parameter]) -> int:
    """Number of elements of all weights, without padding."""
    return sum(param.size * (param.num_layers or 1) for param in jax.tree.leaves(table))


def peak_tflops(device_kind: str) -> float | None:
    """Peak bfloat16 TFLOP/s of a device, by JAX's `device_kind`; None if unknown."""
    name = f" {device_kind.replace('-', ' ')} "
    return next((peak for words, peak in PEAK_TFLOPS.items() if f" {words} " in name), None)
