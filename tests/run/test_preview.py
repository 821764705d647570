"""--preview: records of each training source, with the tokens that have a loss."""

import re

import pytest
import rich.console

from jaxsp.run import config_file, preview
from tests import messages
from tests.data import chats

TALK = (
    '{"messages": [{"role": "user", "content": "q [red]"}, '
    '{"role": "assistant", "content": "one\\ntwo"}]}\n'
)


@pytest.fixture(autouse=True)
def _files(own_cache, tmp_path):
    (tmp_path / "talk.jsonl").write_text(TALK * 3)
    (tmp_path / "pair.jsonl").write_text('{"prompt": "2 + 2 =", "completion": " 4"}\n')
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}\n')
    (tmp_path / "long.txt").write_text("x" * 5000)
    (tmp_path / "chat.jinja").write_text(chats.CHATML)


def asked(*sources, tokenizer="bytes", objective=None):
    return config_file.parse(
        {
            "run": {"directory": "run", "steps": 1},
            "model": {"config": {"model_type": "llama", "vocab_size": 257}, "tokenizer": tokenizer},
            "data": {
                "train": [{"source": name, "format": format} for name, format in sources],
                "row_tokens": 64,
                "chat_template": "chat.jinja" if "messages" in dict(sources).values() else None,
            },
            "batch": {"rows_per_step": 1},
            "objective": objective or {},
            "optimizer": {"learning_rate": 0.1},
        }
    )


def shown(config, num_records=1, **options):
    console = rich.console.Console(markup=False, **{"width": 200, **options})
    with console.capture() as capture:
        preview.print_preview(config, console, num_records=num_records)
    return capture.get()


def test_what_is_learned_is_in_brackets_where_there_are_no_colours():
    lines = shown(
        asked(
            ("talk.jsonl", "messages"), ("pair.jsonl", "prompt_completion"), ("ids.jsonl", "tokens")
        )
    )
    first, second, third = lines.strip().split("\n\ndata.")
    place, counts, *_ = first.splitlines()
    assert re.match(messages.containing("data.train.0.source = talk.jsonl", "line 1"), place)
    assert re.match(messages.containing("75 tokens", 18, "⟦"), counts)
    assert first.endswith(
        "<|im_start|>user\nq [red]<|im_end|>\n<|im_start|>assistant\n⟦one↵\ntwo<|im_end|>↵\n⟧"
    )
    assert second.endswith("2 + 2 =⟦ 4<eos>⟧")
    assert re.search(messages.containing("3 tokens", 1), third)
