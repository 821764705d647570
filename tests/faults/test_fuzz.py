"""Malformed and hostile input: a sample of `python -m tests.faults.fuzz`."""

import os
import pathlib
import random

import pytest

from jaxsp.core.errors import UserError
from jaxsp.data import chat_template, tokenizers
from jaxsp.data.chat import RenderedRecord
from jaxsp.data.tokenizers import TextEncoder
from jaxsp.hf import folder, model_config
from jaxsp.hf.rope import ORIGINAL
from jaxsp.run import config_file, model_files
from tests.faults import fuzz, fuzz_inputs, fuzz_values


@pytest.fixture
def prepared(tmp_path):
    with fuzz.prepared(tmp_path):
        yield


@pytest.mark.parametrize(("kind", "number"), [("configs", 60), ("models", 25), ("data", 20)])
def test_malformed_input_is_accepted_or_refused(prepared, kind, number):
    counts, failures = fuzz.run_cases(kind, number, seed=0)
    assert not failures
    assert counts[fuzz.ACCEPTED] > 0
    assert counts[fuzz.REFUSED] > 0


@pytest.mark.parametrize("case", ["data-11-389", "models-21-1568"])
def test_inputs_that_failed_once_are_refused(prepared, case):
    """An Arrow file with a negative offset, and an adapter of rank 10**400."""
    assert fuzz.run_case(case.partition("-")[0], case) == fuzz.REFUSED


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": [["qwen3"], 1]},
        {"model_type": {"qwen3": None}},
        {"id2label": 7, "architectures": ["Qwen3ForTokenClassification"]},
        {"rope_scaling": YARN | {ORIGINAL: 64}, "head_dim": 2 * 10**400},
        {"rope_scaling": YARN | {ORIGINAL: 10**400}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_json_with_values_of_wrong_types_is_refused_by_name(change):
    fields = fuzz_inputs.batches.SMALL_LLAMA | {"model_type": "qwen3", "head_dim": 8} | change
    model_config.is_reward_model(fields)  # `jaxsp generate` asks before anything is checked
    config = config_file.parse(fuzz_inputs.CONFIG | {"model": {"config": fields}})
    with pytest.raises(UserError) as error:
        model_files.read_model(config)
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"model.config.{list(change)[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "number"),
    [("configs", 2000), ("models", 1000), ("data", 200), ("templates", 50), ("tokenizers", 40)],
)
def test_more_malformed_input_is_accepted_or_refused(prepared, kind, number, seed):
    _, failures = fuzz.run_cases(kind, number, seed=seed)
    assert not failures


@pytest.mark.parametrize("template", fuzz_values.HOSTILE_TEMPLATES, ids=lambda text: text[:20])
def test_hostile_chat_templates_are_refused(prepared, template):
    with pytest.raises(UserError, match=r"chat template|data\.chat_template"):
        fuzz_inputs.render(template + fuzz_inputs.CHATML)


def test_a_hostile_tokenizer_fails_for_the_records_that_it_cannot_read(prepared):
    backend = fuzz_inputs.make_tokenizer(random.Random(0))
    backend |= {"normalizer": None, "pre_tokenizer": fuzz_inputs.split_by("(a+)+$")}
    tokenizer = fuzz_inputs.load_tokenizer(backend, {})
    rendered = [RenderedRecord(text=text) for text in ("ab", "a" * 30 + "b", "ba")]
    encoder = TextEncoder(tokenizer)
    first, second, third = zip(rendered, encoder.tokenize(rendered), strict=True)
    assert [encoder.encode(*pair)[0].tolist() for pair in (first, third)] == [[97, 98], [98, 97]]
    with pytest.raises(UserError, match="the tokenizer fails"):
        encoder.encode(*second)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(prepared, make):
    for name in ("t.jinja", "c.yaml", "folder/config.json", "folder/tokenizer.json"):
        path = pathlib.Path(name)
        path.parent.mkdir(exist_ok=True)
        make(path)
    for read in (
        lambda: chat_template.resolve_template("t.jinja"),
        lambda: config_file.read("c.yaml"),
        lambda: folder.find("./folder"),
        lambda: tokenizers.load("./folder"),
    ):
        with pytest.raises(UserError, match=r"regular file|outside"):
            read()
