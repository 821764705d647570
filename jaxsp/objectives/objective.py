"""Base classes of objectives: what a step minimizes.

Losses are functions of single tokens: of their logits and other numbers. The loss of a token is
computed in a tile, where its logits exist, together with its gradient: logits are never stored. To
add one, write a subclass of `TokenObjective` in a file of its own and an entry of `OBJECTIVES` in
`objectives/registry.py`. Losses of pairs of documents are in `objectives/pairs.py`.

Dims: X tokens of a tile, V vocabulary.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxsp.config.fields import ConfigSection

if TYPE_CHECKING:
    from jax import Array


class Objective(ConfigSection):
    """Loss that training minimizes, and its settings."""

    type: str
    """Training objective. sft learns the tokens of the data, distill the predictions of a teacher.
    The others learn from preferences, and their loss is the mean over the step's pairs."""

    format: ClassVar[str | None] = None
    """Format of records that it needs; None if it takes all formats of one document."""
    has_pairs: ClassVar[bool] = False
    """True if its losses are those of pairs of documents."""
    needs_reference: ClassVar[bool] = False
    """True if it compares with a reference model."""
    needs_step: ClassVar[bool] = False
    """True if the loss of a pair depends on other pairs of the step."""
    is_by_document: ClassVar[bool] = False
    """True if losses depend on the documents of tokens, which are then never cut."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of numbers of each token that records must have."""
        return ()

    @property
    def needs_equal(self) -> tuple[str, ...]:
        """Those of `needs` that must be equal for all loss tokens of a document."""
        return ()

    def find_divisor(self, counts: Mapping[str, Any]) -> Any:
        """Number that the sum of the losses of a step is divided by.

        Args: counts: `num_loss_tokens` and, by document, `num_trajectories` of the whole step.
        """
        return counts["num_loss_tokens"]

    def _find_unused(self, names: Sequence[str], reason: str) -> Iterator[str]:
        """Yields a line for each field that has no effect, but not its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"{self.show(name)}: has no effect {reason} Leave it out."


class Sft(Objective):
    """Supervised fine-tuning: mean cross-entropy of the tokens that have a loss."""

    type: Literal["sft"] = "sft"


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

    @abc.abstractmethod
    def losses(self, tokens: TileTokens) -> tuple[Any, dict[str, Any]]:
        """Loss of each token, float32[X], and numbers of each token, float32[X] by name.

        The loss is differentiated with respect to `logits_XV`. Sums of the numbers over the tokens
        that have a loss are made into metrics (`training/metric_table.py`). A tile may have any
        tokens, so that a token's loss must depend on its own numbers only.
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
