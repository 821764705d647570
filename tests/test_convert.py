"""jaxsp convert: every option of another system's file is in a config that loads."""

import pytest

from jaxsp import convert
from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.run import config_file

AXOLOTL = """
base_model: someone/small
load_in_8bit: false
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
datasets:
  - path: notes/chats
    type: chat_template
    split: train[:20%]
    name: en
    message_property_mappings: {role: from, content: value}
    roles_to_train: null
  - {path: json, data_files: rows.jsonl, type: alpaca}
test_datasets: [{path: held-out.jsonl, type: completion}]
sequence_len: 65_536
sample_packing: false
context_parallel_size: 4
tensor_parallel_size: 1
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_torch_fused
learning_rate: 2e-4
bf16: auto
tf32: false
max_grad_norm: 0
deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: none}}}
special_tokens: {pad_token: x, eos_token: null}
saves_per_epoch: 4
save_total_limit: 3
wandb_project:
plugins: []
hub_token: hf_abcdef
my_option: {deep: {er: false}}
"""

TRL = """
model_name_or_path: someone/small
dataset_name: someone/pairs
loss_type: [sigmoid]
beta: 0.2
max_length: 4096
max_steps: -1
num_train_epochs: 2.0
per_device_train_batch_size: 1
learning_rate: 1.0e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
use_peft: true
lora_target_modules: [q_proj, v_proj]
lora_alpha: null
eval_strategy: "no"
save_strategy: no
report_to: none
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
model_init_kwargs: {attn_implementation: null}
parallelism_config: {parallelism_config_cp_size: 2}
adam_beta2: 0.95
seed: 7
"""

LLAMA_FACTORY = """
### model
model_name_or_path: someone/small
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
lora_rank: 8
dataset: identity.jsonl,someone/chats
template: llama3
cutoff_len: 2048
max_samples: 500
overwrite_cache: true
output_dir: saves/first
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: 100
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
quantization_bit: null
val_size: 0.0
rope_scaling: {type: yarn, factor: 4.0}
"""

ROWS = {AXOLOTL: 16, TRL: 4, LLAMA_FACTORY: 64}
"""Rows of a step on 8 GPUs."""


def convert_text(tmp_path, text, num_gpus=8):
    """Converts a text. Returns: the output; the config that it loads as."""
    (tmp_path / "theirs.yaml").write_text(text)
    output = convert.convert([tmp_path / "theirs.yaml"], num_gpus=num_gpus)
    (tmp_path / "ours.yaml").write_text(output)
    return output, config_file.load(tmp_path / "ours.yaml", [])


@pytest.mark.parametrize("text", [AXOLOTL, TRL, LLAMA_FACTORY], ids=["axolotl", "trl", "factory"])
def test_every_option_is_in_the_output_which_loads(tmp_path, text):
    output, config = convert_text(tmp_path, text)
    comments = [
        line.removeprefix("#   ") for line in output.splitlines() if line.startswith("#   ")
    ]
    for name, value in yaml_io.load(text).items():
        for inner, _ in yaml_io.flatten(value, name, keeps_empty=True):
            assert any(line.startswith(f"{inner} = ") for line in comments), inner
    assert config.batch.rows_per_step == ROWS[text]
    assert "hf_abcdef" not in output


def test_values_are_kept_where_the_field_means_the_same(tmp_path):
    output, config = convert_text(tmp_path, AXOLOTL)
    first, second = config.data.train
    assert (first.source, first.format, first.split, first.subset) == (
        "notes/chats",
        "messages",
        "train[:20%]",
        "en",
    )
    assert second.source == "rows.jsonl"
    assert [(source.source, source.format) for source in config.data.eval] == [
        ("held-out.jsonl", "text")
    ]
    adapter = config.adapter
    assert (adapter.type, adapter.quantization, adapter.rank) == ("lora", "nf4", 32)
    assert (config.mesh.seq, config.run.epochs, config.checkpoint.keep_latest) == (4, 3, 3)
    by_hand = output.split("Set the field by hand:")[1].split("# Set:")[0]
    for name in ("datasets.1.type", "datasets.1.path", "saves_per"):
        assert f"{name}" in by_hand


def test_an_objective_decides_the_format_of_the_data(tmp_path):
    _, config = convert_text(tmp_path, TRL)
    assert (config.objective.type, config.objective.beta) == ("dpo", 0.2)
    assert config.data.train[0].format == "preference"
    assert (config.run.steps, config.run.epochs, config.run.seed) == (None, 2, 7)
    assert (config.adapter.targets, config.optimizer.schedule.min_learning_rate_fraction) == (
        ("q_proj", "v_proj"),
        0.1,
    )


def test_steps_take_precedence_and_a_number_is_no_switch(tmp_path):
    output, config = convert_text(tmp_path, LLAMA_FACTORY)
    assert (config.run.steps, config.run.epochs) == (100, None)
    assert [source.source for source in config.data.train] == ["identity.jsonl", "someone/chats"]
    assert [source.split for source in config.data.train] == [None, None]
    assert (config.model.rope.type, config.model.rope.factor) == ("yarn", 4.0)
    assert "num_train_epochs = 3.0: run.epochs; run" in output


def test_a_value_that_is_refused_is_a_comment(tmp_path):
    text = """
base_model: a/b
learning_rate: -1
stage: dpo
pref_loss: orpo
lr: 0.5
peak_lr: 0.25
"a\\nb": 1
"""
    output, config = convert_text(tmp_path, text)
    assert (config.optimizer.learning_rate, config.objective.type) == (0.5, "orpo")
    assert "peak_lr = 0.25: optimizer.learning_rate; it is set by lr" in output
    assert "#   batch.rows_per_step = 8" in output.split("# Set")[0]
    assert "\nb = 1" not in output


def test_the_command_needs_files_that_can_be_read(tmp_path, capsys):
    with pytest.raises(UserError, match="no such file"):
        convert.main([str(tmp_path / "a.yaml"), "--gpus", "2"])
    (tmp_path / "a.yaml").write_text("base_model: a/b")
    convert.main([str(tmp_path / "a.yaml"), "--gpus", "2"])
    assert yaml_io.load(capsys.readouterr().out)["model"] == {"source": "a/b"}


def test_a_teacher_makes_a_distillation_and_online_rl_is_refused(tmp_path):
    file = tmp_path / "gkd.yaml"
    file.write_text("teacher_model_name_or_path: big\nmodel_name_or_path: small\nmax_steps: 5\n")
    text = convert.convert([file], num_gpus=1)
    assert yaml_io.load(text)["objective"] == {"type": "distill", "teacher": "big"}
    for beta, fields in (
        ("0.0", {"divergence": "forward_kl"}),
        ("1", {"divergence": "reverse_kl"}),
        ("0.5", {"divergence": "jsd", "beta": 0.5}),
        ("0.3", {"divergence": "jsd", "beta": 0.3}),
    ):
        file.write_text(f"teacher_model_name_or_path: big\nbeta: {beta}\nloss_top_k: 64\n")
        objective = yaml_io.load(convert.convert([file], num_gpus=1))["objective"]
        assert objective == {"type": "distill", "teacher": "big"} | fields
    for line in ("num_generations: 8", "loss_type: dr_grpo", "rl: grpo", "trainer: ppo"):
        file.write_text(f"model_name_or_path: small\n{line}\nepsilon: 0.2\n")
        with pytest.raises(UserError, match=rf"{line.replace(':', ' =')}: .*policy\.md"):
            convert.convert([file], num_gpus=1)
    file.write_text("model_name_or_path: small\nrun_name: grpo\nwandb_project: dapo\n")
    assert yaml_io.load(convert.convert([file], num_gpus=1))["objective"] == {"type": "sft"}
