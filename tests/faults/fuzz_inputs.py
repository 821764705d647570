"""Malformed and hostile inputs by kind, for test_fuzz.py: functions make and read them."""

import gzip
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import safetensors.numpy
import yaml

from jaxsp.data import sources, tokenize, tokenizers
from jaxsp.run import config_file, model_files
from tests import batches

_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 10**20, 10**400, 2**63),
    *(float("nan"), float("inf"), "", " ", "a", "1", "null", "x" * 100_000, "9" * 5000),
    *("\x1b]0;title\x07", "a\nb: c", "\u202e", "\x00", "../..", "/dev/zero", "{{ 1 }}", "(a+)+$"),
    *([], [None], [[]], {}, {"a": {}}, {"": 1}, [1, "a", None], [True] * 1000, _DEEP),
]
"""Values in place of others; json writes NaN and Infinity as Python reads them."""

ODD_TEXTS = [
    *("0x" + "f" * 5000, "9" * 5000, "1e400", ".nan", "-.inf", "1_0", "010", "12:30", "2026-13-01"),
    *("!!bool x", "!!int x", "!!float x", "!!timestamp x", "!!binary x", "!!null x", "!!omap [a]"),
    *("!!set {a}", "!!python/name:os.system", "!x 1", "&a [*a]", "*a", "[" * 100, "[" * 100_000),
    *("{a: {b: c}}", "{[1]: 2}", "? [a]", "a: b: c", *"@`%\t\0'", "\x1b[2J", "\u2028"),
    *('"\\ud800"', "- a\n- b", "a" * 100_000, ",".join("a" * 10_000), "\ufeff", "~x/y", "s3://"),
]
"""Text of YAML in place of values."""

HOSTILE_TEMPLATES = [
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{% if a %}" * 2000 + "{% endif %}" * 2000,
    "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "{% for i in range(1000000000) %}{{ i }}{% endfor %}",
    "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
    "{{ " + "not " * 20_000 + "1 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/hostname' %}",
]
"""Chat templates that are too deep, or try to leave their sandbox."""

PATTERNS = ["(a+)+$", "(a|aa)+$", "(.*)*x", "((((", "[", "\\p{Xx}", "(?=a)*", ""]


def mutate_bytes(rng: random.Random, content: bytes, tokens: list[bytes]) -> bytes:
    """Changes bytes: flips, removes, repeats or inserts some of them, once to four times."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(content) + 1)
        stop = min(start + rng.choice([1, 1, 3, 20, 10**6]), len(content))
        middle = content[start:stop]
        change = rng.choice(["flip", "remove", "repeat", "insert"])
        if change == "flip":
            middle = bytes(byte ^ (1 << rng.randrange(8)) for byte in middle[:20]) + middle[20:]
        elif change == "remove":
            middle = b""
        elif change == "repeat":
            middle *= rng.choice([2, 50])
        else:
            middle = rng.choice(tokens) + middle
        content = content[:start] + middle + content[stop:]
    return content


def mutate_json(rng: random.Random, value: Any, odd_values: list[Any] = ODD_VALUES) -> Any:
    """Returns a copy in which one value, anywhere, is another one, removed or added."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        copied = value.copy()
        if rng.random() < 0.1:
            del copied[key]
        elif isinstance(value, dict) and rng.random() < 0.1:
            copied[rng.choice(["", "x", "\x1b[31m", "a.b", "auto_map"])] = rng.choice(odd_values)
        else:
            copied[key] = mutate_json(rng, value[key], odd_values)
        return copied
    if type(value) is int and rng.random() < 0.5:
        return rng.choice([value * 2, value // 2, value + 1, 1, 3, 64])
    return rng.choice(odd_values)


CONFIG = {
    "run": {"directory": "run", "steps": 1},
    "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
    "mesh": {"data": 1},
    "data": {"train": [{"source": "data.jsonl", "format": "text"}], "row_tokens": 64},
    "batch": {"rows_per_step": 1},
    "optimizer": {"learning_rate": 0.1},
}

CHAT = {
    "messages": [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def list_fields() -> list[str]:
    """Dotted names of all fields of a config."""
    text = config_file.SCHEMA.describe_fields()
    lines = (line.strip() for line in text.splitlines())
    names = [line.split("  (")[0] for line in lines if "; default " in line or "; required" in line]
    return [name.replace("[]", ".0") for name in names]


FIELDS = list_fields()


def check_config(rng: random.Random) -> None:
    """Loads a changed config file, or a config with odd overrides."""
    content = yaml.safe_dump(CONFIG).encode()
    changes = []
    if rng.random() < 0.5:
        tokens = [text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS]
        content = mutate_bytes(rng, content, [*tokens, b"run:\n", b"  ", b"- ", b": ", b"\xff"])
    else:
        name = rng.choice([*FIELDS, "x", "run", "data.train", "data.train.0", "data.train.9" * 9])
        if rng.random() < 0.1:
            name += rng.choice([".x", "." + "9" * 5000, ".", "\udcff", "x" * 100_000, ".a" * 60])
        values = [*ODD_TEXTS, *(json.dumps(x) for x in ODD_VALUES), ""]
        changes = [f"{name}={rng.choice(values)}"]
    pathlib.Path("config.yaml").write_bytes(content)
    config_file.load("config.yaml", changes)


SMALL = batches.SMALL_LLAMA
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4}
MODELS = [
    *(SMALL | {"model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3")),
    *(SMALL | {"model_type": name, "head_dim": 8} for name in ("gemma2", "gemma3_text")),
    SMALL | {"model_type": "phi3", "pad_token_id": 0},
    {"model_type": "gemma3", "text_config": SMALL | {"model_type": "gemma3_text"}},
    SMALL
    | {"rope_scaling": YARN, "hidden_act": "silu", "layer_types": ["full_attention"]}
    | {"sliding_window": 16, "eos_token_id": [1, 2]},
    SMALL
    | {"rope_parameters": LONGROPE, "hidden_act": "gelu", "long_factor": [1.0] * 4}
    | {"max_position_embeddings": 64, "quantization_config": {}},
]

ADAPTER = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    **dict.fromkeys(("modules_to_save", "exclude_modules", "layers_to_transform"), None),
    "use_rslora": False,
}


def check_model(rng: random.Random) -> None:
    """Reads a changed config.json, or a changed adapter_config.json."""
    fields = dict(rng.choice(MODELS))
    adapter = ADAPTER
    changes = []
    if rng.random() < 0.2:
        adapter = mutate_json(rng, ADAPTER, [*ODD_VALUES, "((((", "[a"])
        fields = batches.SMALL_LLAMA
        changes = ["adapter.type=lora", "adapter.source=adapter"]
    else:
        names = ["hidden_act", "rope_scaling", "rope_theta", "sliding_window"]
        names += ["tie_word_embeddings"]
        if rng.random() < 0.3:
            fields[rng.choice(names)] = rng.choice(ODD_VALUES)
        for _ in range(rng.randint(1, 2)):
            mutated = mutate_json(rng, fields)
            fields = mutated if isinstance(mutated, dict) else fields
    for folder, name, content in (
        ("model", "config.json", fields),
        ("adapter", "adapter_config.json", adapter),
    ):
        pathlib.Path(folder).mkdir(exist_ok=True)
        text = json.dumps(content).encode()
        if rng.random() < 0.05:
            text = mutate_bytes(rng, text, [b"[" * 100_000, b"\xff", b"\xef\xbb\xbf", b"9" * 5000])
        pathlib.Path(folder, name).write_bytes(text)
    tensor = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    stored = {tensor: np.zeros((4, 32), np.float32)}
    safetensors.numpy.save_file(stored, "adapter/adapter_model.safetensors")
    where = ["model.config=null", "model.source=model"]
    if changes:
        where = []
    config = config_file.parse(CONFIG, [*where, *changes])
    model_files.read_model(config)


def _make_data(rng: random.Random) -> dict[str, bytes]:
    """Files of each type with valid records."""
    records = [{"text": "some text"}, {"text": "\u00e4" * 9}, {"text": ""}]
    lines = "\n".join(map(json.dumps, records)).encode()
    chats = "\n".join([json.dumps(CHAT)] * 3).encode()
    table = pa.table({"text": [record["text"] for record in records]})
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return {
        "a.jsonl": lines,
        "chats.jsonl": chats,
        "a.json": json.dumps(records).encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.csv": b'text,other\n"a, b",1\nc,2\n',
        "a.tsv": b"text\tother\na\t1\n",
        "a.parquet": sink.getvalue().to_pybytes(),
        "a.arrow": stream.getvalue().to_pybytes(),
        "a\x1b[31m.txt": b"some text",
        "tokens.jsonl": b'{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}\n{"input_ids": []}',
    }


def check_data(rng: random.Random) -> None:
    """Reads and tokenizes a changed data file."""
    files = _make_data(rng)
    name = rng.choice(list(files))
    content = files[name]
    if content[:1] == b"{" and rng.random() < 0.6:
        record = mutate_json(rng, json.loads(content.splitlines()[0]))
        content = json.dumps(record).encode() + b"\n" + content
    else:
        tokens = [b"[" * 100_000, b"\0", b'"', b"\n", b"\xff", b'{"text": 3}', b"1" * 5000, b"\x1b"]
        content = mutate_bytes(rng, content, tokens)
    path = pathlib.Path(name)
    path.write_bytes(content)
    known = {"chats.jsonl": "messages", "tokens.jsonl": "tokens"}
    source = {"source": glob_escape(name), "format": known.get(name, "text")}
    if rng.random() < 0.1:
        source |= {"fields": {"text": rng.choice(["x", "", "\x1b"])}}
    data = {"chat_template": CHATML} if source["format"] == "messages" else {}
    if rng.random() < 0.3:
        data["on_bad_record"] = "skip"
    _tokenize(source, data, tokenizers.make_byte_tokenizer())


def glob_escape(name: str) -> str:
    """The name as a glob, whose characters mean themselves."""
    return name.replace("[", "[[]")


def _tokenize(source: dict[str, Any], data: dict[str, Any], tokenizer: Any) -> None:
    fields = CONFIG | {"data": {"train": [source], "row_tokens": 64, **data}}
    config = config_file.parse(fields)
    records = sources.read(config.data.train[0], data=config.data)
    tokenize.tokenize_dataset(
        records,
        tokenizer=tokenizer,
        vocab_size=600,
    )


def check_template(rng: random.Random) -> None:
    """Renders a chat with a hostile or changed template."""
    template = rng.choice(HOSTILE_TEMPLATES) + CHATML
    if rng.random() < 0.6:
        tokens = [b"{{", b"}}", b"{%", b"%}", b"{% endfor %}", b"(", b"|tojson", b"messages", b"{#"]
        template = mutate_bytes(rng, CHATML.encode(), tokens).decode("utf-8", "replace")
    render(template)


def render(template: str) -> None:
    """Renders and tokenizes a chat."""
    pathlib.Path("chat.jsonl").write_text(json.dumps(CHAT))
    source = {"source": "chat.jsonl", "format": "messages"}
    _tokenize(source, {"chat_template": template}, tokenizers.make_byte_tokenizer())


def split_by(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer of tokenizer.json that splits at a regular expression, then into bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False}, split_bytes | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": steps}


def grow(times: int, letter: str = "e") -> dict[str, Any]:
    """A normalizer of tokenizer.json that makes four letters of one, several times."""
    replace = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 4}
    return {"type": "Sequence", "normalizers": [replace] * times}


def make_tokenizer(rng: random.Random) -> dict[str, Any]:
    """A tokenizer.json of bytes, with parts that a hostile one may have."""
    backend = json.loads(tokenizers.make_byte_tokenizer().backend_tokenizer.to_str())
    if rng.random() < 0.5:
        backend["normalizer"] = grow(rng.choice([1, 3]))
    if rng.random() < 0.5:
        backend["pre_tokenizer"] = split_by(rng.choice(PATTERNS))
    return backend


def load_tokenizer(backend: Any, config: Any) -> Any:
    """Loads a tokenizer from its two files."""
    folder = pathlib.Path("tokenizer")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizers.load(str(folder))


def tokenize_text(text: str, tokenizer: Any) -> None:
    """Tokenizes a record of text."""
    pathlib.Path("text.jsonl").write_text(json.dumps({"text": text}))
    _tokenize({"source": "text.jsonl", "format": "text"}, {}, tokenizer)


def check_tokenizer(rng: random.Random) -> None:
    """Loads a changed tokenizer and tokenizes with it."""
    backend = make_tokenizer(rng)
    config: Any = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    if rng.random() < 0.5:
        backend = mutate_json(rng, mutate_json(rng, backend))
    elif rng.random() < 0.5:
        config = mutate_json(rng, config)
    tokenizer = load_tokenizer(backend, config)
    tokenize_text("a" * 30 + "b some text e\u0301", tokenizer)
    pathlib.Path("chat.jsonl").write_text(json.dumps(CHAT))
    data = {"chat_template": CHATML}
    _tokenize({"source": "chat.jsonl", "format": "messages"}, data, tokenizer)


KINDS: dict[str, Callable[[random.Random], None]] = {
    "configs": check_config,
    "models": check_model,
    "data": check_data,
    "templates": check_template,
    "tokenizers": check_tokenizer,
}
