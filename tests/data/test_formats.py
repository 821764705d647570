"""What is kept of a record of each format, and what is said of one that is not what its format says."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxsp.core import config
from jaxsp.data import files, formats

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "when": None}}}

CALLED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def kept(record, format="messages", **fields):
    found = formats.checker(config.Source(source="x", format=format, **fields), labels=False)(record)
    return json.loads(found["record"])


def problem(record, format="messages", **fields):
    with pytest.raises(formats.Bad) as raised:
        kept(record, format, **fields)
    return str(raised.value)


def test_messages_keep_what_a_template_may_use_and_nothing_else_of_the_record():
    messages = [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLED], "reasoning_content": "why"},
        {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "22"},
        ASSISTANT,
    ]
    record = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, "id": 7}
    expected = [dict(message) for message in messages]
    del expected[2]["content"]
    assert kept(record) == {"messages": expected, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    assert kept({"messages": [USER | {"tool_calls": []}], "tools": []}) == {"messages": [USER]}


def test_arguments_of_a_call_may_be_a_string_of_json():
    """As OpenAI writes them; a null in them was written, not filled in."""
    given = '{"city": "Rome", "when": null, "at": [{"x": null}]}'
    expected = {"city": "Rome", "when": None, "at": [{"x": None}]}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}
    record = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call, {"name": "f", "arguments": "{}"}, CALL, {"name": "g"}]}]
    }
    assert kept(record)["messages"][1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": expected}},
        {"name": "f", "arguments": {}},
        CALL,
        {"name": "g"},
    ]


def test_nulls_that_tables_fill_in_never_reach_a_template(tmp_path):
    records = [
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL], "chat_template_kwargs": {"a": 1}},
        {"messages": [{"role": "tool", "content": "x", "name": "n"}, ASSISTANT], "chat_template_kwargs": {"b": 2}},
    ]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    columns = formats.columns(config.Source(source="x", format="messages"), field="f.source")
    table = [record for _, record, _ in files.records(str(tmp_path / "a.parquet"), columns)]
    assert [kept(record) for record in table] == [
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}],
            "tools": [TOOL],
            "chat_template_kwargs": {"a": 1},
        },
        {"messages": [{"role": "tool", "content": "x", "name": "n"}, ASSISTANT], "chat_template_kwargs": {"b": 2}},
    ]


def test_nulls_that_lines_of_json_hold_are_kept(tmp_path):
    """In arguments of calls and in tools they are data; a message's own null field is one that it lacks."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": None, **CALL}]}
    record = {"messages": [USER, said], "tools": [tool], "chat_template_kwargs": {"a": None, "b": 1}}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    columns = formats.columns(config.Source(source="x", format="messages"), field="f.source")
    ((_, line, _),) = files.records(str(tmp_path / "a.jsonl"), columns)
    assert kept(line) == {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}],
        "tools": [tool],
        "chat_template_kwargs": {"b": 1},
    }
    json_table = pa.table({name: pa.array([json.dumps(value)], pa.json_()) for name, value in record.items()})
    parquet.write_table(json_table, tmp_path / "a.parquet")
    ((_, row, _),) = files.records(str(tmp_path / "a.parquet"), columns)
    assert kept(row) == kept(line)


def test_names_and_roles_are_the_users():
    record = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "functions": [TOOL]}
    found = kept(
        record,
        fields={"messages": "conversations", "role": "from", "content": "value", "tools": "functions"},
        roles={"human": "user", "gpt": "assistant"},
    )
    assert found == {"messages": [USER, ASSISTANT], "tools": [TOOL]}
    both = {"role": "other", "from": "human", "value": "hi"}
    assert kept({"messages": [both]}, fields={"role": "from", "content": "value"})["messages"][0] == {
        "role": "human",
        "content": "hi",
    }


def test_conversations_and_tools_may_be_strings_of_json():
    record = {"messages": json.dumps([USER, ASSISTANT]), "tools": json.dumps([TOOL]), "chat_template_kwargs": '{"a": 1}'}
    assert kept(record) == {"messages": [USER, ASSISTANT], "tools": [TOOL], "chat_template_kwargs": {"a": 1}}
    assert kept({"messages": json.dumps([USER]), "tools": "", "chat_template_kwargs": ""}) == {"messages": [USER]}


def test_parts_of_text_become_the_text_that_they_are():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b", "image": None}]
    assert kept({"messages": [{"role": "user", "content": parts}]})["messages"] == [{"role": "user", "content": "a\nb"}]


def test_prompt_and_completion_are_both_text_or_both_messages():
    for prompt, completion in (("a", "b"), ([USER], [ASSISTANT]), ("", "b")):
        record = {"prompt": prompt, "completion": completion}
        assert kept(record | {"other": 1}, "prompt_completion") == record
    alpaca = {"instruction": "a", "output": "b"}
    fields = {"prompt": "instruction", "completion": "output"}
    assert kept(alpaca, "prompt_completion", fields=fields) == {"prompt": "a", "completion": "b"}
    said = problem(alpaca | {"input": "c"}, "prompt_completion", fields=fields)
    assert said.startswith(
        "has an input beside its instruction, which would not be learned from. Its instruction and input are"
    )
    assert kept(alpaca | {"input": ""}, "prompt_completion", fields=fields) == {"prompt": "a", "completion": "b"}
    mixed = {"prompt": "a", "completion": [ASSISTANT]}
    assert (
        problem(mixed, "prompt_completion") == "only prompt is a string. Prompt and completion are both text, or both messages"
    )


BAD = [
    ({"messages": []}, "messages is empty: there is nothing to learn from"),
    ({"messages": None, "id": 1}, "messages is null"),
    ({"messages": {"role": ["user"]}}, "messages is an object, not a list of messages"),
    ({"messages": "hello"}, "messages is a string, and not one of JSON"),
    ({"messages": '{"role": "user"}'}, "messages is an object, not a list of messages"),
    ({"messages": ["hi"]}, "messages: message 1 is a string, not an object"),
    ({"messages": [USER, None]}, "messages: message 2 is null, not an object"),
    ({"messages": [{"content": "x", "name": "y"}]}, "messages: message 1 has no role; it has content, name"),
    (
        {"messages": [{"from": "human", "value": "x"}]},
        "messages: message 1 has no role; it has from, value. Try fields: {role: from, content: value}, roles: {human: user,",
    ),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages: message 1: role is a number, not the name of a role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages: message 1: role is '', not the name of a role"),
    ({"messages": [{"role": "user"}]}, "messages: message 1 has no content, and no tool_calls; it has role"),
    (
        {"messages": [{"role": "user", "content": None, "tool_calls": []}]},
        "messages: message 1 has no content, and no tool_calls",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages: message 1: content is a number, not a string"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages: message 1: content is an object, not a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "messages: message 1: content has a part of type image: only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]},
        "messages: message 1: content has a part of type image: only",
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages: message 1: content has a part that is no text"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages: message 1: tool_calls is a string, not a list"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": "Rome"}}]}]},
        "messages: message 2: tool_calls: call 2: arguments is a string, and not one of JSON",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "messages: message 1: tool_calls: call 1: arguments is a string of JSON that is a list, not an object such as",
    ),
    ({"messages": [USER], "tools": {}}, "tools is an object, not a list"),
    ({"messages": [USER], "tools": "weather"}, "tools is a string, and not one of JSON"),
    ({"messages": [USER], "tools": ["weather"]}, "tools holds a string: each tool is an object"),
    ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs is a list, not an object"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "is not Unicode ("),
    ({"messages": [{"role": "user", "content": "x", "score": math.nan}]}, "holds what is no JSON (Out of range float values"),
    ({"messages": [{"role": "user", "content": "x", "when": b"y"}]}, "holds what is no JSON ("),
    (["x"], 'is a list, not a record such as {"messages": ...}'),
    ({}, "has no messages; it has nothing"),
    ({"text": "x"}, "has no messages; it has text. Try format: text"),
    (
        {"conversations": [], "id": 1},
        "has no messages; it has conversations, id. Try format: messages, fields: {messages: conversations, role: from, "
        "content: value}, roles: {human: user, gpt: assistant}",
    ),
    ({"prompt": "a", "completion": "b"}, "has no messages; it has completion, prompt. Try format: prompt_completion"),
    (
        {"instruction": "a", "output": "b"},
        "has no messages; it has instruction, output. Try format: prompt_completion, fields: {prompt: instruction, completion: "
        "output}",
    ),
    (
        {"instruction": "a", "input": "", "output": "b"},
        "has no messages; it has input, instruction, output. Its instruction and input are one prompt in two fields:",
    ),
]


@pytest.mark.parametrize(("record", "says"), BAD)
def test_what_is_wrong_with_a_record_is_said_with_what_it_has(record, says):
    assert problem(record).startswith(says)


def test_a_field_that_is_not_used_may_hold_anything():
    assert kept({"messages": [USER], "score": math.nan, "when": b"x", "text": "\ud800"}) == {"messages": [USER]}


def test_token_ids_may_be_strings_of_json_or_numbers_of_any_width():
    check = formats.checker(config.Source(source="x", format="tokens"), labels=True)
    for ids in ([1, 2], "[1, 2]", np.array([1, 2], np.int64), np.array([1, 2], np.uint8)):
        found = check({"input_ids": ids, "labels": "[-100, 2]"})
        assert (found["input_ids"].tolist(), found["labels"].tolist()) == ([1, 2], [-100, 2])
        assert found["input_ids"].dtype == found["labels"].dtype == np.int32


def test_columns_are_called_as_the_user_says():
    source = config.Source(source="x", format="prompt_completion", fields={"prompt": "q", "tools": "functions", "role": "who"})
    found = formats.columns(source, field="data.train.0.source")
    assert (found.required, found.optional) == (("q", "completion"), ("functions", "chat_template_kwargs"))


def test_half_a_pair_is_named_by_the_half_that_is_missing(tmp_path):
    parquet.write_table(pa.table({"prompt": ["x"], "answer": ["y"]}), tmp_path / "a.parquet")
    columns = formats.columns(config.Source(source="x", format="prompt_completion"), field="f.source")
    ((_, record, _),) = files.records(str(tmp_path / "a.parquet"), columns)
    assert problem(record, "prompt_completion") == "has no completion; it has answer, prompt"


def test_weight_and_train_of_a_message_are_0_or_1():
    for fields in ({"weight": 0}, {"weight": 1.0}, {"train": False}, {"train": True}, {"weight": None}):
        kept({"messages": [USER, ASSISTANT | fields]})
    for fields, says in (({"weight": 0.5}, "weight is 0.5: it must be 0"), ({"train": "no"}, "train is 'no': it must be")):
        assert says in problem({"messages": [USER, ASSISTANT | fields]})
    assert "train is true, and only turns of the role assistant" in problem({"messages": [USER | {"train": True}, ASSISTANT]})
    assert "function_call" in kept({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]})["messages"][1]
