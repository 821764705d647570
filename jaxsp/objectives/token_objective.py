"""Objectives whose losses are functions of single tokens: of their logits and other numbers.

The loss of a token is computed in a tile, where its logits exist, together with its gradient:
logits are never stored. To add one, write a subclass of `TokenObjective` in a file of its own and
an entry of `OBJECTIVES` in `objectives/registry.py`.

Dims: X tokens of a tile, V vocabulary.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jaxsp.objectives.objective import Objective

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileTokens:
    """Tokens of a tile. Numbers are float32 unless noted; those of tokens without a label are
    undefined."""

    logits_XV: "Array"
    """Logits of the trained model."""
    labels_X: "Array"
    """The next token, int32; 0 for tokens without a label."""
    vocab_size: int | None = None
    """Number of ids that the model and its teacher have; None: all of the model's."""
    teacher_logits_XV: "Array | None" = None
    """Logits of the teacher, if the objective has one."""
    numbers: Mapping[str, "Array"] = dataclasses.field(default_factory=dict)
    """Other numbers of each token, float32[X] by name: those of `Objective.needs`, and for an
    objective by document LENGTH and `TokenObjective.sum_over_documents`. Stored predictions are
    int32: see `core.batch.PREDICTIONS`."""

    @property
    def logps_X(self) -> "Array":
        """Log-probability of each label by the trained model."""
        import jax
        import jax.numpy as jnp

        labels_X1 = self.labels_X[:, None]
        chosen_X1 = jnp.take_along_axis(self.logits_XV, labels_X1, axis=-1)
        return chosen_X1[:, 0] - jax.nn.logsumexp(self.logits_XV, axis=-1)


LENGTH = "length"
"""Name of the number of loss tokens of each token's document, at least 1."""


class TokenObjective(Objective, abc.ABC):
    """Objective whose loss is that of single tokens; the step's loss is their mean, unless
    `find_divisor` says otherwise."""

    is_by_document: ClassVar[bool] = False
    """True if losses depend on the documents of tokens, which are then never cut."""

    @abc.abstractmethod
    def losses(self, tokens: TileTokens) -> tuple[Any, dict[str, Any]]:
        """Loss of each token, float32[X], and numbers of each token, float32[X] by name.

        The loss is differentiated with respect to `logits_XV`. Sums of the numbers over the tokens
        that have a loss are made into metrics (`training/metric_table.py`); of a number whose name
        ends with `_max`, the maximum. A tile may have any tokens, so that a token's loss must
        depend on its own numbers only.
        """

    def compute_tile(self, tokens: TileTokens) -> tuple[Any, dict[str, Any]]:
        """Losses and numbers of the tokens of a tile, with their cross entropies."""
        losses_X, numbers = self.losses(tokens)
        return losses_X, {"cross_entropy": -tokens.logps_X} | numbers

    @property
    def has_document_sums(self) -> bool:
        """True if losses depend on `sum_over_documents`. A step then computes all logits twice."""
        return False

    def sum_over_documents(self, tokens: TileTokens) -> dict[str, Any]:
        """Numbers of each token, float32[X] by name, whose sums over the loss tokens of its
        document are among the numbers that `losses` gets, without a gradient."""
        return {}

    def find_divisor(self, counts: Mapping[str, Any]) -> Any:
        """Number that the sum of the losses of a step is divided by.

        Args: counts: `num_loss_tokens` and, by document, `num_trajectories` of the whole step.
        """
        return counts["num_loss_tokens"]
