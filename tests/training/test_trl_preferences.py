"""Preference training is TRL's: metrics of every step, and weights after the last one.

Both train from the same files. A step is the whole data set on both sides, so that the order in a
batch has no effect.
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
from tests import batches, commands, tolerances
from tests.hf import oracle

pytestmark = pytest.mark.e2e

torch = oracle.torch
trl = pytest.importorskip("trl", reason="trl is not installed (extra `test`)")

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

LOGPS = ("chosen_logp", "rejected_logp")


class Case(NamedTuple):
    """One objective in both systems."""

    objective: dict[str, Any]
    learning_rate: float
    trainer: tuple[str, str] = ("trl", "DPO")
    """Module of the trainer and its config, and the beginning of their names."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Fields of TRL's config."""
    differing: Sequence[str] = ("kl",)
    """Metrics that the systems do not share."""


KTO_WEIGHTS = {"desirable_weight": 1.2, "undesirable_weight": 0.3}
CASES = {
    "dpo with sft": Case(
        {"type": "dpo", "sft_weight": 0.3},
        0.05,
        options={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    ),
    "kto": Case(
        {"type": "kto", **KTO_WEIGHTS}, 0.05, ("trl", "KTO"), KTO_WEIGHTS, ("reward_accuracy",)
    ),
    # TRL's logps are means over tokens here, and so are the rewards
    "simpo": Case(
        {"type": "simpo"},
        0.5,
        ("trl.experimental.cpo", "CPO"),
        {"loss_type": "simpo", "cpo_alpha": 0.0},
        ("kl", *LOGPS),
    ),
    "orpo": Case(
        {"type": "orpo", "sft_weight": 0.0},
        0.5,
        ("trl.experimental.orpo", "ORPO"),
        differing=("kl", *LOGPS),
    ),
}

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
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["chosen" if number % 5 else "rejected"],
            "label": number % 5 > 0,
        }
        for number, pair in enumerate(pairs)
    ]


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Writes a random model with a tokenizer of bytes."""
    fields = batches.SMALL_LLAMA | {"num_hidden_layers": 2}
    oracle.torch_model(fields).save_pretrained(folder)
    tokenizer = tokenizers.make_byte_tokenizer()
    tokenizer.split_special_tokens = False  # TRL appends the text of the end token
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


def read_tensors(folder: pathlib.Path) -> Tensors:
    """All tensors of a model, in float64."""
    (path,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(path)
    return {name: tensor.astype(np.float64) for name, tensor in stored.items()}


def train_jaxsp(model: pathlib.Path, records: Records, folder: pathlib.Path, case: Case) -> Run:
    """Trains as the command does, on one device, and exports by the command."""
    folder.mkdir()
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    record_format = "unpaired" if "label" in records[0] else "preference"
    source = {"source": str(folder / "records.jsonl"), "format": record_format}
    config = {
        "run": {"directory": str(folder / "run"), "steps": NUM_STEPS},
        "model": {"source": str(model), "compute_dtype": "float32"},
        "mesh": {"data": 1, "seq": 1},
        "data": {"train": [source], "row_tokens": 2 * NUM_PAIRS * MAX_TOKENS},
        "batch": {"rows_per_step": 1},
        "objective": case.objective,
        "optimizer": {
            "name": "sgd",
            "learning_rate": case.learning_rate,
            "schedule": "constant",
            "max_grad_norm": None,
        },
        "logging": {"trackers": []},
    }
    inputs = build.build_training(config_file.parse(config), devices=jax.devices()[:1])
    trainer.train(inputs, rich.console.Console(quiet=True))
    export.main([str(folder / "run"), str(folder / "exported")])
    lines = commands.read_lines(folder / "run/metrics.jsonl")
    return Run(lines, read_tensors(folder / "exported"))


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
def train_trl(model: pathlib.Path, records: Records, folder: pathlib.Path, case: Case) -> Run:
    """Trains with a trainer of TRL, and saves the model."""
    module_name, prefix = case.trainer
    module = importlib.import_module(module_name)
    trainer_class = getattr(module, f"{prefix}Trainer")
    if prefix == "ORPO":
        trainer_class = _drop_sft_term(trainer_class)
    config = getattr(module, f"{prefix}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=len(records),
        max_steps=NUM_STEPS,
        learning_rate=case.learning_rate,
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
        **case.options,
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
    )
    peer.remove_callback(transformers.PrinterCallback)
    peer.train()
    peer.save_model(str(folder))
    steps = [
        {ours: line[theirs] for ours, theirs in METRICS.items() if theirs in line}
        for line in peer.state.log_history
        if "loss" in line
    ]
    return Run(steps, read_tensors(folder))


def check_metrics(ours: Run, theirs: Run, names: set[str]) -> None:
    """Checks every step, relative to the largest value of the metric in the run.

    Rewards, which are differences of log-probabilities, are relative to the largest of all rewards.
    """
    assert len(ours.steps) == len(theirs.steps)
    assert {line["num_pairs"] for line in ours.steps} == {NUM_PAIRS}
    actual = {name: np.array([line[name] for line in ours.steps]) for name in names}
    expected = {name: np.array([line[name] for line in theirs.steps]) for name in names}
    scales = {name: np.abs(values).max() for name, values in expected.items()}
    rewards = ("chosen_reward", "rejected_reward", "reward_margin")
    scales |= dict.fromkeys(rewards, max(scales[reward] for reward in rewards))
    errors = {name: np.abs(actual[name] - expected[name]).max() / scales[name] for name in names}
    assert all(np.ptp(values) > 0 for values in expected.values())
    assert max(errors.values()) < tolerances.TRL, errors


def check_weights(ours: Run, theirs: Run, start: Tensors) -> None:
    """Checks weights relative to their change. A small change of a weight is rounded to it."""
    assert ours.tensors.keys() == theirs.tensors.keys() == start.keys()
    norm = np.linalg.norm
    errors = {name: norm(ours.tensors[name] - theirs.tensors[name]) for name in start}
    changes = {name: norm(theirs.tensors[name] - start[name]) for name in start}
    assert all(changes.values())
    assert math.hypot(*errors.values()) / math.hypot(*changes.values()) < tolerances.TRL
    for name, error in errors.items():
        rounding = tolerances.TRL_ROUNDING * norm(start[name])
        assert error < tolerances.TRL * changes[name] + rounding, name


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_are_those_of_trl(tmp_path, name):
    case = CASES[name]
    model = write_model(tmp_path / "model")
    records = draw_pairs()
    in_trl = records
    if name == "kto":
        # TRL takes mismatched completions from the previous record of a batch, jaxsp from the next
        records = unpair(records)
        in_trl = records[::-1]
    theirs = train_trl(model, in_trl, tmp_path / "trl", case)
    ours = train_jaxsp(model, records, tmp_path / "jaxsp", case)
    check_metrics(ours, theirs, METRICS.keys() - case.differing)
    check_weights(ours, theirs, read_tensors(model))
    if name == "kto":
        assert theirs.steps[-1]["kl"] > 0.1, "the reference point is not only its limit"
