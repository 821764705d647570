"""Configs and scripts of other systems that train on preferences become valid configs."""

import pathlib

import pytest

from jaxsp.conversion import conversion
from jaxsp.core.errors import UserError
from tests.conversion.test_conversion import convert, convert_text

PATH = pathlib.Path(__file__).parent / "inputs/dpo.py"


def test_a_script_of_trl_with_dpo():
    fields, comments = convert("dpo.py")
    assert fields["objective"] == {
        "type": "robust",
        "beta": 0.05,
        "label_smoothing": 0.1,
        "sft_weight": pytest.approx(0.25),
    }
    assert fields["data"] == {
        "train": [
            {"source": "trl-lib/ultrafeedback_binarized", "format": "preference", "split": "train"}
        ],
        "row_tokens": 2048,
        "long_documents": "truncate",
    }
    assert fields["batch"]["rows_per_step"] == 8 * 2 * 8
    assert fields["optimizer"]["learning_rate"] == 1e-6
    assert fields["adapter"]["rank"] == 4
    assert "a batch of TRL counts records" in comments
    assert "prompt of its own" not in comments
    assert "use_weighting = true: not offered: pairs have equal weights" in comments
    assert "precompute_ref_log_probs" in comments.partition("Not needed here:")[2]


def test_a_config_of_axolotl_with_kto():
    fields, comments = convert("kto.yaml")
    assert fields["objective"] == {"type": "kto", "beta": 0.2, "undesirable_weight": 1.5}
    assert fields["data"]["train"] == [
        {"source": "labels.jsonl", "format": "unpaired", "fields": {"completion": "answer"}},
        {"source": "someone/labels", "format": "unpaired", "split": "train"},
    ]
    assert "train_on" not in fields["data"]
    assert "data.train.1: type llama3.ultra has a prompt of its own" in comments
    assert "data.train.0" not in comments


@pytest.mark.parametrize(
    ("name", "text", "objective"),
    [
        (
            "a.yaml",
            "base_model: a/b\nrl: dpo\nrpo_alpha: 0.5\n",
            {"type": "dpo", "sft_weight": 0.5},
        ),
        ("a.yaml", "base_model: a/b\nrl: orpo\norpo_alpha: 0.2\n", {"type": "orpo", "beta": 0.2}),
        (
            "a.yaml",
            "base_model: a/b\nrl: simpo\nsimpo_gamma: 0.7\n",
            {"type": "simpo", "gamma": 0.7, "sft_weight": 1.0},
        ),
        ("a.yaml", "base_model: a/b\nreward_model: true\nnum_labels: 1\n", {"type": "reward"}),
        (
            "a.yaml",
            "model_name_or_path: a/b\nstage: dpo\npref_loss: hinge\npref_beta: 0.3\n",
            {"type": "hinge", "beta": 0.3},
        ),
        ("a.yaml", "model_name_or_path: a/b\nstage: sft\n", None),
        ("a.yaml", "model_name_or_path: a/b\nloss_type: nll\n", {"type": "sft"}),
        ("a.yaml", "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\nseed: 1\n", "dpo"),
        ("a.yaml", "model_name_or_path: a/b\nloss_type: [ipo]\nbeta: 0.2\n", "ipo"),
        ("a.sh", "trl kto --model_name_or_path a/b --desirable_weight 1.2", "kto"),
        ("a.sh", "accelerate launch scripts/reward.py --dataset_name a/b", "reward"),
        ("a.sh", "accelerate launch dpo.py --loss_type ipo", "ipo"),
        (
            "a.sh",
            "swift rlhf --rlhf_type simpo --model a/b",
            {"type": "simpo", "beta": 2.0, "gamma": 1.0, "sft_weight": 1.0},
        ),
        ("a.sh", "swift rlhf --rlhf_type rm --model a/b --dataset c.jsonl", "reward"),
        ("a.py", "KTOTrainer(args=KTOConfig(beta=0.3))", {"type": "kto", "beta": 0.3}),
        (
            "a.py",
            "CPOTrainer(args=CPOConfig(loss_type='simpo', cpo_alpha=0.0))",
            {"type": "simpo", "sft_weight": 0.0},
        ),
    ],
)
def test_each_trainer_is_an_objective(tmp_path, name, text, objective):
    fields, comments = convert_text(tmp_path, text, name=name)
    assert "must be null" not in comments
    if isinstance(objective, str):
        assert fields["objective"]["type"] == objective
    else:
        assert fields.get("objective") == objective
    if objective is not None:
        is_unpaired = fields["objective"]["type"] == "kto"
        formats = {source["format"] for source in fields["data"]["train"]}
        if fields["objective"]["type"] != "sft":
            assert formats == {"unpaired" if is_unpaired else "preference"}


def test_whole_conversations_of_axolotl_need_no_prompt(tmp_path):
    text = """
base_model: a/b
rl: dpo
datasets:
  - {path: a.jsonl, type: chat_template.argilla_chat, field_chosen: good}
  - {path: b.jsonl, type: chatml.ultra}
"""
    fields, _ = convert_text(tmp_path, text)
    first, second = fields["data"]["train"]
    assert first == {"source": "a.jsonl", "format": "preference", "fields": {"chosen": "good"}}
    assert second == {"source": "b.jsonl", "format": "preference", "ignore_fields": ["prompt"]}


def test_label_smoothing_without_an_effect_in_trl_is_left_out(tmp_path):
    text = "DPOTrainer(args=DPOConfig(label_smoothing=0.1))"
    fields, comments = convert_text(tmp_path, text, name="a.py")
    assert fields["objective"] == {"type": "dpo"}
    assert "label_smoothing = 0.1: TRL ignores it with sigmoid" in comments


def test_a_reference_model_of_a_script_is_named(tmp_path):
    text = "DPOTrainer(model='a/b', ref_model=ref, args=DPOConfig(beta=0.1))"
    fields, comments = convert_text(tmp_path, text, name="a.py")
    assert fields["model"]["source"] == "a/b"
    assert "must be the same model" in comments


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", "base_model: a/b\nrl: grpo\n", "rl = grpo: jaxsp trains with sft, dpo"),
        ("a.sh", "swift rlhf --rlhf_type ppo --reward_model c/d", "rlhf_type = ppo: jaxsp trains"),
        ("a.sh", "trl grpo --model_name_or_path a/b", "runs trl grpo. jaxsp trains with"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(beta=0.1))", "uses GRPOTrainer"),
        ("a.py", "DPOTrainer(args=DPOConfig(loss_type='apo_zero'))", "loss_type = apo_zero: not"),
        ("a.py", "CPOTrainer(args=CPOConfig(beta=0.1))", "loss_type = sigmoid: .* Use simpo"),
    ],
)
def test_training_that_is_not_offered_is_refused(tmp_path, name, text, problem):
    with pytest.raises(UserError, match=problem):
        convert_text(tmp_path, text, name=name)


def test_the_comments_name_where_the_objective_is_from():
    assert "type: robust  # the trainer" in conversion.convert([PATH], num_gpus=8)
