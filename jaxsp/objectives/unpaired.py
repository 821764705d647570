"""Objective of unpaired records: answers with a label, desirable or not."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import NonNegativeFloat, with_examples
from jaxsp.objectives.objective import Relative

if TYPE_CHECKING:
    from jaxsp.objectives.pair_sums import PairSums


class Kto(Relative):
    """KTO loss of answers labeled desirable or undesirable, relative to an estimate of
    the KL divergence from the reference model.

    The reference point is the mean log-ratio of the mismatched documents (a prompt and the answer
    to another one) over the whole step, at least 0; it has no gradient.

    Source: KTO, arXiv:2402.01306, equations 7 and 8, and TRL 1.16's KTOTrainer. Differs: TRL takes
        the mean over a device batch and over the devices.
    """

    type: Literal["kto"] = "kto"
    desirable_weight: Annotated[NonNegativeFloat, with_examples(1.0)] = 1.0
    """Factor of the losses of desirable records."""
    undesirable_weight: Annotated[NonNegativeFloat, with_examples(1.33)] = 1.0
    """Factor of the losses of undesirable records."""
    format: ClassVar[str | None] = "unpaired"
    needs_step: ClassVar[bool] = True

    def losses(self, pairs: "PairSums") -> Any:
        import jax
        import jax.numpy as jnp

        point = jax.lax.stop_gradient(find_reference_point(pairs))
        sign_P = jnp.where(pairs.is_desirable_P, 1.0, -1.0)
        weight_P = jnp.where(pairs.is_desirable_P, self.desirable_weight, self.undesirable_weight)
        value_P = jax.nn.sigmoid(self.beta * sign_P * (pairs.ratios_P2[:, 0] - point))
        return weight_P * (1 - value_P)

    def measure(self, pairs: "PairSums") -> dict[str, Any]:
        num_pairs = pairs.is_real_P.sum(dtype="float32")
        return {"kl_sum": find_reference_point(pairs) * num_pairs}


def find_reference_point(pairs: "PairSums") -> Any:
    """Mean log-ratio of the mismatched documents, float32, at least 0."""
    import jax.numpy as jnp

    num_pairs = jnp.maximum(pairs.is_real_P.sum(), 1).astype(jnp.float32)
    ratios_P = jnp.where(pairs.is_real_P, pairs.ratios_P2[:, 1], 0)
    return jnp.maximum(ratios_P.sum() / num_pairs, 0)
