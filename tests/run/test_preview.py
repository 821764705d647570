"""--preview: records of each training source, with the tokens that have a loss."""

import json
import re

import datasets
import jax
import pytest
import rich.console

from jaxsp import train
from jaxsp.data.tokenization import tokenize
from jaxsp.run import config_file, preview
from tests import messages
from tests.data.chat import chats

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


def shown(config, num_records=None, **options):
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


def test_both_documents_of_a_record_are_shown(tmp_path):
    pair = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    feedback = [
        {"prompt": f"{number} =", "completion": f" {number}", "label": number == 1}
        for number in range(3)
    ]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, feedback)))
    pairs = shown(asked(("pairs.jsonl", "preference"), objective={"type": "dpo"}))
    votes = asked(("votes.jsonl", "unpaired"), objective={"type": "kto"})
    texts = [pairs, shown(votes, num_records=2)]
    shown_documents = "\n\n".join(map(str.strip, texts)).split("\n\ndata.")
    assert [re.findall(r"line \d+: (.*)|$", text)[0] for text in shown_documents] == [
        "chosen",
        "rejected",
        "completion (undesirable)",
        "mismatched completion",
        "completion (desirable)",
        "mismatched completion",
    ]
    assert [text.splitlines()[-1] for text in shown_documents] == [
        "2 + 2 =⟦ 4<eos>⟧",
        "2 + 2 =⟦ 5<eos>⟧",
        "0 =⟦ 0<eos>⟧",
        "0 =⟦ 1<eos>⟧",
        "1 =⟦ 1<eos>⟧",
        "1 =⟦ 2<eos>⟧",
    ]


def test_what_is_learned_is_coloured_on_a_terminal():
    lines = shown(asked(("talk.jsonl", "messages")), force_terminal=True, color_system="standard")
    assert "⟦" not in lines
    assert "\x1b[30;42mone↵" in lines
    assert "\x1b[30;42mtwo<|im_end|>↵" in lines
    assert "\x1b[30;42m" in lines.splitlines()[1], "an example of it"


def test_a_document_cannot_control_the_terminal(tmp_path):
    name = "a\x1b]0;title\x07\nforged.txt"
    (tmp_path / name).write_text("\x1b]52;c;x\x07 \u202etext\n\tnext \x9b")
    lines = shown(asked(("a*.txt", "text")))
    assert "]52;c;x\\x07 \\u202etext" in lines
    assert "\\x1b]0;title\\x07\\nforged.txt" in lines
    assert not re.search("[\x1b\x07\x9b\u202e]", lines)


def test_only_the_first_record_is_tokenised_and_no_device_is_asked_for(
    monkeypatch, tmp_path, capsys
):
    (tmp_path / "c.yaml").write_text(
        "{run: {directory: run, steps: 1}, batch: {rows_per_step: 1}, optimizer: "
        "{learning_rate: 1}}"
    )
    given = []
    encode = tokenize.encode_records
    monkeypatch.setattr(
        tokenize,
        "encode_records",
        lambda records, *rest: given.append(len(records)) or encode(records, *rest),
    )
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("asked for devices"))
    words = [
        "data.row_tokens=64",
        "data.train=[{source: talk.jsonl, format: messages}]",
        "data.chat_template=chat.jinja",
    ]
    words += ["model.config={model_type: llama, vocab_size: 257}", "model.tokenizer=bytes"]
    train.main(["c.yaml", "--preview", *words])
    assert given == [1]
    assert "⟦one↵" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def write_chats(path):
    """Writes plain chats, then chats of several kinds."""
    ask = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "tool_calls": [chats.CALL]}
    records = [[ask, answer]] * 3
    records += [[ask, answer | {"content": "<think>hm</think>so"}], [ask, call]]
    records += [
        [ask, answer, ask, answer | {"loss": False}, ask, answer],
        [ask, answer, ask, answer],
    ]
    lines = [
        json.dumps({"id": number, "messages": record, "topic": "t"})
        for number, record in enumerate(records, 1)
    ]
    path.write_text("\n".join(lines))


def test_one_record_of_each_kind_is_shown_by_default(tmp_path):
    write_chats(tmp_path / "kinds.jsonl")
    config = asked(("kinds.jsonl", "messages"), ("long.txt", "text"))
    text = shown(config)
    assert re.findall(r"kinds\.jsonl, line (\d+)(.*)", text) == [
        ("1", ""),
        ("4", " (reasoning)"),
        ("5", " (tool calls)"),
        ("6", " (several turns, messages without loss)"),
    ]
    assert text.count("long.txt: long.txt") == 1
    assert re.findall(r"kinds\.jsonl, line (\d+)", shown(config, num_records=2)) == ["1", "2"]
    assert len(re.findall(r"kinds\.jsonl, line", shown(config, num_records=99))) == 7


def test_fields_that_nothing_reads_are_listed(tmp_path):
    write_chats(tmp_path / "kinds.jsonl")
    datasets.Dataset.from_dict({"text": ["x"], "url": ["y"], "size": [1]}).to_parquet(
        str(tmp_path / "table.parquet")
    )
    text = shown(
        asked(
            ("kinds.jsonl", "messages"),
            ("table.parquet", "text"),
            ("pair.jsonl", "prompt_completion"),
        )
    )
    listed = re.findall(r"(\S+): fields that nothing reads: (.*)", text)
    assert listed == [("kinds.jsonl", "id, topic"), ("table.parquet", "url, size")]
