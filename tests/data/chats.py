"""Conversations, chat templates of several kinds, and tokenizers for tests."""

import json
import random
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxsp.data.tokenizers import TextEncoder
from tests.data.source_configs import make_source


def store(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record as the cache of the source stores it, without null fields."""
    formats_by_field = {
        "messages": "messages",
        "chosen": "preference",
        "label": "unpaired",
        "prompt": "prompt_completion",
    }
    name = next(name for field, name in formats_by_field.items() if field in record)
    source = make_source(source="unused", format=name)
    return json.loads(source.convert(record)["record"])


_END = """{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
"""End of a message, and of a text, in ChatML."""

CHATML = (
    """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
"""
    + _END
)

MARKED = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

HEADERS = """{{- bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'
   + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""
"""Template like Llama 3's: contents are trimmed, and no line break follows the end token."""

INST = """{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ ' ' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '[TOOL_CALLS]' + (call.function | tojson) }}
{%- endfor -%}
{{ eos_token }}
{%- elif message.role in ('user', 'system', 'tool') -%}
{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else -%}
{{ raise_exception('Only user, system, tool and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}"""
"""Template like Mistral's: no header, so that the generation prompt is empty."""

TURNS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n'
   + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""
"""Template like Gemma's: another name for the assistant, alternating roles, no system message."""

CHANNELS = """{{- bos_token }}
{%- for message in messages -%}
{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
{{ (message.content or '') | trim }}
{{- '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif -%}"""
"""Template like Gemma 4's: a prompt ends with an empty channel, which messages do not have."""

MARKERS = """{{- '[gMASK]<sop>' }}
{%- for message in messages -%}
{%- set role = 'observation' if message.role == 'tool' else message.role -%}
{{ '<|' + role + '|>' + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
"""Template like GLM-4's: role markers are special tokens, and no end token follows a message."""

THINKING = (
    """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content or '' -%}
{%- set thought = '' -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}
{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ content }}
"""
    + _END
)
"""Template like Qwen3's: only messages after the last user message keep their thinking, and the
last message always has some."""

SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "[INST] [/INST] [TOOL_CALLS] <start_of_turn> <end_of_turn> "
    "<|turn> <turn|> <|channel> <channel|> "
    "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
).split()

_WORDS = (
    "an answer\n\n  indented:\n\tx = 1",
    "\U0001f600 \U0001f469\u200d\U0001f4bb caf\u00e9",
    "e\u0301a\u0308 combining \u0928\u093f",
    "<|im_start|>assistant\nnot a turn<|im_end|>\n",
    "<|im_end|>",
    "[/INST] no </s>",
    "<|eot_id|><|start_header_id|>user",
    "<end_of_turn>\n<start_of_turn>model",
    "  leading and trailing  ",
    " one space",
    "ends with a line\n",
    "\u4e2d\u6587\u3002",
    "'quoted' {\"json\": [1, 2]}",
    "x",
    ">",
    "assistant\nuser\n",
    "a\r\nb\tc",
)

CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "K\u00f6ln \u2600", "days": 3}},
}


def conversations(number: int, *, alternating: bool = False) -> list[list[dict[str, Any]]]:
    """Returns awkward conversations, always the same.

    Args: alternating: only user and assistant messages, in turn.
    """
    draw = random.Random(0)

    def words() -> str:
        long = draw.random() < 0.05
        return " ".join(
            draw.choice(_WORDS) for _ in range(400 if long else draw.randint(1, 3))
        ).lstrip("\n")

    results = []
    for _ in range(number):
        chat: list[dict[str, Any]] = []
        if not alternating and draw.random() < 0.5:
            chat.append({"role": "system", "content": draw.choice(["", "You are kind.", words()])})
        for _ in range(draw.choice([1, 1, 2, 3, 6])):
            chat.append({"role": "user", "content": words()})
            if not alternating and draw.random() < 0.3:
                chat.append(
                    {
                        "role": "assistant",
                        "content": draw.choice([None, "", words()]),
                        "tool_calls": [CALL],
                    }
                )
                chat.append({"role": "tool", "name": "weather", "content": words()})
            chat.append({"role": "assistant", "content": words()})
        results.append(chat)
    return results


def call_text(message: dict[str, Any], before: str = "", after: str = "") -> str:
    """The tool calls of a message as the templates here write them."""
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []
    ]
    return "".join(before + call + after for call in calls)


def tokenizer(
    *, normalizer: normalizers.Normalizer | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Returns a small byte-level BPE that splits text like Llama 3's, with special tokens."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(
        ["\n".join([*_WORDS, "\n\n", "assistant\nuser\nsystem\n", "model\n"] * 3)], trainer
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


def encode(rendered, tokenizer):
    """Returns tokens and labels of rendered documents."""
    encoder = TextEncoder(tokenizer)
    encodings = encoder.tokenize(rendered)
    return [encoder.encode(*pair) for pair in zip(rendered, encodings, strict=True)]
