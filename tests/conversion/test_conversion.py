"""Configs and scripts of other systems become valid configs, and nothing is left out silently."""

import pathlib

import pytest

from jaxsp import convert as command
from jaxsp.config import config_file, yaml_io
from jaxsp.conversion import conversion
from jaxsp.core.errors import UserError

INPUTS = pathlib.Path(__file__).parent / "inputs"


def convert(*names, num_gpus=8):
    """Converts inputs. Returns: the config's fields; its first comments, as one line."""
    return parse(conversion.convert([INPUTS / name for name in names], num_gpus=num_gpus))


def convert_text(tmp_path, text, *, name="input.yaml", num_gpus=8):
    path = tmp_path / name
    path.write_text(text)
    return parse(conversion.convert([path], num_gpus=num_gpus))


def parse(text):
    fields = yaml_io.load(text)
    config_file.parse(fields)
    head = [line.removeprefix("#").strip() for line in text.splitlines() if line[:1] == "#"]
    return fields, " ".join(head)


def test_a_config_of_axolotl():
    fields, comments = convert("axolotl.yaml")
    assert fields["batch"] == {"rows_per_step": 2 * 4 * 8 // 4, "rows_per_microbatch": 2}
    assert fields["mesh"] == {"seq": 4}
    assert fields["adapter"] == {
        "type": "lora",
        "quantization": "nf4",
        "rank": 32,
        "alpha": 16,
        "dropout": 0.0,
        "targets": "all-linear",
    }
    assert fields["run"]["epochs"] == 3
    assert fields["run"]["save_every"] == fields["run"]["eval_every"] == "epoch"
    assert fields["optimizer"] == {
        "name": "adamw",
        "learning_rate": 2e-4,
        "schedule": "cosine",
        "min_learning_rate_fraction": 0.1,
        "warmup_fraction": 0.03,
        "beta2": 0.999,
        "max_grad_norm": None,
    }
    assert fields["attention"] == {"strategy": "all_gather"}
    assert fields["logging"] == {"trackers": ["wandb"], "project": "long"}
    assert fields["memory"] == {"offload_activations": "layer_inputs"}
    assert fields["checkpoint"] == {"keep_latest": 3}
    for part in (
        "neftune_noise_alpha = 5: not offered",
        "plugins: mine.Plugin: not offered",
        "shuffle_merged_datasets = false",
        "zero3_cpuoffload.json offloads to the CPU",
        "hub_token = (a secret)",
        "4 times per epoch",
    ):
        assert part in comments
    assert "tiled_mlp" in comments.partition("Not needed here:")[2]
    assert "hf_abcdef" not in comments


def test_data_sets_of_axolotl():
    fields, comments = convert("axolotl.yaml")
    chats, first_book, second_book, alpaca, tokens = fields["data"]["train"]
    assert chats == {
        "source": "notes/chats",
        "format": "messages",
        "fields": {"messages": "conversations", "role": "from", "content": "value"},
        "roles": {"human": "user", "gpt": "assistant"},
        "split": "train[:20%]",
    }
    sources = (first_book["source"], second_book["source"])
    assert sources == ("data/books/a.jsonl", "data/books/b.jsonl")
    assert first_book["fields"] == {"text": "chapter"}
    assert tokens == {"source": "tokens.jsonl", "format": "tokens"}
    assert "hf download --repo-type dataset someone/books a.jsonl b.jsonl" in comments
    assert (
        f"data.train.{fields['data']['train'].index(alpaca)}: type alpaca has a prompt" in comments
    )


def test_a_script_of_trl_is_parsed_and_not_executed():
    fields, comments = convert("sft.py")
    assert fields["model"] == {"source": "someone/small"}
    assert fields["run"]["directory"] == "someone/small-sft"
    assert fields["data"] == {
        "train": [{"source": "someone/chats", "format": "messages", "split": "train"}],
        "row_tokens": 4096,
        "long_documents": "truncate",
    }
    assert fields["batch"]["rows_per_step"] == 64
    assert fields["adapter"] == {
        "type": "lora",
        "rank": 4,
        "alpha": 8,
        "dropout": 0.0,
        "targets": ["q_proj"],
        "target_parameters": ["down_proj"],
    }
    assert fields["optimizer"]["min_learning_rate_fraction"] == pytest.approx(0.1)
    assert "map() changes records" in comments
    assert "seed = len(name): its value is known when the script runs" in comments


def test_a_shell_script_of_ms_swift():
    fields, comments = convert("swift.sh", num_gpus=None)
    assert "for 4 GPUs" in comments
    assert fields["model"] == {
        "source": "Qwen/Qwen3-8B",
        "rope": {"type": "yarn"},
        "max_position_embeddings": 131072,
    }
    english = {"source": "someone/chats", "format": "messages", "subset": "en"}
    assert fields["data"]["train"] == [
        english | {"split": "train[:500]"},
        {"source": "data/own.jsonl", "format": "messages"},
    ]
    assert fields["batch"] == {"rows_per_step": 4 * 4 // 2}
    assert fields["memory"] == {"offload_optimizer": "state"}
    assert "adapter" not in fields
    assert "lora_rank" in comments.partition("Not needed here:")[2]


def test_accelerate_s_file_has_the_mesh(tmp_path):
    options = "model_name_or_path: a/b\ndataset_name: c/d\nmax_length: 4096\n"
    (tmp_path / "trl.yaml").write_text(options)
    paths = [tmp_path / "trl.yaml", INPUTS / "accelerate.yaml"]
    fields, comments = parse(conversion.convert(paths, num_gpus=None))
    assert fields["mesh"] == {"seq": 2}
    assert fields["batch"] == {"rows_per_step": 8 * 4 // 2, "rows_per_microbatch": 8}
    assert fields["data"]["train_on"] == "all"
    assert "messages is a guess" in comments
    assert "without packing" in comments
    assert "Not converted" not in comments


def test_options_with_other_values_are_reported(tmp_path):
    text = """
base_model: a/b
model_config: x
qat: {weight_dtype: int4}
torch_dtype: float16
optimizer: rmsprop
num_epochs: 1.5
warmup_ratio: 0.1
lr_scheduler: polynomial
micro_batch_size: 1
batch_size: 4
tensor_parallel_size: 2
adapter: dora
lora_r: 8
lora_alpha: 8
lora_dropout: 0.1
early_stopping_patience: 3
resume_from_checkpoint: out/checkpoint-3
per_device_train_batch_size: 3
"""
    fields, comments = convert_text(tmp_path, text)
    for part in (
        "model_config = x: unknown",
        "qat.weight_dtype = int4: not offered",
        "float16: not offered",
        "optimizer = rmsprop: see optimizer.name",
        "run.epochs: must be whole, and is 1.5",
        "lr_scheduler = polynomial",
        "adapter.dropout = 0.1: must be 0",
        "run.early_stopping_patience = 3: needs an eval set",
        "out/checkpoint-3 is a checkpoint of Axolotl",
        "per_device_train_batch_size = 3: 1 from another option is used instead",
        "data.train: the input has none",
        "optimizer.learning_rate: the input has none",
    ):
        assert part in comments, part
    assert fields["mesh"]["seq"] == 2
    assert fields["batch"]["rows_per_step"] == 4 * 8 // 2
    assert fields["adapter"]["type"] == "dora"


def test_comments_cannot_forge_fields(tmp_path):
    text = '"base_model": "a/b"\n"evil\\e[31m\\nrun": "x\\nrun: {directory: /tmp}"\nnum_epochs: 1\n'
    text += 'optimizer: "x\\noptimizer: {learning_rate: 9}"\noutput_dir: "out\\n# x"\n'
    fields, comments = convert_text(tmp_path, text)
    assert "evil" in comments
    assert "\x1b" not in comments
    assert fields["run"]["directory"] == "out\n# x"
    assert fields["optimizer"]["learning_rate"] == 1e-5


def test_each_value_has_its_option_as_a_comment(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base_model: a/b\nadapter: lora\nload_in_4bit: false\nload_in_8bit: true\n")
    text = conversion.convert([path], num_gpus=8)
    for line in ("source: a/b  # base_model", "quantization: int8  # load_in_8bit", "  # FILL IN"):
        assert line in text
    assert "beta2: 0.999  # default of Axolotl" in text


def test_rows_are_a_multiple_of_the_gpus_that_share_them(tmp_path):
    text = "base_model: a/b\nsequence_len: 1001\ncontext_parallel_size: 4\n"
    fields, comments = convert_text(tmp_path, text)
    assert fields["data"]["row_tokens"] == 1008
    assert "1001, rounded" in comments
    assert "model.compute_dtype: bfloat16, the default; Axolotl's is float32" in comments


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", "base_model: a/b\ndiffusion: {x: 1}\n", "diffusion.x = 1: jaxsp trains"),
        ("a.sh", "swift sft --model a/b --task_type seq_cls", "task_type = seq_cls: jaxsp trains"),
        ("a.yaml", "base_model: a/b\ncontext_parallel_size: 3\n", "Use 6 or 9"),
        ("a.yaml", "base_model: a/b\nmicro_batch_size: x\n", "micro_batch_size = x"),
        ("a.yaml", "x: 1\n", "has no option of a known system"),
        ("a.yaml", "a: &a [x, x]\nb: [*a\n", "cannot be read as YAML"),
        ("a.py", "trainer = GRPOTrainer(model)", "uses GRPOTrainer"),
        ("a.py", "SFTTrainer(args=parse())", "has no SFTConfig"),
        ("a.py", "def", "cannot be read as Python"),
        ("a.sh", "swift infer --model a/b", "runs swift infer"),
        ("a.sh", "accelerate launch ppo.py --x 1", "runs ppo.py"),
        ("a.sh", "axolotl train x.yaml", "Convert the YAML file"),
        ("a.sh", "echo 'x", "cannot be read as a shell script"),
        ("a.sh", "ls", "has no training command"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, name, text, problem):
    with pytest.raises(UserError, match=problem):
        convert_text(tmp_path, text, name=name)


def test_the_number_of_gpus_is_required(tmp_path):
    with pytest.raises(UserError, match="--gpus: missing"):
        convert_text(tmp_path, "base_model: a/b\n", num_gpus=None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "a0 = 'x' * 10\n" + "a1 = f'{a0}'\n" + "SFTConfig(output_dir=a1)"),
        (
            "a.py",
            "a0 = 'xxxxxxxxxx'\n"
            + "".join(f"a{n} = f'{{a{n - 1}}}{{a{n - 1}}}'\n" for n in range(1, 40))
            + "SFTConfig(output_dir=a39)",
        ),
        ("a.py", "a = b\nb = a\nSFTConfig(output_dir=a)"),
    ],
)
def test_computed_values_are_named_and_not_computed(tmp_path, name, text):
    fields, comments = convert_text(tmp_path, text, name=name)
    assert "output_dir = a" in comments
    assert fields["run"]["directory"] == "runs/converted"


def test_variables_of_a_shell_script_cannot_grow_without_limit(tmp_path):
    lines = ["A=xxxxxxxxxx"] + ["A=$A$A"] * 40 + ["swift sft --model $A"]
    with pytest.raises(UserError, match="a word is too long"):
        convert_text(tmp_path, "\n".join(lines), name="a.sh")


def test_the_command_prints_the_config(capsys):
    command.main([str(INPUTS / "swift.sh"), "--gpus", "2"])
    fields, comments = parse(capsys.readouterr().out)
    assert "for 2 GPUs" in comments
    assert fields["mesh"] == {"seq": 2}
    with pytest.raises(UserError, match="--gpus = 0"):
        command.main([str(INPUTS / "swift.sh"), "--gpus", "0"])


COMPUTED = {
    "context_parallel_size",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "num_processes",
    "parallelism_config_sp_size",
    "parallelism_config_cp_size",
}
"""Options in the formulas of the batch and the mesh."""


@pytest.mark.parametrize("file", ["axolotl.yaml", "../../config/foreign/axolotl.yaml"])
def test_every_option_that_is_set_is_named_in_the_output(file):
    text = conversion.convert([INPUTS / file], num_gpus=8)
    for name, value in config_file.read(INPUTS / file).items():
        if value not in (None, False, "") and name not in COMPUTED | {"datasets"}:
            assert name in text, name


def test_a_second_value_of_a_field_and_a_refused_entry_are_reported(tmp_path):
    text = """
model_name_or_path: a/b
dataset_name: c/d
use_peft: true
lora_modules_to_save: [score]
report_to: all
datasets:
  - {path: a.jsonl, fraction: 0.5}
  - {path: b.jsonl, fraction: 0.5}
max_seq_length: 4096
max_length: 2048
fsdp: full_shard offload
"""
    fields, comments = convert_text(tmp_path, text)
    assert fields["data"]["row_tokens"] == 4096
    assert "max_length = 2048: data.row_tokens is already set by max_seq_length" in comments
    assert "adapter.modules_to_save.0 = score" in comments
    assert "data.train.0.weight: must not be set with run.epochs" in comments
    assert "report_to is all" in comments
    assert [source["source"] for source in fields["data"]["train"]] == ["a.jsonl", "b.jsonl"]
    assert fields["memory"]["offload_optimizer"] == "state"
