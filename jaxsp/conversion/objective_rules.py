"""Rules for the objective: training on preferences, with trainers and losses of other systems."""

from typing import Any

from jaxsp.config import foreign_names, yaml_io
from jaxsp.conversion.draft import Draft, as_list, is_on
from jaxsp.core.errors import UserError

TRAINER = "trainer"
"""Option that scripts of TRL are read as if they had: the trainer on preferences."""

SWIFT_TRAINER = "rlhf_type"
"""Option of ms-swift that names the trainer."""

_OBJECTIVES: dict[str, dict[str, str]] = {
    "dpo": {
        "sigmoid": "dpo",
        "hinge": "hinge",
        "ipo": "ipo",
        "robust": "robust",
        "orpo": "orpo",
        "simpo": "simpo",
    },
    "ipo": {"ipo": "ipo"},
    "simpo": {"simpo": "simpo"},
    "cpo": {"sigmoid": "", "simpo": "simpo"},
    "orpo": {"orpo": "orpo"},
    "kto": {"kto": "kto"},
    "reward": {"reward": "reward"},
}
"""Objectives by trainer and loss. The first loss is the default; an empty one is not offered."""

_TORCHTUNE = "loss._component_"
"""Option of torchtune that names the loss."""

_SUPERVISED = ("sft", "pt")

_OFFERED = (
    "jaxsp trains with sft, dpo, ipo, simpo, orpo, kto and reward models, on answers in the data"
)

_STEP_TASK = (
    "batch.rows_per_step: a batch of {title} counts records, and here a row is full of them, so a "
    "step has more. Use fewer rows for the same number"
)


def convert(draft: Draft) -> None:
    """Converts the trainer and its loss, and adds the defaults of the trainer.

    Raises: UserError for training that is not offered.
    """
    trainer, origin = _take_trainer(draft)
    if trainer in (None, *_SUPERVISED):
        return
    losses = _OBJECTIVES.get(str(trainer))
    if losses is None:
        raise UserError(f"{origin} = {yaml_io.format_value(trainer)}: {_OFFERED}.")
    draft.add_defaults(str(trainer))
    names = as_list(draft.take("loss_type", "pref_loss")) or [next(iter(losses))]
    objective = losses.get(str(names[0]))
    if not objective or names[1:] not in ([], ["sft"]):
        text = yaml_io.format_value(names if len(names) > 1 else names[0])
        offered = ", ".join(loss for loss in losses if losses[loss])
        raise UserError(
            f"loss_type = {text}: not offered for {trainer}. Use {offered} in a copy of the file."
        )
    draft.set("objective.type", objective, origin)
    weights = as_list(draft.take("loss_weights")) or [1.0, 1.0]
    if len(names) > 1 and len(weights) > 1:
        draft.set("objective.sft_weight", weights[1] / weights[0], "loss_type, loss_weights")
    if objective == "reward":
        draft.skip("num_labels", "problem_type", "task_type")
    if draft.system == "trl" and objective == "dpo" and is_on(draft.options.get("label_smoothing")):
        smoothing = draft.take("label_smoothing")
        draft.not_converted[f"label_smoothing = {smoothing:g}"] = (
            "TRL ignores it with sigmoid; objective.label_smoothing is conservative DPO"
        )
    draft.add_task(_STEP_TASK.format(title=draft.title))


def _take_trainer(draft: Draft) -> tuple[Any, str]:
    """Returns the trainer, None if there is none, and the option that names it."""
    if is_on(draft.options.get("reward_model")):
        # elsewhere, a model for RL
        is_trained = draft.options["reward_model"] is True
        model = draft.take("reward_model")
        if is_trained:
            return "reward", "reward_model"
        draft.not_converted[f"reward_model = {model}"] = "no objective reads its scores"
    for name in ("rl", TRAINER, SWIFT_TRAINER, "stage"):
        # not a part of another section, such as zero_optimization.stage
        if name in draft.options and isinstance(draft.options[name], str):
            trainer = draft.take(name)
            origin = "the trainer" if name == TRAINER else name
            return {"rm": "reward"}.get(trainer, trainer), origin
    if foreign_names.translate_value("objective.type", draft.options.get(_TORCHTUNE)) == "dpo":
        draft.take(_TORCHTUNE)
        return "dpo", _TORCHTUNE
    # YAML files of TRL do not name the trainer
    for name in as_list(draft.options.get("loss_type"))[:1]:
        for trainer, losses in _OBJECTIVES.items():
            if str(name) in losses:
                return trainer, "loss_type"
    return None, ""
