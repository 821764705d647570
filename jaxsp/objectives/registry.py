"""All objectives."""

from jaxsp.config.fields import Choice
from jaxsp.objectives.distill import Distill
from jaxsp.objectives.objective import Sft
from jaxsp.objectives.pairs import Dpo, Hinge, Ipo, Kto, Orpo, Reward, Robust, Simpo

OBJECTIVES = (Sft, Dpo, Hinge, Ipo, Robust, Simpo, Orpo, Kto, Reward, Distill)

OBJECTIVE = Choice(selector="type", types=OBJECTIVES, default="sft")
