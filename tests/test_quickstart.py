"""The CPU quickstart of README.md, word for word: trains on a 2 x 4 mesh and exports the model."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxsp.data.packing import Segments
from jaxsp.run import build, config_file
from tests import commands, markdown

pytestmark = pytest.mark.e2e

REPO = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The run directory, and the output of the command."""
    folder = tmp_path_factory.mktemp("quickstart")
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    install = r"python3 -m venv \S+ && \S+ \S+ && pip install -e \. && "
    (command,) = [
        re.sub(f"^{install}", "", command)
        for command in markdown.commands(readme)
        if re.match(f"{install}jaxsp", command)
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


def test_the_loss_falls_below_the_entropy_of_byte_pairs(quickstart):
    directory, _ = quickstart
    losses = [line["loss"] for line in commands.read_lines(directory / "metrics.jsonl")]
    config = config_file.load(directory / "config.yaml", [f"run.directory={directory}-again"])
    inputs = build.build_training(config, devices=jax.devices())
    counts = np.zeros((257, 257))
    for document, length in enumerate(inputs.train_set.documents.lengths):
        row = Segments(
            document=np.array([document]), offset=np.array([0]), length=np.array([length])
        )
        tokens = inputs.train_set.documents.read_slice(row, 0, int(length))["tokens"]
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    joint = counts / counts.sum()
    conditional = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    bigram_entropy = -np.sum(joint[joint > 0] * np.log(conditional[joint > 0]))
    assert 2.0 < bigram_entropy < 3.0, "nats per byte of Python source"
    assert np.mean(losses[-20:]) < bigram_entropy - 0.15


def test_the_output_names_the_mesh_and_the_next_command(quickstart):
    directory, printed = quickstart
    for text in (
        "400 steps of 1,024 tokens; 0.0871 epochs of",
        "learning rate 0.004",
        "data 2 x seq 4",
        "Ulysses",
        "400/400",
        f"jaxsp report {directory} jaxsp eval {directory}",
        f"jaxsp export {directory}",
        "AutoModelForCausalLM.from_pretrained",
    ):
        assert text in " ".join(printed.split()), text
    assert {path.name for path in directory.iterdir()} == {
        "config.yaml",
        "banner.txt",
        "starts.jsonl",
        "metrics.jsonl",
        "eval.jsonl",
        "tensorboard",
        "model",
        "checkpoints",
        "last_checkpoint.json",
        "heartbeat.json",
        "lock",
        "hf",
    }


def test_the_readme_shows_the_output(quickstart):
    """Every line, except for numbers, which differ between machines and releases of Python."""
    _, printed = quickstart
    (shown,) = markdown.code_blocks((REPO / "README.md").read_text(encoding="utf-8"), "text")
    for line in shown.splitlines():
        assert line == "..." or hide_numbers(line) in hide_numbers(printed), line


def hide_numbers(text: str) -> str:
    """Replaces numbers and durations by a sign, and line breaks by spaces."""
    return re.sub(r"(# min )?#", "#", re.sub(r"\d[\d.,:]*", "#", " ".join(text.split())))


def test_transformers_loads_the_export(quickstart):
    """test_eval.py compares losses."""
    pytest.importorskip("torch", reason="needs torch")
    import transformers

    directory, _ = quickstart
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "hf", output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "hf")
    assert tokenizer("é\n").input_ids == [0xC3, 0xA9, 0x0A]
