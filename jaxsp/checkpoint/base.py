"""Fingerprint of the frozen weights, which belong to a checkpoint without being part of it."""

import pathlib

from jaxsp.checkpoint import checksums, reader
from jaxsp.core.errors import UserError
from jaxsp.model import layers
from jaxsp.training import trainable


def compute_checksums(table: layers.Weights, weights: layers.Weights) -> dict[str, str]:
    """Checksum of each frozen weight by its path, the same on every mesh; empty without any."""
    frozen = trainable.select_frozen(table, table)
    items = {"base": trainable.select_frozen(table, weights)}
    shapes = checksums.unpadded_shapes(frozen, items, like="base")
    arrays = checksums.name_leaves(items)
    return checksums.compute_on_devices(arrays, {name: x.shape for name, x in shapes.items()})


def check(checkpoint: pathlib.Path, found: dict[str, str]) -> None:
    """Checks that a checkpoint was trained on these frozen weights.

    Args: found: result of `compute_checksums`.
    Raises: UserError if one differs.
    """
    written = reader.read_meta(checkpoint).base
    changed = [name for name in sorted({*found, *written}) if found.get(name) != written.get(name)]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"{checkpoint}: was trained on another base: {changed[0]}{more} differs. Use the "
            "model, model.compute_dtype, adapter and run.seed of that run."
        )
