"""Tests of formats: the stored content of a record, and the problems of records that do not fit."""

import contextlib
import json
import math
import random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxsp.core.errors import UserError, at
from jaxsp.data import file_types as files
from jaxsp.data import sources
from jaxsp.data.data_config import FORMAT, DataConfig
from jaxsp.data.source import FIRST_REFERENCE, IS_DESIRABLE, SECOND_REFERENCE
from tests.data import source_configs
from tests.data.source_configs import make_source
from tests.messages import assert_names, assert_refused

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "ho"}

CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "when": None}},
}

CALLED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def kept(record, format="messages", **fields):
    source = make_source(source="x", format=format, **fields)
    return json.loads(source.convert(record)["record"])


def problem(record, format="messages", **fields):
    with pytest.raises(UserError) as raised:
        kept(record, format, **fields)
    return str(raised.value)


def test_a_record_keeps_only_fields_that_a_template_may_use():
    messages = [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLED], "reasoning_content": "why"},
        {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "22"},
        ASSISTANT,
    ]
    record = {
        "messages": messages,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
        "id": 7,
    }
    expected = [dict(message) for message in messages]
    del expected[2]["content"]
    assert kept(record) == {
        "messages": expected,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert kept({"messages": [USER | {"tool_calls": []}], "tools": []}) == {"messages": [USER]}


def test_arguments_of_a_call_may_be_a_string_of_json():
    """OpenAI writes them so. A null in them is data, not filled in by a table."""
    given = '{"city": "Rome", "when": null, "at": [{"x": null}]}'
    expected = {"city": "Rome", "when": None, "at": [{"x": None}]}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}
    record = {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    call,
                    {"name": "f", "arguments": "{}"},
                    CALL,
                    {"name": "g"},
                    {"function": {"name": "h", "arguments": None}},
                    {"function": {"name": "i", "arguments": " "}},
                    {"type": "custom"},
                ],
            },
        ]
    }
    assert kept(record)["messages"][1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": expected}},
        {"name": "f", "arguments": {}},
        CALL,
        {"name": "g", "arguments": {}},
        {"function": {"name": "h", "arguments": {}}},
        {"function": {"name": "i", "arguments": {}}},
        {"type": "custom"},
    ]


def test_nulls_that_lines_of_json_hold_are_kept(tmp_path):
    """Nulls in arguments and tools are data; a null field of a message counts as missing."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    lines = {"role": "assistant", "content": None, "tool_calls": [{"id": None, **CALL}]}
    record = {
        "messages": [USER, lines],
        "tools": [tool],
        "chat_template_kwargs": {"a": None, "b": 1},
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    columns = make_source(source="x", format="messages").select_columns
    ((_, line, _),) = files.read_file(str(tmp_path / "a.jsonl"), columns)
    assert kept(line) == {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}],
        "tools": [tool],
        "chat_template_kwargs": {"b": 1},
    }
    json_table = pa.table(
        {name: pa.array([json.dumps(value)], pa.json_()) for name, value in record.items()}
    )
    parquet.write_table(json_table, tmp_path / "a.parquet")
    ((_, row, _),) = files.read_file(str(tmp_path / "a.parquet"), columns)
    assert kept(row) == kept(line)


def test_fields_and_roles_are_renamed():
    record = {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
        "functions": [TOOL],
    }
    actual = kept(
        record,
        fields={
            "messages": "conversations",
            "role": "from",
            "content": "value",
            "tools": "functions",
        },
        roles={"human": "user", "gpt": "assistant"},
    )
    assert actual == {"messages": [USER, ASSISTANT], "tools": [TOOL]}
    both = {"role": "other", "from": "human", "value": "hi"}
    assert kept({"messages": [both]}, fields={"role": "from", "content": "value"})["messages"][
        0
    ] == {"role": "human", "content": "hi"}


def test_conversations_and_tools_may_be_strings_of_json():
    record = {
        "messages": json.dumps([USER, ASSISTANT]),
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": '{"a": 1}',
    }
    assert kept(record) == {
        "messages": [USER, ASSISTANT],
        "tools": [TOOL],
        "chat_template_kwargs": {"a": 1},
    }
    assert kept({"messages": json.dumps([USER]), "tools": "", "chat_template_kwargs": ""}) == {
        "messages": [USER]
    }


def test_prompt_and_completion_are_both_text_or_both_messages():
    for prompt, completion in (("a", "b"), ([USER], [ASSISTANT]), ("", "b")):
        record = {"prompt": prompt, "completion": completion}
        assert kept(record | {"other": 1}, "prompt_completion") == record
    mixed = {"prompt": "a", "completion": [ASSISTANT]}
    assert_names(problem(mixed, "prompt_completion"), "prompt", "string", "completion", "messages")


BAD = [
    ({"messages": [{"role": "user", "content": "\ud800"}]}, ["Unicode"]),
    (
        {"messages": [{"role": "user", "content": "x", "score": math.nan}]},
        ["JSON", "Out of range float values"],
    ),
    ({"messages": [{"role": "user", "content": "x", "when": b"y"}]}, ["JSON", "bytes"]),
]


@pytest.mark.parametrize(("record", "parts"), BAD)
def test_a_problem_names_the_fields_of_the_record(record, parts):
    assert_names(problem(record), *parts)


def test_token_ids_may_be_strings_of_json_or_numbers_of_any_width():
    source = make_source(source="x", format="tokens")
    for ids in ([1, 2], "[1, 2]", np.array([1, 2], np.int64), np.array([1, 2], np.uint8)):
        record = {"input_ids": ids, "labels": "[-100, 2]"}
        actual = source.convert(record)
        assert (actual["input_ids"].tolist(), actual["labels"].tolist()) == ([1, 2], [-100, 2])
        assert actual["input_ids"].dtype == actual["labels"].dtype == np.int32


NO_LOSS = [
    {"weight": 0},
    {"weight": 0.0},
    {"train": False},
    {"training": False},
    {"loss": False},
    {"loss_mask": 0},
    {"loss_scale": 0.0},
    {"masked": True},
    {"weight": 1, "train": False},
]


def test_flags_of_all_systems_give_a_message_no_loss():
    for flags in NO_LOSS:
        (user, answer) = kept({"messages": [USER, ASSISTANT | flags]})["messages"]
        assert (user, answer) == (USER, ASSISTANT | {"weight": 0}), flags
        others = {
            name: type(value)(name != "weight" and not value) for name, value in flags.items()
        }
        others["weight"] = 1
        assert kept({"messages": [USER, ASSISTANT | others]})["messages"][1] == ASSISTANT
    assert kept({"messages": [USER | {"weight": 1}, ASSISTANT | {"loss": None}]}) == {
        "messages": [USER, ASSISTANT]
    }
    ignored = kept({"messages": [USER, ASSISTANT | {"loss": 7.5}]}, ignore_fields=("loss",))
    assert ignored["messages"][1] == ASSISTANT
    call = {"role": "assistant", "function_call": {"name": "f"}}
    assert "function_call" in kept({"messages": [USER, call]})["messages"][1]


@pytest.mark.parametrize("flag", [{"train": True}, {"loss": 1}, {"masked": False}])
def test_a_loss_on_a_message_of_the_user_is_refused(flag):
    of_user = problem({"messages": [USER | flag, ASSISTANT]})
    assert_names(of_user, "message 1", *flag, "assistant", "data.train_on=all")


SYSTEM = {"role": "system", "content": "Speak French."}


def test_a_system_text_beside_the_messages_is_their_first_message():
    talk = {"messages": [SYSTEM, USER, ASSISTANT]}
    for name in ("system", "system_prompt"):
        assert kept({"messages": [USER, ASSISTANT], name: "Speak French."}) == talk
        assert kept(talk | {name: "Speak French."}) == talk
        assert kept(talk | {name: ""}) == talk
        assert kept(talk | {name: "Other."}, ignore_fields=(name,)) == talk
        assert_names(problem(talk | {name: "Other."}), name, "system message")
        assert_names(problem(talk | {name: 3}), name, "string")
        both = {"prompt": [USER], "completion": [ASSISTANT], name: "Speak French."}
        assert kept(both, "prompt_completion")["prompt"] == [SYSTEM, USER]
        text = {"prompt": "a", "completion": "b", name: "Speak French."}
        assert_names(problem(text, "prompt_completion"), name, "prompt", "ignore_fields")
        mapped = {"prompt": name, "completion": "completion"}
        del text["prompt"]
        assert kept(text, "prompt_completion", fields=mapped)["prompt"] == "Speak French."
    assert_names(problem(talk | {"system": "a", "system_prompt": "b"}), "system", "system_prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("history", [["q", "a"]]),
        ("documents", ["d"]),
        ("images", [{"path": "a.png"}]),
        ("loss_mask", np.array([1, 0])),
    ],
)
def test_a_field_that_would_change_training_is_refused_by_name(name, value):
    for record, format in (
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
    ):
        assert_names(problem(record | {name: value}, format), name, f"ignore_fields: [{name}]")
        for empty in (None, [], "", np.zeros(0)):
            assert kept(record | {name: empty}, format) == record
        assert kept(record | {name: value}, format, ignore_fields=(name,)) == record


ANSWERS = {"chosen": "The Loire.", "rejected": "Water flows."}

RECORDS = {
    "text": {"text": "a b"},
    "messages": {"messages": [USER, ASSISTANT]},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "preference": ANSWERS,
    "unpaired": {"prompt": "a", "completion": "b", "label": True},
    "tokens": {"input_ids": [1, 2]},
    "trajectories": {
        "input_ids": [1, 2],
        "loss_mask": [0, 1],
        "advantages": 0.5,
        "old_logps": [-1.0],
    },
}
"""A record of each format."""


def checked(record, format, **fields):
    """Returns the content that is stored of a record of any format."""
    source = make_source(source="x", format=format, **fields)
    content = source.convert(record)
    return next(iter(content.values()))


@pytest.mark.parametrize("format", FORMAT.by_name())
def test_text_that_nothing_reads_is_refused_by_name_in_every_format(format):
    record = RECORDS[format]
    expected = checked(record, format)
    for name, value in (
        ("passage", "It rains."),
        ("query", "Why?"),
        ("input", "17"),
        ("\u95ee\u9898", "\u6cd5\u56fd\u6709\u54ea\u4e9b\u6cb3\u6d41"),
        ("turns", [{"value": "It rains."}]),
        ("pairs", [["why", "It rains."]]),
    ):
        with assert_refused(name, f"ignore_fields: [{name}]"):
            checked(record | {name: value}, format)
        ignored = checked(record | {name: value}, format, ignore_fields=(name,))
        assert np.array_equal(ignored, expected)
    metadata = {
        "id": "a b",
        "promptId": "x y",
        "data_source": "Stack Exchange",
        "url": "https://a b",
        "created_date": "1 May 2026",
        "hexsha": "0a1b",
        "rated": "good",
        "seen": "2026-05-01 10:00:00",
        "stars": 7,
        "is_new": True,
        "notes": " ",
        "others": [],
        "more": None,
        "numbers": [1.5, [2]],
        "meta": {"comment": "Not checked."},
    }
    assert np.array_equal(checked(record | metadata, format), expected)


def test_a_text_that_the_conversation_has_too_may_be_in_another_field():
    talk = {"messages": [USER | {"content": "Why so?"}, ASSISTANT]}
    assert kept(talk | {"prompt": "Why so?"}) == talk
    assert_names(problem(talk | {"prompt": "Why?"}), "prompt")
    assert_names(problem(talk | {"answer": ASSISTANT["content"]}), "answer")


def test_texts_of_several_fields_are_joined_with_a_line_break():
    alpaca = {"instruction": "Say it.", "input": "in Rome", "output": "b", "text": ""}
    joined = {"prompt": "Say it.\nin Rome", "completion": "b"}
    assert kept(alpaca, "prompt_completion") == joined
    for empty in ({"input": ""}, {"input": None}):
        expected = joined | {"prompt": "Say it."}
        assert kept(alpaca | empty, "prompt_completion") == expected
    del alpaca["input"]
    assert kept(alpaca, "prompt_completion") == expected
    with_system = {"prompt": ["system", "instruction"]}
    actual = kept(alpaca | {"system": "Hi."}, "prompt_completion", fields=with_system)
    assert actual["prompt"] == "Hi.\nSay it."
    assert_names(problem(alpaca | {"input": 3}, "prompt_completion"), "input", "strings")
    both = {"text": ["title", "body"]}
    assert checked({"title": "T", "body": "B"}, "text", fields=both) == "T\nB"
    with pytest.raises(UserError, match="title \\+ body"):
        checked({"summary": "It rains."}, "text", fields=both)


@pytest.mark.usefixtures("own_cache")
def test_an_optional_field_that_no_record_has_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, {"input_ids": [1, 2], "goals": [1, 2]})
    for name, refusal in (("goals", contextlib.nullcontext()), ("goal", assert_refused("goal"))):
        source = make_source(source=str(path), format="tokens", fields={"labels": name})
        data = DataConfig(train=(source,), row_tokens=8)
        with refusal:
            assert len([*sources.read(source, data=data).entries()]) == 1


def test_a_role_that_no_message_has_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, {"messages": json.dumps([{"role": "gpt", "content": "ho"}])})
    for name, refusal in (("gpt", contextlib.nullcontext()), ("gptt", assert_refused("gptt"))):
        source = make_source(source=str(path), format="messages", roles={name: "assistant"})
        data = DataConfig(train=(source,), row_tokens=8)
        with refusal:
            assert len([*sources.read(source, data=data).entries()]) == 1


def test_tables_are_read_with_the_columns_that_may_hold_text(tmp_path):
    row = {"instruction": "a", "input": "c", "output": "b", "vector": [1.5], "the_id": "x y"}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    source = make_source(source="a.parquet", format="prompt_completion")
    data = DataConfig(train=(source,), row_tokens=8)
    (entry,) = source_configs.read(source, data=data)
    assert json.loads(entry["record"]) == {"prompt": "a\nc", "completion": "b"}
    names = ["prompt_id", "query", *row]
    assert source.select_columns(names) == ["query", *[*row][:-1]]


IDS = {"input_ids": [10, 11, 12, 13]}


def checked_tokens(record, **fields):
    source = make_source(source="x", format="tokens", **fields)
    actual = source.convert(IDS | record)
    return {name: ids.tolist() for name, ids in actual.items()}


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_mask_of_tokens_limits_their_loss(name):
    for mask in ([0, 0, 1, 1], "[0, 0, 1, 1]", np.array([0, 0, 1, 1], np.uint8)):
        assert checked_tokens({name: mask})["labels"] == [-100, -100, 12, 13]
    both = {name: [0, 0, 1, 1], "labels": [-100, 11, 12, -100]}
    assert checked_tokens(both)["labels"] == [-100, -100, 12, -100]
    for mask in ([0, 1], [0, 0, 1, 2], [[0, 0, 1, 1]]):
        with pytest.raises(UserError, match=f"{name}.* 4 "):
            checked_tokens({name: mask})


def test_padding_at_either_end_of_tokens_is_dropped():
    for mask, content in (
        ([1, 1, 1, 1], slice(0, 4)),
        ([1, 1, 0, 0], slice(0, 2)),
        ([0, 1, 1, 0], slice(1, 3)),
        ([0, 0, 0, 0], slice(0, 0)),
    ):
        expected = IDS["input_ids"][content]
        padded = {"attention_mask": mask, "completion_mask": [1, 1, 0, 1]}
        labels = [10, 11, -100, 13][content]
        assert checked_tokens(padded) == {"input_ids": expected, "labels": labels}
    left = {"attention_mask": [0, 0, 1, 1], "position_ids": [1, 1, 0, 1], "seq_lengths": [2]}
    assert checked_tokens(left) == {"input_ids": [12, 13]}


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_mask": [1, 0, 1, 1]},
        {"attention_mask": [1, 1, 2, 2]},
        {"seq_lengths": [2, 2]},
        {"seq_lengths": [3]},
        {"position_ids": [0, 1, 0, 1]},
        {"position_ids": [0, 0, 0, 1]},
        {"images": ["a.png"]},
    ],
)
def test_tokens_of_several_documents_are_refused(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        checked_tokens(fields)
    ignored = checked_tokens(fields, ignore_fields=tuple(fields))
    assert ignored == IDS


GOOD = ASSISTANT
REJECTED = {"role": "assistant", "content": "no"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
FEEDBACK = {"prompt": "q", "completion": "a", "label": True}


pytestmark = pytest.mark.usefixtures("own_cache")


def checked_pair(record, format="preference", **fields):
    """Returns the content of a record, and its values by column."""
    source = make_source(source="x", format=format, **fields)
    entry = source.convert(record)
    return json.loads(entry.pop("record")), entry


def kept_pair(record, format="preference", **fields):
    return checked_pair(record, format, **fields)[0]


def fault(record, format="preference", **fields):
    with pytest.raises(UserError) as raised:
        kept_pair(record, format, **fields)
    return str(raised.value)


def read(path, format="unpaired", **fields):
    source = make_source(source=path.name, format=format, **fields)
    data = DataConfig(train=(source,), row_tokens=8, on_bad_record="skip")
    with at("data.train.0.source", path.name):
        return source_configs.read(source, data=data)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_preferences_are_text_or_messages_and_may_have_tools_and_a_system_message():
    assert kept_pair(PAIR | {"other": 1}) == PAIR
    talk = {"prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]}
    extras = {"tools": [FUNCTION], "chat_template_kwargs": {"a": 1}}
    assert kept_pair(talk | extras) == talk | extras
    system = {"role": "system", "content": "s"}
    implicit = {"chosen": [USER, GOOD], "rejected": [USER, REJECTED], "system": "s"}
    for record in (talk | {"system": "s"}, implicit):
        assert kept_pair(record) == talk | {"prompt": [system, USER]}
    assert_names(fault(PAIR | {"system": "s"}), "system", "prompt", "ignore_fields")
    renamed = {"question": "q", "response_j": "a", "response_k": "b"}
    fields = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert kept_pair(renamed, fields=fields) == PAIR


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_an_implicit_prompt_is_extracted_as_in_trl(kind):
    data_utils = pytest.importorskip("trl.data_utils", reason="needs trl")
    draw = random.Random(0)
    parts = ["a", " ", "b", "  "] if kind == "text" else [USER, GOOD, REJECTED]
    num_compared = 0
    for _ in range(300):
        pair = {}
        for name in ("chosen", "rejected"):
            items = draw.choices(parts, k=draw.randint(2, 5))
            pair[name] = "".join(items) if kind == "text" else items
        if pair["chosen"] == pair["rejected"]:
            continue
        if pair["chosen"][0] != pair["rejected"][0]:  # TRL then reads the last character
            continue
        assert kept_pair(pair) == data_utils.extract_prompt(pair)
        num_compared += 1
    assert num_compared > 50


def test_an_empty_prompt_is_a_prompt_and_an_ignored_one_is_not():
    record = {"prompt": "", "chosen": "same a", "rejected": "same b"}
    assert kept_pair(record) == record
    extracted = {"prompt": "same", "chosen": " a", "rejected": " b"}
    assert kept_pair(record, ignore_fields=("prompt",)) == extracted
    both = {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, REJECTED]}
    assert_names(fault(both), "prompt", "string", "ignore_fields: [prompt]")
    twice = both | {"prompt": [USER]}
    assert_names(fault(twice), "twice", "ignore_fields: [prompt]")
    for record in (both, twice):
        actual = kept_pair(record, ignore_fields=("prompt",))
        assert actual == {"prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]}
    make_source(source="x", format="preference", ignore_fields=("prompt", "margin"))


def test_log_probabilities_of_the_reference_are_numbers_or_missing():
    names = ("ref_chosen_logps", "ref_rejected_logps")
    columns = [FIRST_REFERENCE, SECOND_REFERENCE]
    for values in ((-1.5, -2), ("-1.5", "-2"), (None, None), ("", "")):
        _, entry = checked_pair(PAIR | dict(zip(names, values, strict=True)))
        assert list(entry) == columns
        expected = [-1.5, -2.0] if values[0] else [math.nan, math.nan]
        assert list(entry.values()) == pytest.approx(expected, nan_ok=True)
    _, entry = checked_pair(PAIR | {names[0]: "x"}, ignore_fields=names)
    assert all(map(math.isnan, entry.values()))
    for value in (math.nan, math.inf, True, "x", [1.0]):
        message = fault(PAIR | {names[0]: -1.0, names[1]: value})
        assert_names(message, names[1], "finite number")
    for given, missing in (names, names[::-1]):
        assert_names(fault(PAIR | {given: -1.0}), missing, start=f"has {given}")


def test_one_message_is_a_list_of_one():
    talk = {"prompt": [USER], "chosen": GOOD, "rejected": REJECTED}
    assert kept_pair(talk) == {"prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]}
    feedback = {"prompt": USER, "completion": REJECTED, "label": False}
    assert kept_pair(feedback, "unpaired") == {"prompt": [USER], "completion": [REJECTED]}


def test_preferences_of_openai_are_read():
    answers = {"preferred_output": [GOOD], "non_preferred_output": [REJECTED]}
    record = {"input": {"messages": [USER], "tools": [FUNCTION], "parallel_tool_calls": True}}
    expected = {"prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]}
    assert kept_pair(record | answers) == expected | {"tools": [FUNCTION]}
    assert kept_pair({"input": json.dumps({"messages": [USER]})} | answers) == expected
    assert_names(fault({"input": "hi"} | answers), "input", "JSON")


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "unpaired"])
def test_preferences_read_as_another_format_are_recognized(format):
    assert_names(fault(PAIR, format), "format: preference")


def test_unpaired_records_read_as_another_format_are_recognized():
    assert_names(fault(FEEDBACK, "messages"), "format: unpaired")
    assert kept_pair(FEEDBACK, "prompt_completion") == {"prompt": "q", "completion": "a"}


def test_a_label_is_true_or_false_also_as_number_and_text():
    for values, expected in (
        ((True, 1, 1.0, "true", "True", "1"), True),
        ((False, 0, 0.0, "false", "FALSE", "0"), False),
    ):
        for value in values:
            content, entry = checked_pair(FEEDBACK | {"label": value}, "unpaired")
            assert content == {"prompt": "q", "completion": "a"}
            assert entry == {IS_DESIRABLE: expected}
    for value in ("good", 2, -1, "", [True], math.nan):
        assert_names(fault(FEEDBACK | {"label": value}, "unpaired"), "label", "true", "false")


@pytest.mark.parametrize("num_records", [2, 3, 20])
def test_a_record_has_the_completion_of_the_next_usable_one_and_the_last_that_of_the_first(
    tmp_path, num_records
):
    draw = random.Random(num_records)
    usable = [
        {"prompt": f"q{number}", "completion": f"a{number}", "label": number % 2}
        for number in range(num_records)
    ]
    records = [
        each for record in usable for each in (*[{"prompt": "bad"}] * draw.randint(0, 2), record)
    ]
    records += [{"prompt": "bad"}] * 2
    write(tmp_path / "a.jsonl", *records)
    entries = list(read(tmp_path / "a.jsonl"))
    assert [entry["place"] for entry in entries] == [
        f"a.jsonl, line {number}" for number in range(1, len(records) + 1)
    ]
    good = [json.loads(entry["record"]) for entry in entries if entry["problem"] is None]
    assert [record["completion"] for record in good] == [record["completion"] for record in usable]
    rotated = [record["completion"] for record in usable[1:] + usable[:1]]
    assert [record["mismatched_completion"] for record in good] == rotated


def test_one_record_or_a_mixture_of_text_and_messages_has_no_mismatched_completions(tmp_path):
    bad = {"prompt": "q"}
    write(tmp_path / "one.jsonl", bad, FEEDBACK, bad)
    with assert_refused("line 2", "two", start="data.train.0.source = one.jsonl: "):
        read(tmp_path / "one.jsonl")
    talk = {"prompt": [USER], "completion": [GOOD], "label": False}
    write(tmp_path / "mixed.jsonl", FEEDBACK, bad, talk, talk)
    with pytest.raises(UserError) as raised:
        read(tmp_path / "mixed.jsonl")
    parts = ("line 1", "line 3", "text", "messages", "two sources")
    assert_names(raised.value, *parts, start="data.train.0.source = mixed.jsonl: ")


def test_csv_has_labels_and_log_probabilities_as_text(tmp_path):
    lines = ["prompt,completion,label", 'q,"a, b",true', "r,c,0"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    entries = list(read(tmp_path / "a.csv"))
    assert [entry[IS_DESIRABLE] for entry in entries] == [True, False]
    assert json.loads(entries[1]["record"])["mismatched_completion"] == "a, b"
    header = "prompt,chosen,rejected,ref_chosen_logps,ref_rejected_logps"
    (tmp_path / "b.csv").write_text(f"{header}\nq,a,b,-1,-2.5\nr,c,d,,\n")
    entries = list(read(tmp_path / "b.csv", "preference"))
    first, second = ([entry[name] for entry in entries] for name in list(entries[0])[-2:])
    assert (first[0], second[0]) == (-1.0, -2.5)
    assert all(map(math.isnan, (first[1], second[1])))
