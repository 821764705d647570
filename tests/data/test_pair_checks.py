"""Tests of records of preferences and of unpaired feedback, as they are stored."""

import json
import math
import random

import pytest

from jaxsp.core.errors import UserError, at
from jaxsp.data.data_config import DataConfig
from jaxsp.data.source import FIRST_REFERENCE, IS_DESIRABLE, SECOND_REFERENCE
from tests.data import source_configs
from tests.data.source_configs import make_source
from tests.messages import assert_names, assert_refused

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "ho"}
BAD = {"role": "assistant", "content": "no"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
FEEDBACK = {"prompt": "q", "completion": "a", "label": True}


pytestmark = pytest.mark.usefixtures("own_cache")


def checked(record, format="preference", **fields):
    """Returns the content of a record, and its values by column."""
    source = make_source(source="x", format=format, **fields)
    entry = source.convert(record)
    return json.loads(entry.pop("record")), entry


def kept(record, format="preference", **fields):
    return checked(record, format, **fields)[0]


def problem(record, format="preference", **fields):
    with pytest.raises(UserError) as raised:
        kept(record, format, **fields)
    return str(raised.value)


def read(path, format="unpaired", **fields):
    source = make_source(source=path.name, format=format, **fields)
    data = DataConfig(train=(source,), row_tokens=8, on_bad_record="skip")
    with at("data.train.0.source", path.name):
        return source_configs.read(source, data=data)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_preferences_are_text_or_messages_and_may_have_tools_and_a_system_message():
    assert kept(PAIR | {"other": 1}) == PAIR
    talk = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    extras = {"tools": [TOOL], "chat_template_kwargs": {"a": 1}}
    assert kept(talk | extras) == talk | extras
    system = {"role": "system", "content": "s"}
    implicit = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "system": "s"}
    for record in (talk | {"system": "s"}, implicit):
        assert kept(record) == talk | {"prompt": [system, USER]}
    assert_names(problem(PAIR | {"system": "s"}), "system", "prompt", "ignore_fields")
    renamed = {"question": "q", "response_j": "a", "response_k": "b"}
    fields = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert kept(renamed, fields=fields) == PAIR


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_an_implicit_prompt_is_extracted_as_in_trl(kind):
    data_utils = pytest.importorskip("trl.data_utils", reason="needs trl")
    draw = random.Random(0)
    parts = ["a", " ", "b", "  "] if kind == "text" else [USER, GOOD, BAD]
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
        assert kept(pair) == data_utils.extract_prompt(pair)
        num_compared += 1
    assert num_compared > 50


def test_an_empty_prompt_is_a_prompt_and_an_ignored_one_is_not():
    record = {"prompt": "", "chosen": "same a", "rejected": "same b"}
    assert kept(record) == record
    extracted = {"prompt": "same", "chosen": " a", "rejected": " b"}
    assert kept(record, ignore_fields=("prompt",)) == extracted
    both = {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert_names(problem(both), "prompt", "string", "ignore_fields: [prompt]")
    twice = both | {"prompt": [USER]}
    assert_names(problem(twice), "twice", "ignore_fields: [prompt]")
    for record in (both, twice):
        actual = kept(record, ignore_fields=("prompt",))
        assert actual == {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    make_source(source="x", format="preference", ignore_fields=("prompt", "margin"))


def test_log_probabilities_of_the_reference_are_numbers_or_missing():
    names = ("ref_chosen_logps", "ref_rejected_logps")
    columns = [FIRST_REFERENCE, SECOND_REFERENCE]
    for values in ((-1.5, -2), ("-1.5", "-2"), (None, None), ("", "")):
        _, entry = checked(PAIR | dict(zip(names, values, strict=True)))
        assert list(entry) == columns
        expected = [-1.5, -2.0] if values[0] else [math.nan, math.nan]
        assert list(entry.values()) == pytest.approx(expected, nan_ok=True)
    _, entry = checked(PAIR | {names[0]: "x"}, ignore_fields=names)
    assert all(map(math.isnan, entry.values()))
    for value in (math.nan, math.inf, True, "x", [1.0]):
        message = problem(PAIR | {names[0]: -1.0, names[1]: value})
        assert_names(message, names[1], "finite number")
    for given, missing in (names, names[::-1]):
        assert_names(problem(PAIR | {given: -1.0}), missing, start=f"has {given}")


def test_one_message_is_a_list_of_one():
    talk = {"prompt": [USER], "chosen": GOOD, "rejected": BAD}
    assert kept(talk) == {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    feedback = {"prompt": USER, "completion": BAD, "label": False}
    assert kept(feedback, "unpaired") == {"prompt": [USER], "completion": [BAD]}


def test_preferences_of_openai_are_read():
    answers = {"preferred_output": [GOOD], "non_preferred_output": [BAD]}
    record = {"input": {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": True}}
    expected = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert kept(record | answers) == expected | {"tools": [TOOL]}
    assert kept({"input": json.dumps({"messages": [USER]})} | answers) == expected
    assert_names(problem({"input": "hi"} | answers), "input", "JSON")


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "unpaired"])
def test_preferences_read_as_another_format_are_recognized(format):
    assert_names(problem(PAIR, format), "format: preference")


def test_unpaired_records_read_as_another_format_are_recognized():
    assert_names(problem(FEEDBACK, "messages"), "format: unpaired")
    assert kept(FEEDBACK, "prompt_completion") == {"prompt": "q", "completion": "a"}


def test_a_label_is_true_or_false_also_as_number_and_text():
    for values, expected in (
        ((True, 1, 1.0, "true", "True", "1"), True),
        ((False, 0, 0.0, "false", "FALSE", "0"), False),
    ):
        for value in values:
            content, entry = checked(FEEDBACK | {"label": value}, "unpaired")
            assert content == {"prompt": "q", "completion": "a"}
            assert entry == {IS_DESIRABLE: expected}
    for value in ("good", 2, -1, "", [True], math.nan):
        assert_names(problem(FEEDBACK | {"label": value}, "unpaired"), "label", "true", "false")


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
