"""Losses of pairs of documents, from sums over their tokens.

The sums are taken over the mesh in the forward pass. The derivative of the loss by a document's
log-probability is the weight of its tokens in the backward pass, so that no collective is ever
differentiated, and an objective is a function of a few numbers for each pair.

Dims: P pairs of documents, of which not all may be real; 2 documents: chosen and rejected, or the
answer and the mismatched one of an unpaired record.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSums:
    """Sums over the documents of pairs. All are 0 for pairs that are not real."""

    logps_P2: Float32[Array, "P 2"]
    """Log-probability of each document's loss tokens by the trained model."""
    references_P2: Float32[Array, "P 2"]
    """The same by the reference model."""
    counts_P2: Float32[Array, "P 2"]
    """Number of each document's loss tokens."""
    is_real_P: Bool[Array, "P"]
    is_desirable_P: Bool[Array, "P"]
    """Label of unpaired records."""
    num_pairs: Float32[Array, ""]
    """Number of pairs of the whole step."""
    num_first_tokens: Float32[Array, ""]
    """Number of loss tokens of the first documents of all pairs of the step."""

    @property
    def ratios_P2(self) -> Float32[Array, "P 2"]:
        """Log-ratio of each document's probability by the trained and the reference model."""
        return self.logps_P2 - self.references_P2

    @property
    def mean_logps_P2(self) -> Float32[Array, "P 2"]:
        """Log-probability of each document per loss token."""
        return self.logps_P2 / jnp.maximum(self.counts_P2, 1)
