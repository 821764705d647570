"""Preference training is TRL's: metrics of every step, and weights after the last one."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests import tolerances
from tests.training import trl_runs

pytestmark = pytest.mark.e2e


@dataclasses.dataclass(frozen=True)
class Case:
    """One objective in both systems."""

    objective: dict[str, Any]
    learning_rate: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TRL's config."""

    @property
    def trainer(self) -> str:
        """Name in TRAINERS."""
        name = self.objective["type"]
        return name if name in trl_runs.TRAINERS else "dpo"


KTO_WEIGHTS = {"desirable_weight": 1.2, "undesirable_weight": 0.3}
CASES = {
    "dpo": Case({"type": "dpo"}, 0.05),
    # with beta 0.1, the losses of all pairs are 0 after three steps
    "hinge": Case({"type": "hinge", "beta": 0.02}, 0.1, {"loss_type": ["hinge"], "beta": 0.02}),
    "ipo": Case({"type": "ipo"}, 0.001, {"loss_type": ["ipo"]}),
    "robust": Case(
        {"type": "robust", "label_smoothing": 0.1},
        0.05,
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "dpo with sft": Case(
        {"type": "dpo", "sft_weight": 0.3},
        0.05,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    ),
    "kto": Case({"type": "kto", **KTO_WEIGHTS}, 0.05, KTO_WEIGHTS),
    "simpo": Case({"type": "simpo"}, 0.5, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "orpo": Case({"type": "orpo", "sft_weight": 0.0}, 0.5),
}

LEARNING_RATE_FACTORS = {"llama": 1.0, "qwen3": 1.0, "gemma3": 0.2}
"""With the full rate, two float32 runs of the model with large gradients part: the changes of a
step amplify their rounding."""

E2E = {
    ("dpo", "llama"),
    ("ipo", "qwen3"),
    ("kto", "llama"),
    ("simpo", "qwen3"),
    ("orpo", "gemma3"),
}
"""Objectives and models in the e2e tier; the others are slow."""

REWARDS = ("chosen_reward", "rejected_reward", "reward_margin")
PAIRED = set(trl_runs.METRICS) - {"kl"}
COMPARED = dict.fromkeys(CASES, PAIRED) | {
    "kto": set(trl_runs.METRICS) - {"reward_accuracy"},
    # TRL's logps are means over tokens here, and so are the rewards
    "simpo": PAIRED - {"chosen_logp", "rejected_logp"},
    "orpo": PAIRED - {"chosen_logp", "rejected_logp"},
}
"""Metrics that both systems have."""


def check_metrics(ours: trl_runs.Run, theirs: trl_runs.Run, names: set[str]) -> None:
    """Checks every step, relative to the largest value of the metric in the run.

    Rewards, which are differences of log-probabilities, are relative to the largest of all rewards.
    """
    assert len(ours.steps) == len(theirs.steps)
    assert {line["num_pairs"] for line in ours.steps} == {trl_runs.NUM_PAIRS}
    actual = {name: np.array([line[name] for line in ours.steps]) for name in names}
    expected = {name: np.array([line[name] for line in theirs.steps]) for name in names}
    scales = {name: np.abs(values).max() for name, values in expected.items()}
    errors = {}
    for name in sorted(names):
        assert np.ptp(expected[name]) > 0, name
        scale = max(scales[reward] for reward in REWARDS) if name in REWARDS else scales[name]
        errors[name] = np.abs(actual[name] - expected[name]).max() / scale
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) < tolerances.TRL, errors


def check_weights(ours: trl_runs.Run, theirs: trl_runs.Run, start: trl_runs.Tensors) -> None:
    """Checks weights relative to their change. A small change of a weight is rounded to it."""
    assert ours.tensors.keys() == theirs.tensors.keys() == start.keys()
    norm = np.linalg.norm
    errors = {name: norm(ours.tensors[name] - theirs.tensors[name]) for name in start}
    changes = {name: norm(theirs.tensors[name] - start[name]) for name in start}
    assert all(changes.values())
    total = math.hypot(*errors.values()) / math.hypot(*changes.values())
    worst = max(start, key=lambda name: errors[name] / changes[name])
    print(f"weights {total:.1e}, worst {worst} {errors[worst] / changes[worst]:.1e}")
    assert total < tolerances.TRL
    for name, error in errors.items():
        rounding = tolerances.TRL_ROUNDING * norm(start[name])
        assert error < tolerances.TRL * changes[name] + rounding, name


def compare(tmp_path, name: str, model: str, **how: Any) -> trl_runs.Run:
    """Trains in both systems, and compares. Returns the run of TRL."""
    case = CASES[name]
    folder = trl_runs.write_model(model, tmp_path / "model")
    learning_rate = case.learning_rate * LEARNING_RATE_FACTORS[model]
    records = trl_runs.draw_pairs()
    reversed_records = records
    if name == "kto":
        # TRL takes mismatched completions from the previous record of a batch, jaxsp from the next
        records = trl_runs.unpair(records)
        reversed_records = records[::-1]
    trainer = trl_runs.make_trl(
        case.trainer,
        folder,
        reversed_records,
        tmp_path / "trl",
        learning_rate=learning_rate,
        **case.options,
    )
    theirs = trl_runs.train_trl(trainer, tmp_path / "trained")
    ours = trl_runs.train_jaxsp(
        folder,
        records,
        tmp_path / "jaxsp",
        learning_rate=learning_rate,
        objective=case.objective,
        **how,
    )
    check_metrics(ours, theirs, COMPARED[name])
    check_weights(ours, theirs, trl_runs.read_tensors(folder))
    return theirs


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[] if (name, model) in E2E else pytest.mark.slow)
        for name in CASES
        for model in trl_runs.MODELS
    ],
)
def test_ten_steps_are_those_of_trl(tmp_path, name, model):
    theirs = compare(tmp_path, name, model)
    if name == "kto":
        assert theirs.steps[-1]["kl"] > 0.1, "the reference point is not only its limit"


@pytest.mark.slow
def test_pairs_on_a_mesh_are_those_of_trl(tmp_path):
    """Rows of four microbatches, on four devices, hold parts of pairs."""
    compare(tmp_path, "dpo", "llama", num_rows=4, mesh={"data": 2, "seq": 2})


def test_lora_is_that_of_trl(tmp_path):
    """From the adapter that TRL made: B is 0, so that the reference is the base for both."""
    import peft

    folder = trl_runs.write_model("llama", tmp_path / "model")
    records = trl_runs.draw_pairs()
    how: dict[str, Any] = {"learning_rate": 0.2, "num_steps": 3}
    trainer = trl_runs.make_trl(
        "dpo",
        folder,
        records,
        tmp_path / "trl",
        peft_config=peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"
        ),
        **how,
    )
    with trl_runs.quiet():
        trainer.model.save_pretrained(tmp_path / "adapter")
    theirs = trl_runs.train_trl(trainer, tmp_path / "trained")
    adapter = {"type": "lora", "source": str(tmp_path / "adapter")}
    objective = {"type": "dpo"}
    ours = trl_runs.train_jaxsp(
        folder, records, tmp_path / "jaxsp", adapter=adapter, objective=objective, **how
    )
    check_metrics(ours, theirs, PAIRED)
    check_weights(ours, theirs, trl_runs.read_tensors(tmp_path / "adapter"))
