"""Pairs of documents in a step: sums over the tokens of documents, and weights from them.

Example: the loss of a pair is f(s_chosen, s_rejected), where s is the sum of log-probabilities of a
document's tokens, which may lie on several devices. The sums are taken over the mesh; then each
token of a document has the weight -df/ds in the ordinary backward pass of the token losses.

Dims: D = 2 P documents of a step, in pairs; M slots for segments of a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, Batch, Pairs
from jaxsp.objectives import derivatives
from jaxsp.objectives.objective import PairObjective
from jaxsp.objectives.pair_sums import PairSums
from jaxsp.training import segments
from jaxsp.training.metric_table import Sums
from jaxsp.training.specs import StepSpec


class StepPairs(NamedTuple):
    """The pairs of a step, inside shard_map; the same on all devices."""

    inputs: Pairs
    counts_P2: Float32[Array, "P 2"]
    """Number of loss tokens of each document."""


def find_step_pairs(spec: StepSpec, batch: Batch) -> StepPairs:
    """Pairs of a step, from the batch of all its microbatches. Every document has a loss token."""
    assert batch.pairs is not None
    rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch.without_pairs())
    has_label_Bl = (rows.labels_BL != NO_LABEL).astype(jnp.float32)
    num_documents = batch.pairs.references_P2.size
    own_counts_P2 = _sum_documents(spec, has_label_Bl, rows, num_documents).reshape(-1, 2)
    return StepPairs(inputs=batch.pairs, counts_P2=jax.lax.psum(own_counts_P2, axes.ALL))


def sum_log_probabilities(
    spec: StepSpec, losses_Bl: Float32[Array, "B l"], rows: Batch, pairs: Pairs
) -> Float32[Array, "P 2"]:
    """This device's part of the log-probability of each document; 0 for those of other rows.

    Args: losses_Bl: token losses. rows: those of a microbatch.
    """
    sums_D = _sum_documents(spec, -losses_Bl, rows, pairs.references_P2.size)
    return sums_D.reshape(-1, 2)


def find_present(pairs: StepPairs, rows: Batch) -> Array:
    """True for the pairs in the rows of a microbatch; for those that lie in one."""
    first_D = jnp.zeros(2 * len(pairs.counts_P2), jnp.int32)
    is_used_D = first_D.at[_document_indices(rows, len(first_D))].set(1, mode="drop")
    return jax.lax.psum(is_used_D.reshape(-1, 2)[:, 0], axes.GROUPS) > 0


def differentiate(
    spec: StepSpec, pairs: StepPairs, logps_P2: Array, is_real_P: Array
) -> tuple[Sums, Float32[Array, "P 2"]]:
    """Sums of metrics over real pairs, and the weight of the token losses of each document.

    Args: logps_P2: log-probabilities, summed over the mesh.
    Returns: sums that are not 0 on one device only, so that a sum over the mesh counts them once.
    """
    assert isinstance(spec.objective, PairObjective)
    keep = lambda x_P2: jnp.where(is_real_P[:, None], x_P2, 0)
    sums = PairSums(
        logps_P2=keep(logps_P2),
        references_P2=keep(pairs.inputs.references_P2),
        counts_P2=keep(pairs.counts_P2),
        is_real_P=is_real_P,
        is_desirable_P=pairs.inputs.is_desirable_P,
        num_pairs=(pairs.counts_P2[:, 0] > 0).sum(dtype=jnp.float32),
        num_first_tokens=pairs.counts_P2[:, 0].sum(),
    )
    losses_P, dlogps_P2 = derivatives.differentiate(spec.objective, sums)
    measured = derivatives.measure(spec.objective, sums, losses_P)
    is_first = jax.lax.axis_index(axes.ALL) == 0
    measured = {name: jnp.where(is_first, x, jnp.zeros_like(x)) for name, x in measured.items()}
    return measured, -dlogps_P2


def spread(spec: StepSpec, values_P2: Float32[Array, "P 2"], rows: Batch) -> Float32[Array, "B l"]:
    """Value of the document of each token of this device; 0 at padding."""
    values_D = values_P2.ravel()
    indices_BM = _document_indices(rows, len(values_D))
    values_BM = values_D.at[indices_BM].get(mode="fill", fill_value=0)
    return segments.spread(spec, values_BM, rows)


def _document_indices(rows: Batch, num_documents: int) -> Int32[Array, "B M"]:
    """Document of each slot; out of range for unused ones, which `drop` and `fill` skip."""
    documents_BM = rows.documents_BM
    assert documents_BM is not None
    return jnp.where(documents_BM >= 0, documents_BM, num_documents)


def _sum_documents(
    spec: StepSpec, values_Bl: Float32[Array, "B l"], rows: Batch, num_documents: int
) -> Float32[Array, "D"]:
    """Sum of this device's values of each document's tokens."""
    sums_BM = segments.sum_slots(spec, values_Bl, rows)
    indices_BM = _document_indices(rows, num_documents)
    return jnp.zeros(num_documents, jnp.float32).at[indices_BM].add(sums_BM, mode="drop")
