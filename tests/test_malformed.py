"""Configs, data and model folders that are broken: exit code 2 and a line that names the culprit, never a traceback.

Through the command itself, in this process. More about single fields is in config/test_schema.py, about files of data in
data/ingest/test_records.py, and about model folders in hf/test_folder.py.
"""

import gzip
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
def here(tmp_path, monkeypatch):
    """A folder with a run that would work, in which the test is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def says(capsys, monkeypatch, *words):
    """What the command prints to stderr before it ends with exit code 2."""
    monkeypatch.setattr(jax, "devices", lambda *_: [jax.local_devices()[0]])
    monkeypatch.setattr(sys, "argv", ["train", "config.yaml", *words])
    with pytest.raises(SystemExit) as ended:
        cli.run_command(train.main)
    written = capsys.readouterr()
    assert ended.value.code == 2, written.err
    assert "Traceback" not in written.err + written.out
    return written.err


def config(change):
    """Writes the config's text changed."""

    def write():
        path = pathlib.Path("config.yaml")
        path.write_bytes(change(path.read_bytes()))

    return write


def data(content, name="data.jsonl"):
    def write():
        pathlib.Path(name).write_bytes(content if isinstance(content, bytes) else content())

    return write


def parquet():
    table = pa.table({"text": ["a text"] * 1000})
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


def arrow():
    table, sink = pa.table({"text": ["a text"] * 1000}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def model(change=None, *, fields=None, without=()):
    """Makes the folder hf/ of a model, with something wrong."""

    def write():
        folder = pathlib.Path("hf")
        folder.mkdir()
        of_model = {**batches.SMALL_LLAMA, **(fields or {})}
        (folder / "config.json").write_text(json.dumps(of_model))
        size, inner, kv, vocab = 32, 48, 16, 257
        layer = {
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (kv, size),
            "self_attn.v_proj": (kv, size),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
        }
        shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {
            "model.embed_tokens.weight": (vocab, size),
            "model.norm.weight": (size,),
            "lm_head.weight": (vocab, size),
        }
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        for name in without:
            (folder / name).unlink()
        if change is not None:
            change(folder, tensors)

    return write


def weights(**changes):
    """Tensors that are others."""

    def change(folder, tensors):
        named = {name.replace("__", "."): value for name, value in changes.items()}
        kept = {name: value for name, value in (tensors | named).items() if value is not None}
        safetensors.numpy.save_file(kept, folder / "model.safetensors")

    return change


def index(weight_map):
    def change(folder, tensors):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def header(change):
    """The header of the safetensors file, as text, changed."""

    def rewrite(folder, tensors):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        text = change(content[8 : 8 + length])
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return rewrite


def file(name, content):
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
    "an empty config": (config(lambda _: b""), [], "config.yaml ... section: {field: value}"),
    "a config cut short": (
        config(lambda text: text[:-10] + b"\nrun: {dir"),
        [],
        "config.yaml ... YAML",
    ),
    "a config in UTF-16": (
        config(lambda text: text.decode().encode("utf-16")),
        [],
        "config.yaml ... utf-8",
    ),
    "a config with NUL bytes": (
        config(lambda text: text + b"\0"),
        [],
        "config.yaml ... YAML ... #x0000",
    ),
    "a config that is a folder": (
        lambda: pathlib.Path("config.yaml").unlink() or pathlib.Path("config.yaml").mkdir(),
        [],
        "config.yaml ... [Errno 21]",
    ),
    "a list for a config": (
        config(lambda _: b"- run\n"),
        [],
        "config.yaml ... section: {field: value}",
    ),
    "a Python object in YAML": (
        config(lambda text: text + b"x: !!python/object/apply:os.system [echo]\n"),
        [],
        "config.yaml ... YAML ... python/object/apply:os.system",
    ),
    "aliases that grow without end": (
        config(
            lambda _: (
                b"a: &a [x, x, x, x, x, x, x, x, x]\n"
                + b"".join(
                    b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9))
                    for n in range(98, 112)
                )
            )
        ),
        [],
        "config.yaml ... YAML ... 100,000",
    ),
    "an alias of itself": (
        config(lambda _: b"run: &a\n  steps: *a\n"),
        [],
        "config.yaml ... YAML ... alias",
    ),
    "brackets without end": (
        config(lambda _: b"run: " + b"[" * 100_000),
        [],
        "config.yaml ... YAML",
    ),
    "a field twice": (
        config(lambda text: text + b"run: {steps: 2}\n"),
        [],
        "config.yaml ... YAML ... run ... line 25",
    ),
    "a field that does not exist": (None, ["run.stepps=3"], "run.stepps"),
    "a group that is a number": (None, ["optimizer=3"], "optimizer = 3"),
    "a number beyond all bounds": (None, ["run.steps=1e400"], "run.steps = inf"),
    "a number of a thousand digits": (None, ["run.seed=" + "9" * 5000], "run.seed"),
    "no learning rate": (None, ["optimizer.learning_rate=.nan"], "optimizer.learning_rate = nan"),
    "a mesh of more devices than there are": (None, ["mesh.seq=64"], "mesh.seq"),
    "a directory in a file": (
        None,
        ["run.directory=data.jsonl/run"],
        "run.directory = data.jsonl/run",
    ),
    "a name with a NUL byte": (None, ['run.directory="a\\0b"'], "run.directory"),
    "a checkpoint that is none": (None, ["run.resume=data.jsonl"], "run.resume = data.jsonl"),
    # Data
    "no data": (
        lambda: pathlib.Path("data.jsonl").unlink(),
        [],
        "data.train.0.source = data.jsonl ... **/*.txt",
    ),
    "an empty file": (data(b""), [], "data.train.0.source = data.jsonl ... record"),
    "a line cut short": (data(LINES[0] + b'\n{"text": "more'), [], "data.jsonl, line 2 ... JSON"),
    "a line in Latin-1": (
        data(LINES[0] + b'\n{"text": "caf\xe9"}'),
        [],
        "data.jsonl, line 2 ... UTF-8",
    ),
    "lines in UTF-16": (
        data("\n".join(map(bytes.decode, LINES)).encode("utf-16")),
        [],
        "data.jsonl, line 1 ... UTF-8",
    ),
    "NUL bytes in lines": (data(LINES[0] + b"\n\0\0\0"), [], "data.jsonl, line 2 ... JSON"),
    "a number for a text": (data(b'{"text": 3}'), [], "data.jsonl, line 1 ... text ... number"),
    "a list for a record": (data(b'["text"]'), [], "data.jsonl, line 1 ... list"),
    "a record without the field": (
        data(b'{"content": "x"}'),
        [],
        "data.jsonl, line 1 ... fields: {text: content}",
    ),
    "brackets without end in a line": (
        data(b'{"text": ' + b"[" * 100_000),
        [],
        "data.jsonl, line 1 ... JSON",
    ),
    "an array without end": (
        data(b'[{"text": "x"}, {"text": "y"}', "a.json"),
        ["data.train.0.source=a.json"],
        "a.json: ... 2",
    ),
    "tokens that are no numbers": (
        data(b'{"input_ids": ["a"]}'),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... input_ids",
    ),
    "tokens beyond the vocabulary": (
        data(b'{"input_ids": [1, 257]}'),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... 257 ... 256",
    ),
    "tokens below 0": (
        data(b'{"input_ids": [1, -1]}'),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... -1 ... 256",
    ),
    "tokens of 100 digits": (
        data(b'{"input_ids": [1' + b"0" * 100 + b"]}"),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... input_ids",
    ),
    "labels of another length": (
        data(b'{"input_ids": [1, 2], "labels": [1]}'),
        ["data.train.0.format=tokens"],
        "data.jsonl, line 1 ... 1 labels ... 2 input_ids",
    ),
    "messages without a role": (
        data(b'{"messages": [{"content": "x"}]}'),
        ["data.train.0.format=messages"],
        "data.jsonl, line 1 ... role",
    ),
    "a csv without a header": (data(b"", "a.csv"), ["data.train.0.source=a.csv"], "a.csv ... line"),
    "a csv with a cell too many": (
        data(b"text\na\nb,c\n", "a.csv"),
        ["data.train.0.source=a.csv"],
        "a.csv, line 3 ... 2 ... 1",
    ),
    "a parquet file cut short": (
        data(lambda: parquet()[:-20], "a.parquet"),
        ["data.train.0.source=a.parquet"],
        "data.train.0.source = a.parquet ... record",
    ),
    "a parquet file with a flipped byte": (
        data(lambda: flipped(parquet(), 12), "a.parquet"),
        ["data.train.0.source=a.parquet"],
        "data.train.0.source = a.parquet ... record",
    ),
    "text called parquet": (
        data(b"some text\n" * 9, "a.parquet"),
        ["data.train.0.source=a.parquet"],
        "data.train.0.source = a.parquet ... record",
    ),
    "an Arrow stream cut short": (
        data(lambda: arrow()[:-8], "a.arrow"),
        ["data.train.0.source=a.arrow"],
        "data.train.0.source = a.arrow ... 1000",
    ),
    "gzip cut short": (
        data(lambda: gzip.compress(b"\n".join(LINES * 100))[:-12], "a.jsonl.gz"),
        ["data.train.0.source=a.jsonl.gz"],
        "data.train.0.source = a.jsonl.gz ... record",
    ),
    "text called gzip": (
        data(b"\n".join(LINES), "a.jsonl.gz"),
        ["data.train.0.source=a.jsonl.gz"],
        "data.train.0.source = a.jsonl.gz ... record",
    ),
    "text that is not UTF-8": (
        data(b"caf\xe9", "a.txt"),
        ["data.train.0.source=a.txt"],
        "a.txt ... UTF-8",
    ),
    "a pickle": (data(b"\x80\x04.", "a.pkl"), ["data.train.0.source=a.pkl"], "a.pkl ... .jsonl"),
    # Model folders
    "no folder": (None, HF, "model.source = hf"),
    "a folder without config.json": (
        model(without=["config.json"]),
        HF,
        "model.source = hf ... config.json",
    ),
    "a config.json cut short": (
        model(file("config.json", b'{"model_type": "ll')),
        HF,
        "hf/config.json ... JSON",
    ),
    "a config.json that is a list": (
        model(file("config.json", b"[]")),
        HF,
        "hf/config.json ... JSON object",
    ),
    "a config.json in Latin-1": (
        model(file("config.json", b'{"a": "\xe9"}')),
        HF,
        "hf/config.json ... utf-8",
    ),
    "a config.json of no model": (model(file("config.json", b'{"a": 1}')), HF, "model_type"),
    "a model that is not known": (model(fields={"model_type": "bert"}), HF, "model_type = bert"),
    "a model with code of its own": (
        model(fields={"model_type": "mine", "auto_map": {"AutoConfig": "a.b"}}),
        HF,
        "model_type = mine",
    ),
    "text for a number": (model(fields={"hidden_size": "many"}), HF, "hidden_size"),
    "heads that do not divide": (
        model(fields={"num_key_value_heads": 3}),
        HF,
        "num_key_value_heads",
    ),
    "a size of 0": (model(fields={"num_hidden_layers": 0}), HF, "num_hidden_layers"),
    "no weights": (
        model(without=["model.safetensors"]),
        HF,
        "model.source = hf ... model.safetensors ... pytorch_model.bin",
    ),
    "pickled weights alone": (
        model(file("pytorch_model.bin", b"\x80"), without=["model.safetensors"]),
        HF,
        "model.source = hf ... pytorch_model.bin ... model.source=hf-safetensors",
    ),
    "an index that names a missing file": (
        model(index({"lm_head.weight": "model-1.safetensors"})),
        HF,
        "model-1.safetensors ... model.safetensors.index.json",
    ),
    "an index that leaves the folder": (
        model(index({"lm_head.weight": "../model.safetensors"})),
        HF,
        "model.safetensors.index.json ... tensor",
    ),
    "an index with an absolute path": (
        model(index({"lm_head.weight": "/etc/passwd"})),
        HF,
        "model.safetensors.index.json ... tensor",
    ),
    "an index that is a list": (
        model(index(["lm_head.weight"])),
        HF,
        "model.safetensors.index.json ... tensor",
    ),
    "an index with a number": (
        model(index({"lm_head.weight": 3})),
        HF,
        "model.safetensors.index.json ... tensor",
    ),
    "a header beyond the file": (
        model(file("model.safetensors", struct.pack("<Q", 10**6) + b"{}")),
        HF,
        "hf/model.safetensors ... 10 bytes",
    ),
    "a header of 2**63 bytes": (
        model(file("model.safetensors", struct.pack("<Q", 2**63) + b"{}")),
        HF,
        "hf/model.safetensors ... header",
    ),
    "a header that is no JSON": (
        model(header(lambda text: text[:-9] + b"?" * 9)),
        HF,
        "hf/model.safetensors ... header",
    ),
    "a header with a negative place": (
        model(header(lambda text: re.sub(rb'"data_offsets":\[0,', b'"data_offsets":[-1,', text))),
        HF,
        "hf/model.safetensors ... header",
    ),
    "brackets without end in a header": (
        model(header(lambda _: b"[" * 100_000)),
        HF,
        "hf/model.safetensors ... header",
    ),
    "weights cut short": (
        model(
            lambda folder, _: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:-4]
            )
        ),
        HF,
        "hf/model.safetensors ... 98,052",
    ),
    "integers for weights": (
        model(weights(model__norm__weight=np.zeros(32, np.int32))),
        HF,
        "model.norm.weight I32",
    ),
    "a weight of another shape": (
        model(weights(model__norm__weight=np.zeros(31, np.float32))),
        HF,
        "model.norm.weight [31] ... [32]",
    ),
    "a weight that is missing": (
        model(weights(model__norm__weight=None)),
        HF,
        "missing ... model.norm.weight",
    ),
    "a weight too many": (
        model(weights(surplus=np.zeros(3, np.float32))),
        HF,
        "model.source = hf ... surplus",
    ),
    "no tokenizer": (model(), TOKENIZER, "model.source = hf ... tokenizer ... model.tokenizer"),
    "a tokenizer cut short": (
        model(file("tokenizer.json", b'{"version": ')),
        TOKENIZER,
        "model.source = hf ... tokenizer ... model.tokenizer",
    ),
    "a tokenizer with code of its own": (
        model(
            file(
                "tokenizer_config.json",
                b'{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", null]}}',
            )
        ),
        TOKENIZER,
        "model.source = hf ... tokenizer ... model.tokenizer",
    ),
}
"""Broken input, command-line words, and parts of the message."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_one_line_that_names_it(here, capsys, monkeypatch, name):
    make, words, expected = CASES[name]
    if make is not None:
        make()
    said = says(capsys, monkeypatch, *words)
    assert re.search(messages.holding(*expected.split(" ... ")), said), said
    assert len(said.splitlines()) <= 3, said
    assert max(map(len, said.splitlines())) < 1000, said
    assert not (here / "run").exists(), "nothing was begun"
