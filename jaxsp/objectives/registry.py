"""All objectives."""

from jaxsp.config.fields import Choice
from jaxsp.objectives.objective import Sft
from jaxsp.objectives.pairs import Dpo, Hinge, Ipo, Orpo, Reward, Robust, Simpo
from jaxsp.objectives.unpaired import Kto

OBJECTIVES = (Sft, Dpo, Hinge, Ipo, Robust, Simpo, Orpo, Kto, Reward)

OBJECTIVE = Choice(selector="type", types=OBJECTIVES, default="sft")
