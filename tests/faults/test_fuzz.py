"""Malformed and hostile input: each is accepted, or refused by a UserError, in limited time."""

import collections
import os
import pathlib
import random
import signal
import traceback

import pytest

from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data import chat_template, tokenizers
from jaxsp.data.chat import RenderedRecord
from jaxsp.data.tokenizers import TextEncoder
from jaxsp.hf import folder, model_config
from jaxsp.hf.rope import ORIGINAL
from jaxsp.run import config_file, model_files
from tests.faults import fuzz_inputs

pytestmark = pytest.mark.usefixtures("own_cache")

HANG_S = 60
"""CPU time of a case."""


class HungError(BaseException):
    pass


def run_case(kind: str, seed: str) -> str:
    """Runs a case. Returns: accepted, refused, or the traceback of an error or a hang."""

    def stop(*_: object) -> None:
        raise HungError

    old_handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        fuzz_inputs.KINDS[kind](random.Random(seed))
    except UserError as error:
        lines = [x for x in error.problems if len(x) > 10_100 or x != errors.escape(x)]
        return f"{seed}: {lines[0]!a}" if lines else "refused"
    except BaseException:
        return f"{seed}: {traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old_handler)
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("configs", 60), ("models", 25), ("data", 20)),
        *(
            pytest.param(kind, number, marks=pytest.mark.slow)
            for kind, number in [
                *(("configs", 5000), ("models", 2500), ("data", 500)),
                *(("templates", 50), ("tokenizers", 100)),
            ]
        ),
    ],
)
def test_malformed_input_is_accepted_or_refused(kind, number):
    counts = collections.Counter(run_case(kind, f"{kind}-0-{index}") for index in range(number))
    assert not counts.keys() - {"accepted", "refused"}
    assert counts["accepted"] > 0
    assert counts["refused"] > 0


@pytest.mark.parametrize("case", ["data-11-389", "models-21-1568"])
def test_inputs_that_failed_once_are_refused(case):
    """An Arrow file with a negative offset, and an adapter of rank 10**400."""
    assert run_case(case.partition("-")[0], case) == "refused"


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


@pytest.mark.parametrize("template", fuzz_inputs.HOSTILE_TEMPLATES, ids=lambda text: text[:20])
def test_hostile_chat_templates_are_refused(template):
    with pytest.raises(UserError, match=r"chat template|data\.chat_template"):
        fuzz_inputs.render(template + fuzz_inputs.CHATML)


def test_a_hostile_tokenizer_fails_for_the_records_that_it_cannot_read():
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
def test_only_regular_files_are_read(make):
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
