"""Prompts and references of samples, text while tokens arrive, and limits of prompts."""

import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data import dataset, tokenizers
from jaxsp.generation import generator
from jaxsp.run import config_file, model_files
from jaxsp.run.generate_command import TextStream
from tests import batches


def select(tokens, loss_spans, *, limit=64, new=8):
    """The sample of one document. Args: loss_spans: ranges of tokens that have a loss."""
    labels = np.full(len(tokens), NO_LABEL, np.int32)
    for begin, end in loss_spans:
        labels[begin:end] = tokens[begin:end]
    data = dataset.pack_arrays(
        "x", [np.array(tokens)], [labels], **batches.make_config().step.packing
    )
    (sample,) = generator.select_samples(data.documents, 3, limit, new)
    return sample


TOKENS = list(range(100, 140))


def test_a_prompt_ends_before_the_first_loss_token_and_a_reference_where_the_answer_ends():
    sample = select(TOKENS, [(10, 14), (20, 25)])
    assert sample == generator.Sample(TOKENS[:10], TOKENS[10:14])
    assert select(TOKENS, [(10, 30)]).reference == TOKENS[10:18], "as long as an answer"
    assert select(TOKENS, [(10, 30)], limit=4).prompt == TOKENS[6:10], "it keeps the end"
    assert select(TOKENS, [(36, 40)]).reference == TOKENS[36:]


def test_plain_text_is_divided_in_the_middle():
    assert select(TOKENS, [(0, 40)]) == generator.Sample(TOKENS[:20], TOKENS[20:28])
    assert select(TOKENS[:2], [(0, 2)]) == generator.Sample(TOKENS[:1], TOKENS[1:2])


def test_text_comes_as_soon_as_its_characters_are_complete():
    tokenizer = tokenizers.make_byte_tokenizer()
    stream = TextStream(tokenizer)
    parts = [stream.add(byte) for byte in "a é€\n".encode()]
    assert parts == ["a", " ", "", "é", "", "", "€", "\n"]
    assert [stream.add(0xC3), stream.add(256)] == ["", ""]
    assert stream.finish() == "\ufffd", "a character that never ends, without the end token"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], "generate_samples = 2: needs an eval set"),
        (
            [
                *("objective.type=reward", "data.train.0.format=preference"),
                "data.eval=[{source: a.jsonl, format: preference}]",
            ],
            "generate_samples = 2: .*objective.type = reward",
        ),
    ],
)
def test_samples_need_an_eval_set_and_a_model_that_generates(changes, expected):
    fields = batches.make_config().model_dump(mode="json", exclude_unset=True)
    with pytest.raises(UserError, match=expected):
        config_file.parse(fields, ["run.generate_samples=2", *changes])


def test_generation_stops_at_the_tokens_of_both_configs_and_of_the_tokenizer(tmp_path):
    tokenizer = tokenizers.make_byte_tokenizer()
    fields = {"eos_token_id": [7, 8]}
    assert model_files.list_stop_ids(fields, tmp_path, tokenizer) == [7, 8, 256]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert model_files.list_stop_ids(fields, tmp_path, tokenizer) == [7, 8, 9, 256]
    assert fields == {"eos_token_id": [7, 8]}
    assert model_files.list_stop_ids({}, None, None) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, {}]}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id = \[9, \{\}\]: "):
        model_files.list_stop_ids(fields, tmp_path, tokenizer)
