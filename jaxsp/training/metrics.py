"""The numbers of a step: what metrics.jsonl says, and the arithmetic behind FLOPs."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16 TFLOP/s of a device, from NVIDIA's data sheets (SXM), by a word of its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of metrics.jsonl; None where a number does not exist on this machine or in this step."""

    step: int
    """Steps so far, this one counted."""
    epoch: int
    """Pass over the data, from 1, that the step's last row belongs to."""
    loss: float | None
    """Mean over the step's loss tokens; None where there is none, or it is not finite."""
    token_accuracy: float | None
    """Share of loss tokens that the model thought likeliest."""
    grad_norm: float | None
    """Global, before clipping; None where it is not finite."""
    learning_rate: float
    num_rows: int
    """Rows with at least one piece."""
    num_tokens: int
    """Tokens of all pieces, each once over the whole mesh, with a loss or not."""
    num_loss_tokens: int
    num_tokens_total: int
    """num_tokens of all steps so far."""
    padding_share: float
    """Of the step's token slots, those that no piece fills."""
    step_s: float
    """Seconds between the end of the step before and the end of this one."""
    data_wait_s: float
    """Of these, waiting for the next rows."""
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    """Arithmetic that was needed (causal, piece by piece; recomputation not counted), per second."""
    mfu: float | None
    """tflops_per_device over the device's bfloat16 peak; None for devices that PEAK_TFLOPS does not know."""
    device_peak_gib: float | None
    """The most memory any device of this process had in use so far."""


class Writer:
    """Appends lines to metrics.jsonl, each readable at once."""

    def __init__(self, path: pathlib.Path):
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(dataclasses.asdict(line), allow_nan=False) + "\n")
        self._file.flush()


def step_flops(model: ModelConfig, piece_lengths: np.ndarray) -> float:
    """Floating-point operations that a step over pieces of these lengths needs, forward and backward.

    A matrix costs 2 per element and token, attention 4 per head element and pair of tokens that see each other, of which
    a piece of n has n (n + 1) / 2; backward costs twice as much as forward.
    """
    lengths = piece_lengths.astype(np.float64)
    table = decoder.table(model)
    stacked = [row for row in jax.tree.leaves(table["layers"]) if row.is_matrix]
    matrices = sum(row.size * row.num_layers for row in stacked) + decoder.head(table).size
    pairs = float(np.sum(lengths * (lengths + 1) / 2))
    forward = 2 * matrices * float(lengths.sum()) + 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    return 3 * forward


def num_parameters(table: layers.Weights) -> int:
    """Elements of all weights, padding not counted."""
    return sum(row.size * (row.num_layers or 1) for row in jax.tree.leaves(table))


def peak_tflops(device_kind: str) -> float | None:
    """The bfloat16 peak of a device, by JAX's name of its kind; None when we do not know it."""
    words = device_kind.replace("-", " ").split()
    return next((PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)


def peak_gib(devices: list[jax.Device]) -> float | None:
    """The most memory one of these devices had in use, ever; None where devices do not say."""
    peaks: list[Any] = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max(peaks) / 2**30 if all(peak is not None for peak in peaks) else None
