"""README's first command, word for word: a model learns on a 2 x 4 mesh, and transformers loads what it exports."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxsp.checkpoint import reader
from jaxsp.config import schema
from jaxsp.data.packing.packing import PackedRow
from jaxsp.run import build
from jaxsp.runtime import run_paths
from jaxsp.training import sharding, train_step
from tests import markdown, tolerances

pytestmark = pytest.mark.e2e

REPO = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The run's directory, and all that the command printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    install = r"python3 -m venv \S+ && \S+ \S+ && pip install -e \. && "
    (command,) = [
        re.sub(f"^{install}", "", command)
        for command in markdown.commands(readme)
        if re.match(f"{install}python -m jaxsp", command)
    ]
    command = command.replace(
        "configs/quickstart.yaml", f"configs/quickstart.yaml run.directory={folder}/quickstart"
    )
    command = command.replace("runs/quickstart", f"{folder}/quickstart")
    python = str(pathlib.Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "300",
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        command, shell=True, cwd=REPO, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "quickstart", done.stdout


def test_the_loss_falls_below_what_pairs_of_bytes_can_tell(quickstart):
    directory, _ = quickstart
    losses = [
        json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    _, material = build.build_training(_settings(directory), devices=jax.devices())
    counts = np.zeros((257, 257))
    for document, length in enumerate(material.train_set.documents.lengths):
        row = PackedRow(
            document=np.array([document]), offset=np.array([0]), length=np.array([length])
        )
        tokens = material.train_set.documents.read_slice(row, 0, int(length)).tokens
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    shares = counts / counts.sum()
    given_first = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    bigram_entropy = -np.sum(shares[shares > 0] * np.log(given_first[shares > 0]))
    assert 2.0 < bigram_entropy < 3.0, "nats per byte of Python source"
    assert np.mean(losses[-20:]) < bigram_entropy - 0.15


def test_it_says_what_it_does_and_what_to_type_next(quickstart):
    directory, printed = quickstart
    for words in (
        "data 2 x seq 4",
        "Ulysses",
        "400/400",
        f"python -m jaxsp.export {directory}",
        "AutoModelForCausalLM.from_pretrained",
    ):
        assert words in " ".join(printed.split()), words
    assert {path.name for path in directory.iterdir()} == {
        *(
            "config.yaml",
            "banner.txt",
            "metrics.jsonl",
            "eval.jsonl",
            "tensorboard",
            "model",
            "checkpoints",
            "lock",
            "hf",
        ),
        "heartbeat.json",
    }


def test_transformers_loads_the_export_and_finds_our_loss(quickstart):
    torch = pytest.importorskip(
        "torch", reason="transformers' models need torch, which this Python has no build of"
    )
    import transformers

    directory, _ = quickstart
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "hf", output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "hf")
    assert tokenizer("é\n").input_ids == [0xC3, 0xA9, 0x0A]

    config = _settings(directory)
    program, material = build.build_training(config, devices=jax.devices())
    ((rows, _),) = material.train_set.make_loader(
        config, program.mesh, material.train_set.make_schedule(config, num_steps=1), layout_degree=1
    ).batches()
    whole = reader.read_weights(run_paths.find_latest(directory), program.table)
    master = sharding.put_weights(program.table, whole, program.mesh)
    ours = jax.jit(lambda master, rows: train_step.compute_gradients(program, master, rows).loss)(
        master, rows
    )

    given = {name: array for name, array in vars(rows).items() if array is not None}
    arrays = {name: np.asarray(array).reshape(-1, array.shape[-1]) for name, array in given.items()}
    total = count = 0
    for row in range(len(arrays["tokens_BL"])):
        for start, length in zip(arrays["starts_BM"][row], arrays["lengths_BM"][row], strict=True):
            if length == 0:
                continue
            tokens, labels, positions = (
                torch.tensor(arrays[name][row, start : start + length], dtype=torch.long)
                for name in ("tokens_BL", "labels_BL", "positions_BL")
            )
            with torch.no_grad():
                logits = model(
                    input_ids=tokens[None], position_ids=positions[None], use_cache=False
                ).logits[0]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            count += int((labels != -100).sum())
    assert float(ours) == pytest.approx(total / count, rel=tolerances.FP32_PARITY)


def _settings(directory):
    """The run's own config, with a directory that is free."""
    config = schema.load(directory / "config.yaml", [f"run.directory={directory}-again"])
    assert config.run.steps == 400
    return config
