"""Fingerprint of the frozen weights, which belong to a checkpoint without being part of it."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import checksums, reader
from jaxsp.core.errors import UserError
from jaxsp.sharding import quantization
from jaxsp.training import trainable


def compute_checksums(table: layers.Weights, weights: layers.Weights) -> dict[str, str]:
    """Checksum of each frozen weight by its path, the same on every mesh; empty without any."""
    frozen = trainable.select_frozen(table, table)
    items = {"base": trainable.select_frozen(table, weights)}
    unpadded = checksums.unpadded_shapes(frozen, items, like="base")
    return checksums.compute_on_devices(checksums.name_leaves(items), unpadded)


def check_readable(
    checkpoint: pathlib.Path,
    table: layers.Weights,
    open_weight: Callable[[Parameter], Callable[[int | None], np.ndarray]],
) -> None:
    """Checks frozen weights that are read one layer at a time, like `check`.

    Args: open_weight: returns a function that reads a layer, float32, of a parameter.
    Memory: one weight at a time, all of its layers.
    """

    def compute(param: Parameter) -> Any:
        read = open_weight(param)
        if param.layers is None:
            array = read(None)
        else:
            array = np.stack([read(layer) for layer in param.layers])
        return jax.tree.map(checksums.compute_on_host, quantization.encode(param, array))

    frozen = trainable.select_frozen(table, table)
    check(checkpoint, checksums.name_leaves({"base": jax.tree.map(compute, frozen)}))


def check(checkpoint: pathlib.Path, found: dict[str, str]) -> None:
    """Checks that a checkpoint was trained on these frozen weights.

    Args: found: result of `compute_checksums`.
    Raises: UserError if one differs.
    """
    written = reader.read_meta(checkpoint).base
    changed = [name for name in sorted({*found, *written}) if found.get(name) != written.get(name)]
    if changed:
        name = changed[0].partition("/")[2]
        differ = f"and {len(changed) - 1} more differ" if len(changed) > 1 else "differs"
        raise UserError(
            f"{checkpoint}: was trained on another base: {name} {differ}. Use the model, "
            "model.compute_dtype, adapter and run.seed of that run."
        )
