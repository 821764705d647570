"""A malformed config, data file or model folder: exit code 2 and a line that names it.

The command runs in this process, with an example of each kind of file. faults/fuzz.py has more
input, config/test_schema.py single fields, data/ingest/test_records.py records, and
hf/test_folder.py model folders.
"""

import json
import pathlib
import re
import struct
import sys

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.numpy
import yaml

from jaxsp import cli, train
from tests import batches, messages

CONFIG = {
    "run": {"directory": "run", "steps": 1},
    "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
    "mesh": {"data": 1},
    "data": {"train": [{"source": "data.jsonl", "format": "text"}], "row_tokens": 64},
    "batch": {"rows_per_step": 1},
    "optimizer": {"learning_rate": 0.1},
}

LINES = [b'{"text": "some text"}', b'{"text": "more of it"}']


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The current folder of the test, with a config and data that work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def run_command(capsys, monkeypatch, *arguments):
    """Runs the command, which must end with exit code 2. Returns: its stderr."""
    monkeypatch.setattr(jax, "devices", lambda *_: [jax.local_devices()[0]])
    monkeypatch.setattr(sys, "argv", ["train", "config.yaml", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.run_command(train.main)
    output = capsys.readouterr()
    assert end.value.code == 2, output.err
    assert "Traceback" not in output.err + output.out
    return output.err


def change_config(change):
    """Returns a function that changes the text of the config."""

    def write():
        path = pathlib.Path("config.yaml")
        path.write_bytes(change(path.read_bytes()))

    return write


def write_data(content, name="data.jsonl"):
    """Returns a function that writes a data file. Args: content: bytes, or makes them."""

    def write():
        pathlib.Path(name).write_bytes(content if isinstance(content, bytes) else content())

    return write


def make_parquet():
    table = pa.table({"text": ["a text"] * 1000})
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def write_model(change=None, *, fields=None, without=()):
    """Returns a function that writes a malformed model folder, hf/.

    Args: change: changes the folder. fields: of its config.json. without: files to leave out.
    """

    def write():
        folder = pathlib.Path("hf")
        folder.mkdir()
        config = {**batches.SMALL_LLAMA, **(fields or {})}
        (folder / "config.json").write_text(json.dumps(config))
        layer = {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }
        shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {
            "model.embed_tokens.weight": (257, 32),
            "model.norm.weight": (32,),
            "lm_head.weight": (257, 32),
        }
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        for name in without:
            (folder / name).unlink()
        if change is not None:
            change(folder, tensors)

    return write


def change_weights(**changes):
    """Returns a function that replaces tensors, or removes those that are None."""

    def change(folder, tensors):
        replaced = {name.replace("__", "."): value for name, value in changes.items()}
        kept = {name: value for name, value in (tensors | replaced).items() if value is not None}
        safetensors.numpy.save_file(kept, folder / "model.safetensors")

    return change


def write_index(weight_map):
    """Returns a function that writes an index instead of the weights."""

    def change(folder, tensors):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def write_file(name, content):
    """Returns a function that writes a file of the model folder."""
    return lambda folder, tensors: (folder / name).write_bytes(content)


HF = ["model.config=null", "model.source=hf"]
TOKENIZER = [*HF, "model.tokenizer=null"]

CASES = {
    # Configs
    "no file": (
        lambda: pathlib.Path("config.yaml").unlink(),
        [],
        "config.yaml ... configs/quickstart.yaml",
    ),
    "a config in UTF-16": (
        change_config(lambda text: text.decode().encode("utf-16")),
        [],
        "config.yaml ... utf-8",
    ),
    "a list as config": (
        change_config(lambda _: b"- run\n"),
        [],
        "config.yaml ... section: {field: value}",
    ),
    "a field twice": (
        change_config(lambda text: text + b"run: {steps: 2}\n"),
        [],
        "config.yaml ... YAML ... run ... line 25",
    ),
    "a file as checkpoint": (None, ["run.resume=data.jsonl"], "run.resume = data.jsonl"),
    # Data
    "an empty file": (write_data(b""), [], "data.train.0.source = data.jsonl ... record"),
    "a truncated line": (
        write_data(LINES[0] + b'\n{"text": "more'),
        [],
        "data.jsonl, line 2 ... JSON",
    ),
    "a line in Latin-1": (
        write_data(LINES[0] + b'\n{"text": "caf\xe9"}'),
        [],
        "data.jsonl, line 2 ... UTF-8",
    ),
    "tokens outside the vocabulary": (
        write_data(b'{"input_ids": [1, 257]}'),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... 257 ... 256",
    ),
    "a truncated parquet file": (
        write_data(lambda: make_parquet()[:-20], "a.parquet"),
        ["data.train.0.source=a.parquet"],
        "data.train.0.source = a.parquet ... record",
    ),
    # Model folders
    "a folder without config.json": (
        write_model(without=["config.json"]),
        HF,
        "model.source = hf ... config.json",
    ),
    "a truncated config.json": (
        write_model(write_file("config.json", b'{"model_type": "ll')),
        HF,
        "hf/config.json ... JSON",
    ),
    "an unknown model": (write_model(fields={"model_type": "bert"}), HF, "model_type = bert"),
    "no weights": (
        write_model(without=["model.safetensors"]),
        HF,
        "model.source = hf ... model.safetensors ... pytorch_model.bin",
    ),
    "an index that leaves the folder": (
        write_model(write_index({"lm_head.weight": "../model.safetensors"})),
        HF,
        "model.safetensors.index.json ... tensor",
    ),
    "a header of 2**63 bytes": (
        write_model(write_file("model.safetensors", struct.pack("<Q", 2**63) + b"{}")),
        HF,
        "hf/model.safetensors ... header",
    ),
    "truncated weights": (
        write_model(
            lambda folder, _: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:-4]
            )
        ),
        HF,
        "hf/model.safetensors ... 98,052",
    ),
    "a weight of another shape": (
        write_model(change_weights(model__norm__weight=np.zeros(31, np.float32))),
        HF,
        "model.norm.weight [31] ... [32]",
    ),
    "a truncated tokenizer": (
        write_model(write_file("tokenizer.json", b'{"version": ')),
        TOKENIZER,
        "model.source = hf ... tokenizer ... model.tokenizer",
    ),
    "a tokenizer with its own code": (
        write_model(
            write_file(
                "tokenizer_config.json",
                b'{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", null]}}',
            )
        ),
        TOKENIZER,
        "model.source = hf ... tokenizer ... model.tokenizer",
    ),
}
"""A function that makes the malformed input, command-line arguments, and parts of the message."""


@pytest.mark.parametrize("name", CASES)
def test_malformed_input_is_named_in_a_short_message(run_folder, capsys, monkeypatch, name):
    make_input, arguments, parts = CASES[name]
    if make_input is not None:
        make_input()
    stderr = run_command(capsys, monkeypatch, *arguments)
    assert re.search(messages.containing(*parts.split(" ... ")), stderr), stderr
    assert len(stderr.splitlines()) <= 3, stderr
    assert max(map(len, stderr.splitlines())) < 1000, stderr
    assert not (run_folder / "run").exists(), "the run has not started"
