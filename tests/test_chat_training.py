"""Tests of a chat run: loss tokens counted by hand, evaluation, and the exported template."""

import json
import re

import jax
import numpy as np
import pytest
import transformers

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.hf import model_config, weights
from jaxsp.model import decoder
from tests import batches, commands, messages, small_runs
from tests.data import chats

pytestmark = pytest.mark.e2e

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    ("user", "Hi"),
    ("assistant", "Hello. \U0001f600"),
    ("user", "<|assistant|>no"),
    ("assistant", " two\nlines"),
]
ANSWERS = sum(len(words.encode()) + len("<|end|>") for role, words in TURNS if role == "assistant")


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """Folder with a run of two epochs over ten conversations; its template file is deleted."""
    folder = tmp_path_factory.mktemp("chat")
    record = json.dumps({"messages": [{"role": role, "content": words} for role, words in TURNS]})
    (folder / "chats.jsonl").write_text("\n".join([record] * 10))
    (folder / "chatml.jinja").write_text(TEMPLATE)
    source = {"source": str(folder / "chats.jsonl"), "format": "messages"}
    data = {"train": [source], "eval": [{**source, "name": "held out"}]}
    sections = {
        "run": {"steps": None, "epochs": 2},
        "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
        "mesh": {"data": 1, "seq": 2},
        "data": data | {"row_tokens": 256, "chat_template": str(folder / "chatml.jinja")},
    }
    small_runs.train(small_runs.make_fields(folder, **sections))
    (folder / "chatml.jinja").unlink()
    return folder


def test_only_assistant_messages_have_loss(chat_run):
    lines = commands.read_lines(chat_run / "run/metrics.jsonl")
    assert sum(line["num_loss_tokens"] for line in lines) == 2 * 10 * ANSWERS
    banner = messages.read_banner(chat_run / "run")
    assert re.search(messages.containing(f"{10 * ANSWERS:,}"), banner)
    assert re.search(messages.containing("stop", "turns end with", "<|end|>"), banner)


def test_the_export_renders_chats_as_in_training(chat_run):
    export.main([str(chat_run / "run"), str(chat_run / "hf")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_run / "hf")
    lines = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert lines == "<|user|>Hi<|end|><|assistant|>"


def test_a_run_is_evaluated_without_its_template_file(chat_run, capsys):
    good = (chat_run / "chats.jsonl").read_text().splitlines()[0]
    (chat_run / "bad.jsonl").write_text(good + '\n{"messages": []}\n')
    source = f"data.eval=[{{source: {chat_run / 'bad.jsonl'}, format: messages}}]"
    evaluation.main([str(chat_run / "run"), "mesh.data=4", "data.on_bad_record=skip", source])
    lines = capsys.readouterr().out
    assert re.search(messages.containing("loss", f"{ANSWERS:,}"), lines)
    assert re.search(messages.containing(1, "skip"), lines), "a record that is left out is counted"


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_model_stops_at_the_end_of_the_turns_that_it_learned(tmp_path, capsys, adapter):
    """The base ends documents with </s>; the chats end turns with <|im_end|>."""
    tokenizer = chats.tokenizer()
    fields = batches.SMALL_LLAMA | {"vocab_size": 512}
    table = decoder.param_table(model_config.parse_model_config(fields))
    weights.export_model(
        jax.tree.map(lambda param: np.ones(param.stacked_shape, np.float32), table),
        table=table,
        fields=fields,
        tokenizer=tokenizer,
        directory=tmp_path / "base",
    )
    generation = {"eos_token_id": tokenizer.eos_token_id, "temperature": 0.5}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(generation))
    record = {"messages": [{"role": role, "content": words} for role, words in TURNS]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    source = {"source": str(tmp_path / "chats.jsonl"), "format": "messages"}
    sections = {
        "model": {"source": str(tmp_path / "base")},
        "data": {"train": [source], "row_tokens": 128, "chat_template": chats.CHATML},
        "adapter": {"type": adapter},
    }
    small_runs.train(small_runs.make_fields(tmp_path, **sections))
    stop_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [stop_id, tokenizer.eos_token_id]
    banner = (tmp_path / "run/banner.txt").read_text()
    assert re.search(messages.containing("stop", "<|im_end|>", str(ids)), banner)
    merge = ["--merge"] if adapter == "lora" else []
    export.main([str(tmp_path / "run"), str(tmp_path / "hf"), *merge])
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == ids
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").temperature == 0.5
    if merge:
        export.main([str(tmp_path / "run"), str(tmp_path / "adapter")])
        output = capsys.readouterr().out
        assert re.search(messages.containing("PEFT", "generate", str(ids)), output)
