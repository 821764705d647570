"""Option names of other systems: each is answered with jaxsp's field, or with why there is none."""

import pathlib
import re

import pytest

from jaxsp.config import config_errors, config_file, foreign_names
from jaxsp.config.data_schema import SourceConfig
from jaxsp.config.schema import Config
from jaxsp.core import errors
from jaxsp.core.errors import UserError

FOLDER = pathlib.Path(__file__).parent / "foreign"

SOUND = {
    "run": {"directory": "runs/first", "steps": 3},
    "model": {"config": {"model_type": "llama"}},
    "data": {"train": [{"source": "a.txt", "format": "text"}], "row_tokens": 128},
    "batch": {"rows_per_step": 8},
    "optimizer": {"learning_rate": 1e-3},
}

NOT_NEEDED = "not needed: "
NOT_OFFERED = "not offered: "

ANSWERS = {
    "data.row_tokens": (
        "seq_len sequence_length sequence_len context_length cutoff_len max_length block_size "
        "max_seq_length"
    ),
    "batch.rows_per_microbatch": (
        "micro_batch_size per_device_train_batch_size local_batch_size "
        "train_micro_batch_size_per_gpu auto_find_batch_size"
    ),
    "batch.rows_per_step": "global_batch_size train_batch_size gradient_accumulation_steps "
    "per_device_batch_size num_tokens_per_train_step",
    "mesh.seq": "context_parallel_degree context_parallel_size cp sp sp_size cp_size "
    "sequence_parallel_degree sequence_parallel_size",
    "mesh.data": "dp fsdp_size dp_shard dp_shard_size tensor_parallel",
    "mesh.replica": "dp_replicate_size",
    "attention.kv_heads_per_gather": "heads_k_stride",
    "attention.strategy": "ring_attn_func",
    "attention.kernel": "attn_implementation flash_attention",
    "memory.remat": "remat_policy gradient_checkpointing activation_checkpointing",
    "memory.offload_activations": "activation_offloading",
    "memory.offload_optimizer": "offload_optimizer_device",
    "adapter.dropout": "lora_dropout",
    "adapter.quantization": "load_in_4bit load_in_8bit quantization_bit",
    "adapter.type": "use_peft use_dora peft_use_dora",
    "adapter.rank": "lora_r lora_rank lora.r peft.dim",
    "adapter.alpha": "lora_alpha",
    "adapter.use_rslora": "use_rslora peft_use_rslora",
    "adapter.targets": "lora_target_modules lora_target_linear lora_target",
    "adapter.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
    "adapter.source": "lora_model_dir adapter_name_or_path",
    "memory.mlp_tile_tokens": "tiled_mlp",
    "data.train_on": "assistant_only_loss completion_only_loss train_on_inputs",
    "data.chat_template": "chat_template",
    "model.source": "base_model model_name_or_path",
    "model.compute_dtype": "bf16 torch_dtype",
    "model.rope": "rope_scaling rope_parameters overrides_of_model_config",
    "model.rope.theta": "rope_theta rotary_base",
    "model.rope.type": "rope_scaling.type rope_scaling.rope_type",
    "model.rope.factor": "rope_scaling.factor",
    "data.train": "datasets dataset_name",
    "memory.loss_tile_tokens": "use_liger_kernel liger_cross_entropy",
    "data.num_workers": "dataset_num_proc",
    "data.eval_fraction": "val_set_size",
    "run.save_every": "save_steps save_strategy",
    "run.eval_every": "eval_steps eval_strategy",
    "run.log_every": "logging_steps",
    "run.directory": "output_dir",
    "run.resume": "resume_from_checkpoint",
    "run.epochs": "num_epochs num_train_epochs",
    "run.steps": "max_steps",
    "run.step_timeout": "ddp_timeout",
    "checkpoint.keep_latest": "save_total_limit",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.best_eval": "metric_for_best_model",
    "logging.trackers": "report_to use_wandb use_mlflow",
    "logging.project": "wandb_project mlflow_experiment_name",
    "logging.run_name": "run_name wandb_name mlflow_run_name",
    "adapter.target_parameters": "lora_target_parameters",
    "optimizer.warmup_fraction": "warmup_ratio",
    "optimizer.learning_rate": "lr",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "optimizer.weight_decay": "weight_decay",
    "objective.type": "rl rlhf_type pref_loss loss_type reward_model",
    "objective.beta": "rl_beta pref_beta orpo_alpha loss.beta",
    "objective.label_smoothing": "label_smoothing dpo_label_smoothing",
    "objective.sft_weight": "cpo_alpha rpo_alpha pref_ftx loss_weights",
    "objective.gamma": "simpo_gamma",
    "objective.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "objective.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "objective.center_rewards_coefficient": "center_rewards_coefficient",
    NOT_NEEDED: "packing sample_packing padding_free deepspeed fsdp zero_optimization.stage "
    "precompute_ref_log_probs "
    "mlflow_tracking_uri wandb_entity "
    "lora_qkv_kernel liger_rope liger_rms_norm",
    NOT_OFFERED: "use_comet lora_bias rank_pattern push_to_hub tensor_parallel ref_model ld_alpha "
    "sync_ref_model f_divergence_type use_weighting discopop_tau max_prompt_length num_generations",
}
"""Names that the answer must have: a field, or the reason why there is none."""

CASES = [(name, answer) for answer, names in ANSWERS.items() for name in names.split()]


def problems(fields: dict, *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_file.parse(SOUND | fields, words)
    return caught.value.problems


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_a_name_of_another_system_is_answered_wherever_it_stands(name, answer):
    group = "logging" if answer.startswith("memory") else "memory"
    messages = [problems({name: 4}), problems({group: {name: 4}}), problems({}, f"{name}=4")]
    messages.append(problems({}, f"training.{name.upper().replace('_', '-')}=4"))
    for (line,) in messages:
        assert re.search(rf"{re.escape(answer)}(?!\w|\.\w)", line) or answer in (
            NOT_NEEDED,
            NOT_OFFERED,
        )
        assert (NOT_NEEDED in line, NOT_OFFERED in line) == tuple(
            (name, reason) in CASES for reason in (NOT_NEEDED, NOT_OFFERED)
        )


def test_the_table_has_no_name_twice_and_every_field_it_names_exists():
    names = [
        name for counterpart in foreign_names.list_counterparts() for name in counterpart.names
    ]
    assert len(names) == len(set(names)) >= 250
    groups = "|".join(Config.model_fields)
    pattern = re.compile(rf"(?<![\w./])(?:{groups})\.[a-z_]\w*(?:\.\d\.\w+)?(?:=[\w\[:\]-]+)?")
    num_fields = 0
    for counterpart in foreign_names.list_counterparts():
        for name in pattern.findall(f"{counterpart.field or ''} {counterpart.note}"):
            field, _, value = name.partition("=")
            resolve(field)
            num_fields += 1
            known = value and value.replace("FOLDER", "x")
            given = int(value) if value.isdecimal() else known
            assert not value or config_errors.coerce_value(field, given) is not None, name
        if counterpart.field is None:
            assert counterpart.note.startswith((NOT_NEEDED, NOT_OFFERED))
            assert not counterpart.note.endswith(": "), counterpart.names
    assert num_fields > 90


def resolve(field: str) -> None:
    """Asserts that the config has a dotted field."""
    group: type = Config
    for part in field.split("."):
        if not part.isdigit():
            assert part in group.model_fields, field
            group = {"train": SourceConfig}.get(part, group.model_fields[part].annotation)


def test_no_name_with_a_group_is_a_field():
    dotted = [
        name
        for counterpart in foreign_names.list_counterparts()
        for name in counterpart.names
        if "." in name
    ]
    for name in dotted:
        with pytest.raises((AssertionError, KeyError)):
            resolve(name)
    assert len(dotted) >= 8


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("--lr=3e-4", "optimizer.learning_rate"),
        ("optimizer.params.lr=1.0", "optimizer.learning_rate"),
        ("seed=3", "run.seed"),
        ("training.steps=7", "run.steps"),
        ("dataset_subset=en", "data.train.0.subset"),
        ("data.train.0.path=b.txt", "data.train.0.source"),
        ("optimizer=adamw", "optimizer.name"),
        ("use_peft=true", "adapter.type=lora"),
        ("model=Qwen/Qwen3-0.6B", "model.source"),
        ("loss._component_=torchtune.rlhf.loss.DPOLoss", "objective.type"),
    ],
)
def test_an_option_is_answered_with_its_field(word, field):
    line = next(line for line in problems({}, word) if field in line)
    assert line.startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("mesh.sq=4", "mesh.seq"),
        ("mesh.qse=4", None),
        ("optimizer.learningrate=1.0", "optimizer.learning_rate"),
        ("optimizer.lerning_rat=1.0", "optimizer.learning_rate"),
        ("optimizer.beta3=0.5", None),
        ("mesh.steps=4", "run.steps"),
        ("memory.learning_rat=1.0", None),
        ("data.train.0.formt=text", "data.train.0.format"),
        ("optimiser={learning_rate: 1, schedule: x, eps: 1, beta1: 1, beta2: 1}", "optimizer"),
        ("mesh.data_parallel=4", None),
    ],
)
def test_only_near_names_of_the_group_and_exact_names_of_others_are_suggested(word, near):
    lines = [line for line in problems({}, word) if "unknown" in line]
    (line,) = lines
    match = re.search(r"Did you mean (.*)\?", line)
    assert (match and match.group(1)) == near


def test_two_names_that_are_equally_near_are_no_suggestion():
    assert errors.find_nearest("bet", ["beta", "best"]) is None
    assert errors.find_nearest("ab", ["abcd"]) is None
    assert errors.find_nearest("rowtokens", ["row_tokens", "row_token"]) == "row_tokens"
    assert errors.find_nearest("mseh", ["mesh", "batch"]) == "mesh"


@pytest.mark.parametrize("file", ["axolotl.yaml", "training_arguments.json"])
def test_a_whole_file_of_another_system_is_answered_with_the_command_that_converts_it(file):
    with pytest.raises(UserError) as caught:
        config_file.load(FOLDER / file, [])
    (line,) = caught.value.problems
    assert f"jaxsp convert {FOLDER / file} --gpus 8" in line
    assert next(iter(config_file.read(FOLDER / file))) in line


def test_own_mistakes_are_reported_beside_the_options_of_another_system():
    names = {"lr": 1.0, "seq_len": 8, "packing": True, "bf16": True, "max_steps": 3}
    lines = problems(names | {"mesh": {"seq": 0}})
    assert any("5 options of another system" in line for line in lines)
    assert any(line.startswith("mesh.seq = 0") for line in lines)


def test_a_few_foreign_names_in_a_config_of_ours_are_lines_of_their_own():
    names = {"lr": 1.0, "seq_len": 8, "lora_bias": "all", "packing": True}
    messages = problems(names)
    assert len(messages) == len(names)


def test_the_list_of_groups_is_there_once():
    messages = problems({"abc": 1, "bcd": 2, "cde": 3})
    assert [", ".join(Config.model_fields) in line for line in messages] == [True, False, False]


@pytest.mark.parametrize(
    ("word", "example"),
    [
        ("lr", "optimizer.learning_rate="),
        ("seed", "run.seed="),
        ("abc", "mesh.seq="),
        ("bf16", "model.compute_dtype="),
    ],
)
def test_a_word_without_a_value_is_answered_with_an_example_of_its_field(word, example):
    (line,) = problems({}, word)
    assert example in line
    config_file.parse(
        SOUND, [re.search(r"\S+=\S+(?=\.$)", line.replace("key.path=value", "")).group()]
    )


def test_notes_are_whole():
    for counterpart in foreign_names.list_counterparts():
        for pair in ("()", "[]", "{}"):
            assert counterpart.note.count(pair[0]) == counterpart.note.count(pair[1]), (
                counterpart.note
            )


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("val_set_size=0.0", "data.eval_fraction"),
        ("offload_param=none", "memory.offload_optimizer"),
        ("sequence_parallel=false", "mesh.seq"),
        ("evals_per_epoch=0", "run.eval_every"),
        ("save_strategy=no", "run.save_every"),
        ("bf16=false", "model.compute_dtype"),
    ],
)
def test_an_option_that_is_off_gets_no_example_that_turns_it_on(word, field):
    (line,) = problems({}, word)
    assert field in line
    assert f"{field}=" not in line.replace("(the default; float32", "")


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("mesh.model=2", "model.source"),
        ("validation.steps=3", "run.steps"),
        ("run.name=x", "optimizer.name"),
        ("model.name=llama3", "model.source=llama3"),
        ("fp16.loss_scale=0", "data.train_on"),
        ("ignore_data_skip=true", "run.on_data_change"),
    ],
)
def test_a_name_that_means_something_else_gets_no_wrong_field(word, wrong):
    (line,) = problems({}, word)
    assert wrong not in line
