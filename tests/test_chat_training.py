"""Tests of a chat run: loss tokens counted by hand, evaluation, and the exported template."""

import json
import re

import jax
import pytest
import rich.console
import transformers

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.config import config_file
from jaxsp.run import build, trainer
from tests import batches, messages

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
    config = config_file.parse(
        {
            "run": {"directory": str(folder / "run"), "epochs": 2},
            "model": {
                "config": batches.SMALL_LLAMA,
                "tokenizer": "bytes",
                "compute_dtype": "float32",
            },
            "mesh": {"data": 1, "seq": 2},
            "data": {
                "train": [source],
                "eval": [{**source, "name": "held out"}],
                "row_tokens": 256,
                "chat_template": str(folder / "chatml.jinja"),
            },
            "batch": {"rows_per_step": 1},
            "optimizer": {"learning_rate": 0.01},
            "logging": {"trackers": []},
        }
    )
    program, material = build.build_training(config, devices=jax.devices()[:2])
    trainer.train(program, material, rich.console.Console(quiet=True))
    (folder / "chatml.jinja").unlink()
    return folder


def test_only_assistant_messages_have_loss(chat_run):
    lines = [json.loads(line) for line in (chat_run / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(line["num_loss_tokens"] for line in lines) == 2 * 10 * ANSWERS
    banner = messages.read_banner(chat_run / "run")
    assert re.search(messages.containing(f"{10 * ANSWERS:,}"), banner)


def test_the_export_renders_chats_as_in_training(chat_run):
    export.main([str(chat_run / "run"), str(chat_run / "hf")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_run / "hf")
    lines = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert lines == "<|user|>Hi<|end|><|assistant|>"


def test_a_run_is_evaluated_without_its_template_file(chat_run, capsys):
    words = [
        "mesh.data=4",
        "data.on_bad_record=skip",
        f"data.eval=[{_with_a_bad_record(chat_run)}]",
    ]
    evaluation.main([str(chat_run / "run"), *words])
    lines = capsys.readouterr().out
    assert re.search(messages.containing("loss", f"{ANSWERS:,}"), lines)
    assert re.search(messages.containing(1, "skip"), lines), "a record that is left out is counted"


def _with_a_bad_record(folder):
    good = (folder / "chats.jsonl").read_text().splitlines()[0]
    (folder / "bad.jsonl").write_text(good + '\n{"messages": []}\n')
    return f"{{source: {folder / 'bad.jsonl'}, format: messages}}"
