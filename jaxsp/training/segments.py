"""Sums over the tokens of the segments of rows, which may lie on several devices.

Dims: M slots for segments of a row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.delta_rule import spans
from jaxsp.training.specs import StepSpec


def find_slots(spec: StepSpec, rows: Batch) -> Int32[Array, "B l"]:
    """Slot of the segment of each of this device's tokens; -1 at padding."""
    row_spans = spans.RowSpans(
        seq=spec.mesh.shape[axes.SEQ],
        layout=spec.attend.layout,
        tokens_per_device=rows.labels_BL.shape[1],
    )
    return spans.find_slots(rows.starts_BM, rows.lengths_BM, row_spans.own_tokens())


def sum_slots(
    spec: StepSpec, values_Bl: Float32[Array, "B l"], rows: Batch
) -> Float32[Array, "B M"]:
    """Sum of this device's values of each segment's tokens.

    Each slot is summed over the whole row, with zeros for tokens of other segments, and not by a
    scatter: the order is fixed, and no segment changes the rounding of another's sum.
    """
    slots_M = jnp.arange(rows.starts_BM.shape[1], dtype=jnp.int32)
    is_own_BlM = find_slots(spec, rows)[..., None] == slots_M[None, None]
    return jnp.sum(jnp.where(is_own_BlM, values_Bl[..., None], 0), axis=1)


def spread(spec: StepSpec, values_BM: Float32[Array, "B M"], rows: Batch) -> Float32[Array, "B l"]:
    """Value of the segment of each of this device's tokens; 0 at padding."""
    slots_Bl = find_slots(spec, rows)
    values_Bl = jnp.take_along_axis(values_BM, jnp.maximum(slots_Bl, 0), axis=1)
    return jnp.where(slots_Bl >= 0, values_Bl, 0)


def sum_over_segments(
    spec: StepSpec, values_Bl: Float32[Array, "B l"], rows: Batch
) -> Float32[Array, "B l"]:
    """Sum over the tokens of the segment of each token; 0 at padding.

    Moves: 4 B M bytes to all devices of a group.
    """
    sums_BM = jax.lax.psum(sum_slots(spec, values_Bl, rows), axes.SEQ)
    return spread(spec, sums_BM, rows)
