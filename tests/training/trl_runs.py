"""Runs of preference training in jaxsp and in TRL, from the same files.

A step is the whole data set on both sides, so that the order in a batch has no effect.
"""

import contextlib
import importlib
import io
import json
import math
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import datasets
import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy
import transformers

from jaxsp import export
from jaxsp.data import tokenizers
from jaxsp.run import build, config_file, trainer
from tests import commands
from tests.hf import oracle

torch = oracle.torch
trl = pytest.importorskip("trl", reason="trl is not installed (extra `test`)")

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
}

NUM_PAIRS = 20
MAX_TOKENS = 60
NUM_STEPS = 10

METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_logp": "logps/chosen",
    "rejected_logp": "logps/rejected",
    "kl": "kl",
}
"""Names of TRL's metrics by those of jaxsp."""

TRAINERS = {
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "simpo": ("trl.experimental.cpo", "CPO"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
}
"""Module of a trainer and its config, and the beginning of their names."""

Records = Sequence[dict[str, Any]]
Tensors = dict[str, np.ndarray]


class Run(NamedTuple):
    """Metrics of every step, by jaxsp's names, and the weights after the last one."""

    steps: list[dict[str, Any]]
    tensors: Tensors


def draw_pairs() -> Records:
    """Random texts of unequal lengths; each byte is a token, and a document has an end token."""
    rng = np.random.default_rng(3)

    def draw(low: int, high: int) -> str:
        return bytes(rng.integers(33, 127, rng.integers(low, high)).tolist()).decode()

    pairs = []
    for _ in range(NUM_PAIRS):
        prompt = draw(2, 25)
        longest = MAX_TOKENS - len(prompt)
        pairs.append({"prompt": prompt, "chosen": draw(1, longest), "rejected": draw(1, longest)})
    return pairs


def unpair(pairs: Records) -> Records:
    """A record with a label for every pair. Four of five are desirable, so that KTO's reference
    point becomes positive."""
    labels = [number % 5 > 0 for number in range(len(pairs))]
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["chosen" if label else "rejected"],
            "label": label,
        }
        for pair, label in zip(pairs, labels, strict=True)
    ]


def count_tokens(records: Records) -> int:
    """Number of tokens of all documents: two of each record, with their end tokens."""
    num_tokens = 0
    for record in records:
        answers = [text for field, text in record.items() if field not in ("prompt", "label")]
        # an unpaired record has the completion of another one too
        factor = 2 // len(answers)
        num_tokens += 2 * len(record["prompt"]) + factor * sum(len(text) + 1 for text in answers)
    return num_tokens


def write_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes a random model with a tokenizer of bytes."""
    oracle.torch_model(MODELS[name]).save_pretrained(folder)
    tokenizer = tokenizers.make_byte_tokenizer()
    tokenizer.split_special_tokens = False  # TRL appends the text of the end token
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


def read_tensors(folder: pathlib.Path) -> Tensors:
    """All tensors of a model or adapter, in float64."""
    (path,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(path)
    return {name: tensor.astype(np.float64) for name, tensor in stored.items()}


def train_jaxsp(
    model: pathlib.Path,
    records: Records,
    folder: pathlib.Path,
    *,
    learning_rate: float,
    num_steps: int = NUM_STEPS,
    num_rows: int = 1,
    **sections: Any,
) -> Run:
    """Trains as the command does, and exports by the command.

    Args: num_rows: rows that just hold all documents.
    """
    folder.mkdir()
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = {
        "source": str(folder / "records.jsonl"),
        "format": "unpaired" if "label" in records[0] else "preference",
    }
    row_tokens = count_tokens(records)
    if num_rows > 1:
        row_tokens = 8 * math.ceil((row_tokens / num_rows + MAX_TOKENS / 4) / 8)
    config = {
        "run": {"directory": str(folder / "run"), "steps": num_steps},
        "model": {"source": str(model), "compute_dtype": "float32"},
        "mesh": {"data": 1, "seq": 1},
        "data": {"train": [source], "row_tokens": row_tokens},
        "batch": {"rows_per_step": num_rows},
        "optimizer": {
            "name": "sgd",
            "learning_rate": learning_rate,
            "schedule": "constant",
            "max_grad_norm": None,
        },
        "logging": {"trackers": []},
    }
    (folder / "config.yaml").write_text(json.dumps(config | sections))
    _run(folder / "config.yaml")
    export.main([str(folder / "run"), str(folder / "exported")])
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    return Run(lines, read_tensors(folder / "exported"))


def _run(path: pathlib.Path) -> None:
    """Does what `jaxsp train` does, on as many devices as the mesh has."""
    config = config_file.load(path, [])
    num_devices = config.mesh.data * config.mesh.degree
    inputs = build.build_training(config, devices=jax.devices()[:num_devices])
    trainer.train(inputs, rich.console.Console(quiet=True))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and output of TRL, and with one thread: two take five times the CPU time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(num_threads)


def _drop_sft_term(trainer_class: Any) -> Any:
    """ORPO without its SFT term, in which TRL includes the tokens of prompts."""

    class OddsRatioTrainer(trainer_class):
        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            *outputs, _ = super().concatenated_forward(model, batch)
            return (*outputs, torch.tensor(0.0))

    return OddsRatioTrainer


@quiet()
def make_trl(
    name: str,
    model: pathlib.Path,
    records: Records,
    folder: pathlib.Path,
    *,
    learning_rate: float,
    num_steps: int = NUM_STEPS,
    peft_config: Any = None,
    **options: Any,
) -> Any:
    """Makes a trainer of TRL. Args: name: in TRAINERS. options: of its config."""
    module_name, prefix = TRAINERS[name]
    module = importlib.import_module(module_name)
    trainer_class = getattr(module, f"{prefix}Trainer")
    if name == "orpo":
        trainer_class = _drop_sft_term(trainer_class)
    config = getattr(module, f"{prefix}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=len(records),
        max_steps=num_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,  # no clipping
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **options,
    )
    loaded: Any = str(model)
    if module_name != "trl":
        # their trainers would take device_map=auto from the path
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peer = trainer_class(
        model=loaded,
        args=config,
        train_dataset=datasets.Dataset.from_list(list(records)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        peft_config=peft_config,
    )
    peer.remove_callback(transformers.PrinterCallback)
    return peer


@quiet()
def train_trl(peer: Any, folder: pathlib.Path) -> Run:
    """Trains, and saves the model. Args: peer: a trainer of TRL."""
    peer.train()
    peer.save_model(str(folder))
    steps = [
        {ours: line[theirs] for ours, theirs in METRICS.items() if theirs in line}
        for line in peer.state.log_history
        if "loss" in line
    ]
    return Run(steps, read_tensors(folder))
