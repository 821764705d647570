"""Config section of the objective: what a step minimizes."""

from collections.abc import Mapping
from typing import Annotated, Literal

from jaxsp.config.fields import ConfigSection, NonNegativeFloat, PositiveFloat, with_examples

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "sft": {},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0},
    "hinge": {"beta": 0.1, "sft_weight": 0.0},
    "ipo": {"beta": 0.1, "sft_weight": 0.0},
    "robust": {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0},
    "simpo": {"beta": 0.1, "gamma": 0.5, "label_smoothing": 0.0, "sft_weight": 0.0},
    "orpo": {"beta": 0.1, "sft_weight": 1.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward": {"center_rewards_coefficient": 0.0},
}
"""Fields that apply to each objective, with their defaults, which are those of TRL 1.16. Its SimPO
adds the SFT term by default (cpo_alpha 1), unlike the paper, arXiv:2405.14734."""

FORMATS: Mapping[str, str] = {"kto": "unpaired"} | dict.fromkeys(
    ("dpo", "hinge", "ipo", "robust", "simpo", "orpo", "reward"), "preference"
)
"""Format of records that each objective except sft needs."""


class ObjectiveConfig(ConfigSection):
    """Objective: what a step minimizes."""

    type: Literal["sft", "dpo", "hinge", "ipo", "robust", "simpo", "orpo", "kto", "reward"] = "sft"
    """Objective. sft: mean token loss. The others learn from preferences; the loss of a step is the
    mean over its pairs. dpo: sigmoid loss of the difference between log-probabilities of chosen and
    rejected, relative to the reference model. hinge and robust: variants of dpo. ipo: squared loss
    of the difference per token. simpo and orpo: no reference model. kto: records of format
    unpaired. reward: a reward model with a scalar head (Bradley-Terry)."""
    beta: Annotated[PositiveFloat | None, with_examples(0.1)] = None
    """Strength of the pull toward the reference model; for ipo the tau of the paper, for simpo the
    scale of rewards, for orpo the weight of the odds ratio. null: 0.1. Not for sft and reward."""
    label_smoothing: Annotated[
        float | None, with_examples(0.1, ge=0, lt=0.5, allow_inf_nan=False)
    ] = None
    """Assumed probability that chosen and rejected are swapped; for dpo (then conservative DPO),
    robust and simpo. null: 0."""
    sft_weight: Annotated[NonNegativeFloat | None, with_examples(0.1)] = None
    """Factor of the mean loss of the chosen answers' tokens, which is added to the loss. For dpo,
    hinge, ipo, robust, simpo and orpo. null: 1 for orpo, otherwise 0."""
    gamma: Annotated[NonNegativeFloat | None, with_examples(0.5)] = None
    """Target margin of simpo. null: 0.5."""
    desirable_weight: Annotated[NonNegativeFloat | None, with_examples(1.0)] = None
    """Factor of the losses of desirable records, for kto. null: 1."""
    undesirable_weight: Annotated[NonNegativeFloat | None, with_examples(1.33)] = None
    """Factor of the losses of undesirable records, for kto. null: 1."""
    center_rewards_coefficient: Annotated[NonNegativeFloat | None, with_examples(0.01)] = None
    """Factor of the squared sum of both rewards of a pair, for reward. null: 0."""

    def value(self, name: str) -> float:
        """Value of a field, or its default for this objective."""
        value = getattr(self, name)
        return self.defaults[name] if value is None else value

    @property
    def defaults(self) -> Mapping[str, float]:
        """Fields that apply to this objective, with their defaults."""
        return DEFAULTS[self.type]

    @property
    def format(self) -> str | None:
        """Format of records that the objective needs; None for sft, which takes the others."""
        return FORMATS.get(self.type)
