"""--prepare-data: the data of a run is read, tokenized and printed, and training finds it.

--preview: records of each training source, with the tokens that have a loss.
"""

import json
import re

import jax
import pytest
import rich.console

from jaxsp import train
from jaxsp.data import tokenize
from jaxsp.run import build, config_file, preview
from tests import messages
from tests.data import chats
from tests.messages import assert_refused

TALK = [{"role": "user", "content": "q [red]"}, {"role": "assistant", "content": "one\ntwo"}]

CONFIG = """
run: {directory: run, epochs: 1.5}
model:
  tokenizer: bytes
  config: {model_type: llama, vocab_size: 257, hidden_size: 8, num_hidden_layers: 1,
    num_attention_heads: 1, intermediate_size: 8}
data:
  train:
    - {source: a.txt, format: text}
    - {source: talk.jsonl, format: messages}
  eval: [{source: b.txt, format: text}]
  row_tokens: 64
  chat_template: chat.jinja
batch: {rows_per_step: 8}
optimizer: {learning_rate: 0.1}
"""


@pytest.fixture(autouse=True)
def _files(own_cache, tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("y" * 100)
    (tmp_path / "chat.jinja").write_text(chats.CHATML)
    (tmp_path / "c.yaml").write_text(CONFIG)


def test_a_later_run_finds_the_tokens(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: pytest.fail("asked for devices"))
        train.main(["c.yaml", "--prepare-data"])
    printed = capsys.readouterr().out
    monkeypatch.setattr(tokenize, "encode_batch", lambda *_: pytest.fail("tokenizes again"))
    inputs = build.build_training(config_file.load("c.yaml", []), devices=jax.devices()[:1])
    num_tokens = int(inputs.train_set.documents.segments.length.sum())
    assert re.search(rf"^data +2 documents .*\b{num_tokens:,} tokens", printed, re.MULTILINE)
    assert re.search(rf"^steps +{len(inputs.schedule)} steps$", printed, re.MULTILINE)
    assert re.search(r"^eval +b.txt \(1 document, 101 tokens", printed, re.MULTILINE)


def test_problems_of_model_and_data_are_reported_together():
    changes = ["data.train.0.source=not-here.txt", "model.config.hidden_size=null"]
    with assert_refused("not-here.txt", "model.config.hidden_size"):
        train.main(["c.yaml", "--prepare-data", *changes])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["data.row_tokens=1002", "mesh.seq=4"], ["data.row_tokens = 1002", "4"]),
        (["mesh.data=3"], ["batch.rows_per_step = 8", "3"]),
        (["mesh.replica=3", "batch.rows_per_microbatch=auto"], ["batch.rows_per_step = 8", "3"]),
    ],
)
def test_rows_that_no_number_of_devices_divides_are_refused(changes, parts):
    with assert_refused(*parts):
        train.main(["c.yaml", "--prepare-data", *changes])


def test_tokens_with_a_loss_are_in_brackets_without_colors(tmp_path):
    (tmp_path / "pair.jsonl").write_text('{"prompt": "2 + 2 =", "completion": " 4"}\n')
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}\n')
    formats = {"talk": "messages", "pair": "prompt_completion", "ids": "tokens"}
    sources = [{"source": f"{x}.jsonl", "format": format} for x, format in formats.items()]
    config = config_file.load("c.yaml", [f"data.train={json.dumps(sources)}"])
    console = rich.console.Console(markup=False, width=200)
    with console.capture() as capture:
        preview.print_preview(config, console)
    first, second, third = capture.get().strip().split("\n\ndata.")
    place, counts, *_ = first.splitlines()
    assert re.match(messages.containing("data.train.0.source = talk.jsonl", "line 1"), place)
    assert re.match(messages.containing("75 tokens", 18, "⟦"), counts)
    assert first.endswith(
        "<|im_start|>user\nq [red]<|im_end|>\n<|im_start|>assistant\n⟦one↵\ntwo<|im_end|>↵\n⟧"
    )
    assert second.endswith("2 + 2 =⟦ 4<eos>⟧")
    assert re.search(messages.containing("3 tokens", 1), third)
