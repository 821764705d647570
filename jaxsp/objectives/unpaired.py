"""Losses of unpaired records: answers with a label, desirable or not."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxsp.config.objective_schema import ObjectiveConfig
from jaxsp.objectives.objective import PairSums


def find_reference_point(pairs: PairSums) -> Float32[Array, ""]:
    """Mean log-ratio of the mismatched documents, at least 0."""
    num_pairs = jnp.maximum(pairs.is_real_P.sum(), 1).astype(jnp.float32)
    ratios_P = jnp.where(pairs.is_real_P, pairs.ratios_P2[:, 1], 0)
    return jnp.maximum(ratios_P.sum() / num_pairs, 0)


def sum_reference_points(pairs: PairSums) -> dict[str, Array]:
    """The reference point, once for each pair, for metrics."""
    return {"kl_sum": find_reference_point(pairs) * pairs.is_real_P.sum(dtype=jnp.float32)}


def compute_kto(config: ObjectiveConfig, pairs: PairSums) -> Float32[Array, "P"]:
    """Loss relative to a reference point, the divergence from the reference model.

    The reference point is the mean log-ratio of the mismatched documents (a prompt and the answer
    to another one) over the whole step, at least 0; it has no gradient.

    Source: KTO, arXiv:2402.01306, equations 7 and 8, and TRL 1.16's KTOTrainer. Differs: TRL takes
        the mean over a device batch and over the devices.
    """
    point = jax.lax.stop_gradient(find_reference_point(pairs))
    sign_P = jnp.where(pairs.is_desirable_P, 1.0, -1.0)
    weight_P = jnp.where(
        pairs.is_desirable_P,
        config.value("desirable_weight"),
        config.value("undesirable_weight"),
    )
    value_P = jax.nn.sigmoid(config.value("beta") * sign_P * (pairs.ratios_P2[:, 0] - point))
    return weight_P * (1 - value_P)
