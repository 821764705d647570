"""Tests of ids and labels against TRL's SFTTrainer, for the same records and templates."""

import json
import types

import datasets
import pytest

from jaxsp.core.errors import UserError
from jaxsp.data import chat
from jaxsp.data.chat import ChatOptions
from tests.data import chats

sft_trainer = pytest.importorskip(
    "trl.trainer.sft_trainer", reason="needs trl: pip install 'jaxsp[test]' on Python 3.11"
)
chat_template_utils = pytest.importorskip("trl.chat_template_utils", reason="needs trl, as above")


def theirs(records, tokenizer, *, messages):
    """Returns ids and labels from SFTTrainer's own preparation of a data set."""
    trainer = types.SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss=not messages, chat_template=None
    )
    config = types.SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=messages,
        max_length=None,
        shuffle_dataset=False,
    )
    new_tokenizer = sft_trainer.SFTTrainer._prepare_dataset(
        trainer,
        datasets.Dataset.from_list(records, on_mixed_types="use_json"),
        tokenizer,
        config,
        False,
        None,
        "train",
    )
    return [(row["input_ids"], row["labels"]) for row in new_tokenizer]


def ours(records, tokenizer, template=None):
    options = ChatOptions(tokenizer=tokenizer, template=template, has_full_loss=False)
    rendered = [chat.render_record(chats.store(record), options)[0] for record in records]
    return [
        (tokens.tolist(), labels.tolist()) for tokens, labels in chats.encode(rendered, tokenizer)
    ]


@pytest.fixture
def tokenizer():
    new_tokenizer = chats.tokenizer()
    new_tokenizer.chat_template = chats.MARKED
    return new_tokenizer


def test_conversations(tokenizer):
    records = [{"messages": messages} for messages in chats.conversations(50)]
    expected = theirs(records, tokenizer, messages=True)
    assert ours(records, tokenizer) == expected
    assert ours(records, tokenizer, chats.CHATML) == expected, "derived without marks"


def test_prompts_and_completions_of_messages(tokenizer):
    records = []
    for messages in chats.conversations(50):
        border = (
            max(number for number, message in enumerate(messages) if message["role"] == "user") + 1
        )
        records.append({"prompt": messages[:border], "completion": messages[border:]})
    assert ours(records, tokenizer) == theirs(records, tokenizer, messages=False)


@pytest.mark.parametrize("begins", [False, True])
def test_prompts_and_completions_of_text(tokenizer, begins):
    """Also where a token holds the end of the prompt and the beginning of the completion."""
    from tokenizers import processors

    if begins:
        post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.backend_tokenizer.post_processor = post
    texts = [
        message["content"]
        for messages in chats.conversations(30, alternating=True)
        for message in messages
    ]
    records = [{"prompt": a, "completion": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    records += [
        {"prompt": "an ", "completion": "answer"},
        {"prompt": "", "completion": "x"},
        {"prompt": "x", "completion": ""},
    ]
    records += [{"prompt": "x\n", "completion": "\ny"}, {"prompt": "x", "completion": "y</s>"}]
    new_tokenizer = ours(records, tokenizer)
    assert new_tokenizer == theirs(records, tokenizer, messages=False)
    assert (new_tokenizer[0][0][0] == tokenizer.bos_token_id) == begins


@pytest.mark.parametrize(
    "name", ["qwen3_instruct_2507", "llama3", "gemma", "gemma3", "cohere", "lfm2"]
)
def test_the_inferred_mask_of_a_template_equals_that_of_its_marked_version(name):
    """TRL has both templates of each model.

    Qwen 2.5 is left out: its marks include the line break of the header, which is in the prompt.
    """
    plain, marked = (
        (chat_template_utils._CHAT_TEMPLATES_DIR / f"{name}{kind}.jinja").read_text()
        for kind in ("", "_training")
    )
    tokenizer = chats.tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|START_OF_TURN_TOKEN|>",
                "<|CHATBOT_TOKEN|>",
                "<|USER_TOKEN|>",
                "<|END_OF_TURN_TOKEN|>",
            ]
        }
    )
    records = [{"messages": messages} for messages in chats.conversations(20, alternating=True)]
    tokenizer.chat_template = marked
    assert ours(records, tokenizer, plain) == theirs(records, tokenizer, messages=True)


TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "one answer"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]


TEMPLATES = sorted(chat_template_utils._CHAT_TEMPLATES_DIR.glob("*.jinja"))


MARKED = [path for path in TEMPLATES if path.stem.endswith("_training")]


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_the_marks_of_every_trl_template_are_accepted(tokenizer, path):
    if path.stem.startswith(("idefics3", "llava_next", "smolvlm")):
        pytest.skip("this template does not accept text contents")
    tokenizer.chat_template = path.read_text().replace('strftime_now("%Y-%m-%d")', "'2026-01-01'")
    records = [{"messages": TALK}, {"messages": TALK[:2]}]
    for (_, mine), (_, labels) in zip(
        ours(records, tokenizer), theirs(records, tokenizer, messages=True), strict=True
    ):
        # only the labels: one template writes today's date in its prompt
        assert [label for label in mine if label >= 0] == [label for label in labels if label >= 0]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", None])
def test_qwen3s_template_drops_the_thinking_of_earlier_answers_and_trls_keeps_it(tokenizer, field):
    answers = [
        {"role": "assistant", "content": f"a{number}", field: f"hm{number}"}
        if field
        else {"role": "assistant", "content": f"<think>\nhm{number}\n</think>\n\na{number}"}
        for number in range(2)
    ]
    record = {"messages": [TALK[0], answers[0], TALK[0], answers[1]]}
    plain, kept = (
        (chat_template_utils._CHAT_TEMPLATES_DIR / f"{name}.jinja").read_text()
        for name in ("qwen3", "qwen3_training")
    )
    with pytest.raises(UserError, match=r"message 2.*data\.earlier_reasoning=no_loss"):
        ours([record], tokenizer, plain)
    ((_, labels),) = ours([record], tokenizer, kept)
    learned = tokenizer.decode([label for label in labels if label >= 0])
    assert "hm0" in learned
    assert "hm1" in learned


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5",
        "qwen2_5_training",
        "qwen3",
        "llama3_1",
        "llama3_2",
        "gptoss_training",
        "lfm2_v2",
        "gemma4",
    ],
)
def test_arguments_given_as_a_string_are_not_written_as_json_twice(tokenizer, name):
    template = (chat_template_utils._CHAT_TEMPLATES_DIR / f"{name}.jinja").read_text()
    template = template.replace('strftime_now("%Y-%m-%d")', "'2026-01-01'")
    call = chats.CALL["function"] | {"arguments": json.dumps(chats.CALL["function"]["arguments"])}
    results = []
    for calls in ([chats.CALL], [{**chats.CALL, "function": call}]):
        messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}]
        results.append(ours([{"messages": messages}], tokenizer, template))
    assert results[0] == results[1]
