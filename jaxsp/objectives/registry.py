"""All objectives."""

from jaxsp.config.fields import Choice
from jaxsp.objectives.distill import Distill
from jaxsp.objectives.objective import Sft
from jaxsp.objectives.pairs import Dpo, Hinge, Ipo, Kto, Orpo, Reward, Robust, Simpo
from jaxsp.objectives.policy import Policy

OBJECTIVES = (Sft, Dpo, Hinge, Ipo, Robust, Simpo, Orpo, Kto, Reward, Distill, Policy)

OBJECTIVE = Choice(selector="type", types=OBJECTIVES, default="sft")
