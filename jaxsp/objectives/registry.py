"""Objectives by `objective.type`; sft, the mean token loss, needs none of this."""

from jaxsp.objectives import pairs, unpaired
from jaxsp.objectives.objective import Objective

OBJECTIVES = {
    "dpo": Objective(losses=pairs.compute_dpo, rewards=pairs.ratio_rewards),
    "hinge": Objective(losses=pairs.compute_hinge, rewards=pairs.ratio_rewards),
    "ipo": Objective(losses=pairs.compute_ipo, rewards=pairs.ratio_rewards),
    "robust": Objective(losses=pairs.compute_robust, rewards=pairs.ratio_rewards),
    "simpo": Objective(
        losses=pairs.compute_simpo, rewards=pairs.mean_rewards, needs_reference=False
    ),
    "orpo": Objective(losses=pairs.compute_orpo, rewards=pairs.mean_rewards, needs_reference=False),
    "kto": Objective(
        losses=unpaired.compute_kto,
        rewards=pairs.ratio_rewards,
        measure=unpaired.sum_reference_points,
        needs_step=True,
    ),
    "reward": Objective(losses=pairs.compute_reward, rewards=pairs.scores, needs_reference=False),
}
