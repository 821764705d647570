"""Tests of records of two documents: tokens, labels and columns, against TRL's trainers."""

import json
import types

import datasets
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError, at
from jaxsp.data import sources, tokenize, tokenizers
from jaxsp.data.data_config import DataConfig
from jaxsp.data.source import (
    BARE_ANSWERS,
    FIRST_REFERENCE,
    FIRST_TOKENS,
    IS_DESIRABLE,
    SECOND_REFERENCE,
)
from tests.data import chats
from tests.data.source_configs import make_source, to_columns
from tests.messages import assert_refused

FIELD = "data.train.0.source"

TOOLS_CHATML = "{%- if tools %}{{ tools | tojson }}{% endif -%}" + chats.CHATML

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def tokenizer():
    new_tokenizer = chats.tokenizer()
    new_tokenizer.chat_template = TOOLS_CHATML
    return new_tokenizer


def tokenized(records, tokenizer, format="preference", **data):
    with open("a.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    source = make_source(source="a.jsonl", format=format)
    config = DataConfig(train=(source,), row_tokens=8, num_workers=1, **data)
    with at(FIELD, "a.jsonl"):
        return tokenize.tokenize_dataset(
            sources.read(source, data=config),
            tokenizer=tokenizer,
            vocab_size=100_000,
        )


def ours(records, tokenizer, format="preference", **data):
    """Returns ids and labels of the first and of the second document of each record."""
    columns = to_columns(tokenized(records, tokenizer, format, **data))
    results = []
    names = ("tokens", "labels", FIRST_TOKENS)
    for tokens, labels, first in zip(*(columns[name] for name in names), strict=True):
        parts = (slice(0, first), slice(first, None))
        results.append([(tokens[part], labels[part]) for part in parts])
    return results


def prepare(trainer_name, records, tokenizer):
    """Returns the rows of TRL's own preparation of a data set."""
    module = pytest.importorskip(
        f"trl.trainer.{trainer_name.lower()}_trainer", reason="needs trl, on Python 3.11"
    )
    trainer = types.SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    trainer.desirable_weight = trainer.undesirable_weight = 1.0
    config = types.SimpleNamespace(dataset_num_proc=None, max_length=None)
    dataset = datasets.Dataset.from_list(records, on_mixed_types="use_json")
    prepare_dataset = getattr(module, f"{trainer_name}Trainer")._prepare_dataset
    return prepare_dataset(trainer, dataset, tokenizer, config, "train")


def join(row, completion):
    prompt = row["prompt_ids"]
    return prompt + row[completion], [NO_LABEL] * len(prompt) + row[completion]


def theirs(records, tokenizer):
    rows = prepare("DPO", records, tokenizer)
    return [[join(row, name) for name in ("chosen_ids", "rejected_ids")] for row in rows]


def text_pairs():
    texts = [
        message["content"]
        for messages in chats.conversations(30, alternating=True)
        for message in messages
    ]
    triples = zip(texts[::3], texts[1::3], texts[2::3], strict=False)
    names = ("prompt", "chosen", "rejected")
    pairs = [dict(zip(names, triple, strict=True)) for triple in triples]
    return [pair for pair in pairs if pair["chosen"] != pair["rejected"]]


def message_pairs():
    pairs = []
    for messages in chats.conversations(40):
        places = [number for number, each in enumerate(messages) if each["role"] == "user"]
        border = max(places) + 1
        rejected = {"role": "assistant", "content": f"not {border}"}
        pair = {"prompt": messages[:border], "chosen": messages[border:], "rejected": [rejected]}
        pairs.append(pair)
    return pairs


def test_text_has_the_tokens_of_trl_and_loss_from_the_same_token_in_both_documents(tokenizer):
    pairs = text_pairs()
    # a token holds the end of the prompt and the beginning of one completion
    pairs += [
        {"prompt": "an ", "chosen": "answer", "rejected": "x"},
        {"prompt": "an ", "chosen": "x", "rejected": "\n\n"},
        {"prompt": "x", "chosen": "", "rejected": "y</s>"},
        {"prompt": "x\n", "chosen": "\ny", "rejected": "y"},
    ]
    assert ours(pairs, tokenizer) == theirs(pairs, tokenizer)


def test_messages_have_the_tokens_and_labels_of_trl(tokenizer):
    pairs = message_pairs()
    expected = theirs(pairs, tokenizer)
    assert ours(pairs, tokenizer) == expected
    implicit = [
        {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in pairs
    ]
    assert ours(implicit, tokenizer) == theirs(implicit, tokenizer) == expected
    with_tools = [pair | {"tools": [TOOL]} for pair in pairs]
    actual = ours(with_tools, tokenizer)
    assert actual == theirs(with_tools, tokenizer)
    assert actual != expected


def test_an_implicit_text_prompt_has_the_tokens_of_trl_and_loss_where_tokens_differ(tokenizer):
    pairs = [
        {name: pair["prompt"] + " " + pair[name] for name in ("chosen", "rejected")}
        for pair in text_pairs()
    ]
    for actual, expected in zip(ours(pairs, tokenizer), theirs(pairs, tokenizer), strict=True):
        assert [ids for ids, _ in actual] == [ids for ids, _ in expected]
        starts = {int(np.argmax(np.array(labels) >= 0)) for _, labels in actual}
        (start,) = starts
        assert actual[0][0][:start] == actual[1][0][:start]
        for (ids, labels), (_, trl_labels) in zip(actual, expected, strict=True):
            assert labels[start:] == ids[start:] == trl_labels[start:]


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_unpaired_records_have_the_tokens_of_trl_with_the_completion_of_the_next_record(
    tokenizer, kind
):
    pairs = text_pairs() if kind == "text" else message_pairs()
    records = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 3 == 0}
        for number, pair in enumerate(pairs)
    ]
    mismatched = [
        record | {"completion": other["completion"]}
        for record, other in zip(records, records[1:] + records[:1], strict=True)
    ]
    expected = [
        [join(row, "completion_ids") for row in rows]
        for rows in zip(
            prepare("KTO", records, tokenizer), prepare("KTO", mismatched, tokenizer), strict=True
        )
    ]
    assert ours(records, tokenizer, "unpaired") == expected


def test_columns_and_statistics_of_records_of_two_documents(tokenizer):
    references = {"ref_chosen_logps": -1.25, "ref_rejected_logps": -3}
    pairs = text_pairs()[:4]
    pairs[1] |= references
    bad = {"prompt": "q", "chosen": "a"}
    columns = to_columns(tokenized([*pairs, bad], tokenizer, on_bad_record="skip"))
    assert [*columns] == [
        *("place", "problem", "num_tokens", BARE_ANSWERS, FIRST_TOKENS),
        *(FIRST_REFERENCE, SECOND_REFERENCE, "tokens", "labels"),
    ]
    assert (columns["tokens"][4], columns["labels"][4], columns[FIRST_TOKENS][4]) == ([], [], 0)
    for name, expected in ((FIRST_REFERENCE, -1.25), (SECOND_REFERENCE, -3.0)):
        assert columns[name][1] == expected
        assert np.isnan([columns[name][index] for index in (0, 2, 3, 4)]).all()
    feedback = [
        {"prompt": "q", "completion": "a", "label": "false"},
        {"prompt": "r", "completion": "b", "label": 1},
    ]
    unpaired = to_columns(tokenized(feedback, tokenizer, "unpaired"))
    assert unpaired[IS_DESIRABLE] == [False, True]


def test_a_document_that_cannot_be_rendered_or_has_no_loss_is_named(tokenizer):
    user = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}]
    refused = [{"role": "user", "content": "b"}]
    pair = {"prompt": user, "chosen": answer, "rejected": refused}
    with assert_refused("rejected", start=f"{FIELD} = a.jsonl: a.jsonl, line 1: "):
        tokenized([pair], tokenizer, chat_template=chats.TURNS)
    silent = [answer[0] | {"weight": 0}]
    with pytest.raises(UserError, match=r"chosen: message 1 has weight 0 .*leave the record out"):
        tokenized([pair | {"chosen": silent}], tokenizer)
    records = [
        {"prompt": user, "completion": answer, "label": True},
        {"prompt": user, "completion": refused, "label": True},
    ]
    with pytest.raises(UserError, match="line 1: mismatched completion: "):
        tokenized(records, tokenizer, "unpaired", chat_template=chats.TURNS)
    endless = tokenizers.make_byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(UserError, match="line 1: chosen: has no token with loss"):
        tokenized([{"prompt": "q", "chosen": "", "rejected": "b"}], endless)


def test_bare_answers_of_both_documents_are_counted(tokenizer):
    user = {"role": "user", "content": "q"}
    think = {"role": "assistant", "content": "<think>hm</think>x"}
    final = {"role": "assistant", "content": "y"}
    pair = {"prompt": [user], "chosen": [think, user, final], "rejected": [final]}
    how = {"chat_template": chats.THINKING, "earlier_reasoning": "keep"}
    assert to_columns(tokenized([pair], tokenizer, **how))[BARE_ANSWERS] == [1]
