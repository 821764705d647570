"""Base classes of objectives: what a step minimizes."""

import abc
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxsp.config.fields import ConfigSection, NonNegativeFloat, PositiveFloat, with_examples

if TYPE_CHECKING:
    from jaxsp.objectives.pair_sums import PairSums


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

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of numbers of each token that records must have."""
        return ()

    @property
    def needs_equal(self) -> tuple[str, ...]:
        """Those of `needs` that must be equal for all loss tokens of a document."""
        return ()


class Sft(Objective):
    """Supervised fine-tuning: mean cross-entropy of the tokens that have a loss."""

    type: Literal["sft"] = "sft"


class PairObjective(Objective, abc.ABC):
    """Objective of pairs of documents, with defaults as in TRL 1.16.

    Losses and rewards are functions of `PairSums`, inside jit.
    """

    format: ClassVar[str | None] = "preference"
    has_pairs: ClassVar[bool] = True

    @abc.abstractmethod
    def losses(self, pairs: "PairSums") -> Any:
        """Loss of each pair, float32[P], without the SFT term."""

    @abc.abstractmethod
    def rewards(self, pairs: "PairSums") -> Any:
        """Implicit reward of each document, float32[P, 2], for metrics."""

    def margin(self, pairs: "PairSums") -> Any:
        """Difference of the implicit rewards, float32[P]."""
        rewards_P2 = self.rewards(pairs)
        return rewards_P2[:, 0] - rewards_P2[:, 1]

    def measure(self, pairs: "PairSums") -> dict[str, Any]:
        """Sums for metrics that only this objective has."""
        return {}


class Relative(PairObjective):
    """Objective with a reference model, whose rewards are log-ratios to it."""

    needs_reference: ClassVar[bool] = True
    beta: Annotated[PositiveFloat, with_examples(0.1)] = 0.1
    """Strength of the regularization toward the reference model; for ipo, the paper's tau."""

    def rewards(self, pairs: "PairSums") -> Any:
        return self.beta * pairs.ratios_P2


class WithSft(PairObjective):
    """Objective whose loss can have the loss of chosen answers added."""

    sft_weight: Annotated[NonNegativeFloat, with_examples(0.1)] = 0.0
    """Factor of the mean loss of the chosen answers' tokens, which is added to the loss."""
