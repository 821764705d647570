"""Tests of a model's tokenizer and of the token ids in its configs, without training."""

import json

import pytest

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import model_config
from jaxsp.hf.folder import ModelFolder
from jaxsp.run import config_file, data_sets, model_files
from jaxsp.run.model_files import StopTokens
from tests import batches, small_runs
from tests.data import chats
from tests.messages import assert_names, assert_refused

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def make_config(folder, *sources, **model):
    fields = small_runs.make_fields(folder, model=model, data={"train": list(sources)})
    return config_file.parse(fields)


def write_records(path, format_name, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return {"source": str(path), "format": format_name}


def open_sources(config):
    problems = ProblemCollector()
    opened = data_sets.open_sources(config, for_training=True, problems=problems)
    problems.raise_if_any()
    return opened


@pytest.mark.parametrize("model", ["given", "random"])
def test_a_given_model_may_have_fewer_rows_than_its_tokenizer_has_tokens(tmp_path, model):
    """gemma-3-1b has one token more than its embedding has rows; no text has that token."""
    tokenizer = chats.tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    records = write_records(tmp_path / "a.jsonl", "text", {"text": "an answer"})
    fields = batches.SMALL_LLAMA | {"vocab_size": len(tokenizer) - 1}
    own = {"source": str(tmp_path / "base")}
    if model == "random":
        own = {"config": fields, "tokenizer": str(tmp_path / "base")}
    config = make_config(tmp_path, records, **own)
    source = ModelFolder(
        source="base", field="model.source", path=tmp_path / "base", config_fields=fields
    )
    parsed = model_config.parse_model_config(fields)
    load = lambda: model_files.load_checked_tokenizer(config, source, parsed, has_text=True)
    if model == "given":
        assert len(load()) == len(tokenizer)
    else:
        with assert_refused(f"model.config.vocab_size={len(tokenizer)}"):
            load()


@pytest.mark.parametrize(
    ("model", "suggestion"),
    [
        ({"source": "base"}, "resize_token_embeddings(len(tokenizer))"),
        ({"source": "base", "tokenizer": "bytes"}, "model.tokenizer=null"),
        ({"config": batches.SMALL_LLAMA, "tokenizer": "bytes"}, "model.config.vocab_size"),
    ],
)
def test_a_token_beyond_the_embedding_has_a_suggestion_that_is_not_in_use(
    tmp_path, model, suggestion
):
    source = write_records(tmp_path / "a.jsonl", "tokens", {"input_ids": [1, 300]})
    config = make_config(tmp_path, source, **model)
    with pytest.raises(UserError) as error:
        data_sets.make_data_sets(
            open_sources(config), config, None, vocab_size=256, for_training=True
        )
    assert_names(error.value, "line 1", "300", suggestion)


@pytest.mark.parametrize(
    ("eos_ids", "alternatives", "expected"),
    [
        ([0, 1], [[2]], [2, 0, 1]),
        (2, [[2]], 2),
        (None, [[2]], 2),
        (4, [[3, 4]], 4),  # one token of an end is enough
        (0, [[3, 4]], [4, 0]),
        ([0, 5], [[5], [6]], [6, 0, 5]),
    ],
)
def test_stop_tokens_are_added_to_those_of_the_base(tmp_path, eos_ids, alternatives, expected):
    stops = StopTokens(alternatives=tuple(map(tuple, alternatives)))
    assert stops.add_to({"eos_token_id": eos_ids, "a": 1}) == {"eos_token_id": expected, "a": 1}
    path = tmp_path / "generation_config.json"
    stops.add_to_file(tmp_path, default=7)
    assert not path.exists()
    path.write_text('{"eos_token_id": 9}')
    stops.add_to_file(tmp_path, default=7)
    ids = json.loads(path.read_text())["eos_token_id"]
    assert ids == [*(tokens[-1] for tokens in alternatives), 9]
    path.write_text("{}")
    stops.add_to_file(tmp_path, default=eos_ids)
    assert json.loads(path.read_text())["eos_token_id"] == expected
    StopTokens().add_to_file(tmp_path, default=7)
    assert json.loads(path.read_text())["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("format_name", "record", "has_stop"),
    [
        ("messages", {"messages": CHAT}, True),
        ("prompt_completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, True),
        ("prompt_completion", {"prompt": "q", "completion": "a"}, False),
        ("text", {"text": "q"}, False),
    ],
)
def test_chats_have_stop_tokens(tmp_path, format_name, record, has_stop):
    tokenizer = chats.tokenizer()
    text = write_records(tmp_path / "b.jsonl", "text", {"text": "x"})
    source = write_records(tmp_path / "a.jsonl", format_name, record)
    config = make_config(tmp_path, text, source, source="base")
    tokenizer.chat_template = chats.CHATML
    found = model_files.find_stop_tokens(open_sources(config), config, tokenizer)
    expected = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.alternatives == (((expected,),) if has_stop else ())
    assert ("<|im_end|>" in found.description) == has_stop
