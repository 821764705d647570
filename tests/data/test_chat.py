"""Tests of chat records: the loss is on assistant messages and their end tokens, to the token."""

import datetime
import itertools
import unicodedata

import numpy as np
import pytest
from tokenizers import normalizers, processors
from transformers.utils import chat_template_utils

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data import chat, chat_template
from jaxsp.data import spans as span_search
from jaxsp.data.chat import ChatOptions
from jaxsp.data.data_config import DataConfig
from tests.data import chats
from tests.messages import assert_names, assert_refused

SHOWN = {
    "chatml": (
        chats.CHATML,
        lambda m: (
            (m["content"] or "")
            + chats.call_text(m, "<tool_call>", "</tool_call>")
            + "<|im_end|>\n"
        ),
    ),
    "headers": (
        chats.HEADERS,
        lambda m: (m["content"] or "").strip() + chats.call_text(m) + "<|eot_id|>",
    ),
    "inst": (
        chats.INST,
        lambda m: " " + (m["content"] or "") + chats.call_text(m, "[TOOL_CALLS]") + "</s>",
    ),
    "channels": (
        chats.CHANNELS,
        lambda m: chats.call_text(m) + (m["content"] or "").strip() + "<turn|>\n",
    ),
    "turns": (chats.TURNS, lambda m: m["content"].strip() + "<end_of_turn>\n"),
}
"""Templates without marks, and the text of an assistant message in each."""


@pytest.fixture(scope="module")
def tokenizer():
    return chats.tokenizer()


def encode(record, tokenizer, template=chats.CHATML, train_on="assistant", **options):
    options |= {"tokenizer": tokenizer, "template": template, "has_full_loss": train_on == "all"}
    rendered = chat.render_record(chats.store(record), ChatOptions(**options))
    (encoded,) = chats.encode(rendered, tokenizer)
    return encoded


def learned(tokens, labels):
    """Returns the runs of tokens with loss."""
    assert tokens.dtype == labels.dtype == np.int32
    assert len(tokens) == len(labels)
    is_learned = labels != NO_LABEL
    np.testing.assert_array_equal(labels[is_learned], tokens[is_learned])
    borders = np.flatnonzero(np.diff(is_learned, prepend=False, append=False))
    return [tokens[start:end] for start, end in borders.reshape(-1, 2)]


def learned_texts(record, tokenizer, *arguments, **options):
    """Returns the texts with loss."""
    runs = learned(*encode(record, tokenizer, *arguments, **options))
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", SHOWN)
def test_the_loss_is_on_assistant_messages_and_their_end_tokens(tokenizer, name):
    template, says = SHOWN[name]
    for messages in chats.conversations(50, alternating=name == "turns"):
        tokens, labels = encode({"messages": messages}, tokenizer, template)
        expected = [says(message) for message in messages if message["role"] == "assistant"]
        assert [tokenizer.decode(run) for run in learned(tokens, labels)] == expected
        whole = tokenizer.apply_chat_template(messages, chat_template=template)["input_ids"]
        assert tokens.tolist() == whole
        assert encode({"messages": messages}, tokenizer, template, "all")[1] is None


@pytest.mark.parametrize("alternating", [False, True])
def test_without_end_tokens_the_next_role_marker_is_the_end(tokenizer, alternating):
    for messages in chats.conversations(50, alternating=alternating):
        tokens, labels = encode({"messages": messages}, tokenizer, chats.MARKERS)
        expected = []
        for message, follower in itertools.zip_longest(messages, messages[1:]):
            if message["role"] == "assistant":
                next_role = "user" if follower is None else follower["role"]
                end = {"tool": "<|observation|>"}.get(next_role, f"<|{next_role}|>")
                said = "\n" + (message["content"] or "") + chats.call_text(message)
                expected.append(said + end)
        assert [tokenizer.decode(run) for run in learned(tokens, labels)] == expected
        whole = tokenizer.apply_chat_template(messages, chat_template=chats.MARKERS)["input_ids"]
        assert tokens.tolist() == [*whole, tokenizer.convert_tokens_to_ids("<|user|>")]
        all_tokens, _ = encode({"messages": messages}, tokenizer, chats.MARKERS, "all")
        assert all_tokens.tolist() == tokens.tolist()
        prompt_completion = {"prompt": messages[:-1], "completion": messages[-1:]}
        assert learned_texts(prompt_completion, tokenizer, chats.MARKERS) == expected[-1:]


def test_a_call_at_the_end_stops_at_the_marker_of_its_result(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [chats.CALL]}
    chat = [{"role": "user", "content": "q"}, call]
    expected = f"\n{chats.call_text(call)}<|observation|>"
    assert learned_texts({"messages": chat}, tokenizer, chats.MARKERS) == [expected]
    # nothing is added after a message of another role
    chat.append({"role": "tool", "content": "t"})
    tokens, _ = encode({"messages": chat}, tokenizer, chats.MARKERS)
    assert tokenizer.decode(tokens).endswith("<|observation|>\nt")


LAST = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot_id|>{% endfor %}</s>"
PARTS = "{% for m in messages %}<|user|>{% if m.content is not string %}x{% endif %}{% endfor %}"
TWO = "{% for m in messages %}{{ m.content }}<|im_end|><|eot_id|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (chats.CHATML, [["<|im_end|>"]]),
        (chats.THINKING, [["<|im_end|>"]]),
        (chats.MARKED, [["<|im_end|>"]]),
        (chats.HEADERS, [["<|eot_id|>"]]),
        (chats.INST, [["</s>"]]),
        (chats.TURNS, [["<end_of_turn>"]]),
        (chats.MARKERS, [["<|user|>"], ["<|observation|>"]]),
        (TWO, [["<|im_end|>", "<|eot_id|>"]]),
        (LAST, [["<|eot_id|>"]]),
        (PARTS, []),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<stop>\n{% endfor %}", []),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_the_tokens_that_end_turns_are_found(tokenizer, template, stops):
    assert chat_template.find_turn_end(tokenizer, template).stops == stops


def test_marks_give_the_same_mask_as_transformers(tokenizer):
    for messages in chats.conversations(50):
        tokens, labels = encode({"messages": messages}, tokenizer, chats.MARKED)
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=chats.MARKED, return_assistant_tokens_mask=True
        )
        assert tokens.tolist() == theirs["input_ids"]
        assert (labels != NO_LABEL).astype(int).tolist() == theirs["assistant_masks"]
        np.testing.assert_array_equal(
            labels, encode({"messages": messages}, tokenizer, chats.CHATML)[1]
        )


def test_all_tokens_of_the_last_marked_character_have_loss(tokenizer):
    """transformers marks only the first of them."""
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    tokens, labels = encode(
        {"messages": [{"role": "assistant", "content": "x \U0001f980"}]}, tokenizer, template
    )
    assert [tokenizer.decode(run) for run in learned(tokens, labels)] == ["x \U0001f980"]


def test_messages_that_change_when_others_follow_are_found(tokenizer):
    thinks = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "<think>\nhm\n</think>\n\none",
            "tool_calls": [chats.CALL],
        },
        {"role": "tool", "content": "<|im_start|>assistant\n"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "<|im_start|>assistant\nq"},
        {"role": "assistant", "content": "three", "tool_calls": [chats.CALL]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nfour"},
    ]
    call = chats.call_text(thinks[1], "<tool_call>", "</tool_call>")
    assert learned_texts(
        {"messages": thinks}, tokenizer, chats.THINKING, earlier_reasoning="keep"
    ) == [
        f"one{call}<|im_end|>\n",
        "two<|im_end|>\n",
        f"three{call}<|im_end|>\n",
        "<think>\nso\n</think>\n\nfour<|im_end|>\n",
    ]
    for messages in chats.conversations(50):
        expected = [
            SHOWN["chatml"][1](message) for message in messages if message["role"] == "assistant"
        ]
        expected[-1] = f"<think>\n\n</think>\n\n{expected[-1]}"
        assert learned_texts({"messages": messages}, tokenizer, chats.THINKING) == expected


ALTERNATING = """{%- set ns = namespace(plain=0) -%}
{%- for message in messages if message.role != 'tool' and not message.tool_calls -%}
{%- if (message.role == 'user') != (ns.plain % 2 == 0) -%}
{{ raise_exception('Roles must alternate, except for tool calls and their results') }}
{%- endif -%}
{%- set ns.plain = ns.plain + 1 -%}
{%- endfor -%}"""
LONG = {
    "chatml": chats.CHATML,
    "headers": chats.HEADERS,
    "inst": chats.INST,
    "turns": chats.TURNS,
    "thinking": chats.THINKING,
    "mistral": ALTERNATING + chats.INST,
}
"""Templates whose long conversations are masked in linear time."""


@pytest.mark.parametrize("name", LONG)
def test_masks_of_long_conversations_take_linear_time(tokenizer, monkeypatch, name):
    """Prefixes of each turn take quadratic time: 25 times TRL's for gemma 3 at 300 turns."""
    call = {"role": "assistant", "tool_calls": [chats.CALL]}
    called = [] if name == "turns" else [TALK[0], call, {"role": "tool", "content": "t"}, TALK[1]]
    messages = [*TALK, *called] * 20
    chat_template.find_turn_end(tokenizer, LONG[name])  # once for a template
    render = chat_template_utils.render_jinja_template
    rendered = []

    def counted(conversations, **options):
        rendered.append(len(conversations[0]))
        return render(conversations, **options)

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", counted)
    tokens, labels = encode({"messages": messages}, tokenizer, LONG[name])
    spoken = [message for message in messages if message["role"] == "assistant"]
    assert len(learned(tokens, labels)) == len(spoken)
    assert len(rendered) <= 8
    assert sum(rendered) <= 5 * len(messages) + 20


@pytest.mark.parametrize("name", LONG)
def test_marks_of_loops_find_the_same_spans_as_prefixes(tokenizer, name):
    num_compared = 0
    for conversation in chats.conversations(20, alternating=name in ("turns", "mistral")):
        messages = [{k: v for k, v in message.items() if v is not None} for message in conversation]
        render = chat_template.TemplateRenderer(
            {}, tokenizer=tokenizer, template=LONG[name], with_marks=False
        )
        indices = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        expected = find_by_prefixes(messages, indices, render)
        spans, _ = span_search.find_spans(messages, indices, render(messages)[0], render)
        if expected is not None:
            assert spans == expected
            num_compared += 1
    assert num_compared or name == "thinking", "its last message has thinking, unless others follow"


@pytest.mark.parametrize("system", [False, True], ids=["no system", "system"])
@pytest.mark.parametrize(
    "content",
    [
        "{% for part in [message.content] %}{{ part }}{% endfor %}",
        "{% macro write(x) %}{% for part in [x] %}{{ part }}{% endfor %}{% endmacro %}"
        "{{ write(message.content) }}",
    ],
    ids=["inner loop", "macro"],
)
def test_loops_within_a_message_are_not_those_of_the_messages(tokenizer, content, system):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        f"{content}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "system", "content": "x"}] * system + TALK + TALK
    learned_text = learned(*encode({"messages": messages}, tokenizer, template))
    assert [tokenizer.decode(run) for run in learned_text] == ["answer<|im_end|>\n"] * 2


def find_by_prefixes(messages, indices, render):
    """The slow and obvious spans: two renderings for each message, which must be prefixes."""
    text, _ = render(messages)
    spans = []
    for index in indices:
        try:
            before, _ = render(messages[:index], prompt=True)
            after, _ = render(messages[: index + 1])
        except UserError:  # an empty conversation, or one that stops in the middle
            return None
        if index == len(messages) - 1:
            after = text
        if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
            return None
        spans.append((len(before), len(after)))
    return spans


@pytest.mark.parametrize(
    "template",
    [
        "{% set x %}" + chats.CHATML + "{% endset %}{{ x }}{{ x | length }}",
        "{{ messages | map(attribute='content') | join('<|im_end|>') }}<|im_end|>",
        "{% for x in messages[:1] %}{{ messages[0].content }}{{ messages[1].content }}{% endfor %}",
    ],
    ids=["changed by marks", "no loop", "another loop"],
)
def test_a_template_without_a_loop_that_can_be_marked_is_refused(tokenizer, template):
    with assert_refused("turns", "{% generation %}"):
        encode({"messages": TALK}, tokenizer, template)


def test_a_prompt_may_contain_more_than_the_header_of_a_message(tokenizer):
    """Prompts of reasoning models begin the thinking; messages without thinking lack it."""
    thinks = chats.CHATML.replace(
        "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
    )
    assert "<think>" in thinks
    for talk in (TALK, TALK + TALK):
        assert learned_texts({"messages": talk}, tokenizer, thinks) == ["answer<|im_end|>\n"] * (
            len(talk) // 2
        )


def test_normalizer_and_post_processor_move_no_label():
    """A normalizer joins two characters, and a post-processor trims spaces from offsets."""
    tokenizer = chats.tokenizer(normalizer=normalizers.NFC())
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for template in (chats.INST, chats.CHATML):
        for messages in chats.conversations(20):
            says = dict(SHOWN.values())[template]
            expected = [
                unicodedata.normalize("NFC", says(message))
                for message in messages
                if message["role"] == "assistant"
            ]
            assert learned_texts({"messages": messages}, tokenizer, template) == expected
    assert tokenizer.backend_tokenizer.post_processor is not None


def test_a_token_across_the_border_is_refused(tokenizer):
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "\nan answer"},
        ]
    }
    with pytest.raises(UserError, match=r"token.*assistant\\n'.*'\\nan ans"):
        encode(record, tokenizer)
    assert encode(record, tokenizer, train_on="all")[1] is None
    theirs = tokenizer.apply_chat_template(
        record["messages"], chat_template=chats.MARKED, return_assistant_tokens_mask=True
    )
    labels = encode(record, tokenizer, chats.MARKED)[1]
    assert (labels != NO_LABEL).astype(int).tolist() == theirs["assistant_masks"], (
        "marks are the user's word"
    )


TALK = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
PROMPT = "{%- if add_generation_prompt"
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
UNPROMPTED = chats.CHATML[: chats.CHATML.index(PROMPT)]
HALF_PROMPTED = chats.CHATML.replace(
    "'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>' }}{% endif"
)
CALLED = [TALK[0], {"role": "assistant", "tool_calls": [chats.CALL]}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}]


@pytest.mark.parametrize(
    ("record", "template", "parts"),
    [
        ({"messages": TALK[:1]}, chats.CHATML, ["assistant", "user", "data.train_on=all"]),
        ({"messages": TALK, "tools": TOOLS}, chats.CHATML, ["tools", "template"]),
        (
            {"messages": TALK, "chat_template_kwargs": {"add_generation_prompt": True}},
            chats.CHATML,
            ["chat_template_kwargs", "add_generation_prompt"],
        ),
        ({"messages": TALK[:1] + TALK}, chats.TURNS, ["Conversation roles must alternate"]),
        ({"messages": TALK}, "{{ messages[0].content }}", ["drops", "message 2", "assistant"]),
        (
            {"messages": [TALK[0], {**TALK[1], "reasoning_content": "hmm"}]},
            chats.CHATML,
            ["thinking"],
        ),
        (
            {"messages": TALK},
            PLAIN,
            [
                "end",
                "message 2",
                "assistant",
                "data.train_on=all",
                "trl/tree/main/trl/chat_templates",
            ],
        ),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, PLAIN, ["end", "message 2", "assistant"]),
        # a header that the prompt does not write, or half of it
        *(
            ({"messages": messages}, template, ["prompt", "header", "message 2"])
            for template in (UNPROMPTED, HALF_PROMPTED)
            for messages in (
                TALK,
                TALK + TALK,
                CALLED,
                [TALK[0], {"role": "assistant", "content": ""}],
            )
        ),
        *(
            (
                {"prompt": TALK[:1], "completion": completion},
                template,
                ["prompt", "header", "message 2"],
            )
            for template in (UNPROMPTED, HALF_PROMPTED)
            for completion in (TALK[1:], CALLED[1:])
        ),
        # arguments left out
        (
            {"messages": CALLED},
            chats.MARKED.replace("call.function |", "{'arguments': 1} |"),
            ["drops", "message 2"],
        ),
        (
            {"messages": TALK},
            "{{ strftime_now('%Y') }}" + chats.CHATML,
            ["data.chat_template_date"],
        ),
        (
            {"messages": TALK},
            "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}"
            "{{ m.content }}{% endfor %}",
            ["{% generation %}", "leave out", "assistant"],
        ),
        (
            {"prompt": TALK[:1], "completion": TALK[1:]},
            "{{ messages | length }}" + chats.CHATML,
            ["prompt", "completion", "data.train_on=all"],
        ),
    ],
)
def test_uncertain_records_are_refused_with_the_reason(tokenizer, record, template, parts):
    with assert_refused(*parts):
        encode(record, tokenizer, template)


GENERATION = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"


def each(body):
    """A template with a loop over messages; GENERATION in its body is a marked message."""
    body = body.replace("GENERATION", GENERATION)
    return "{% for m in messages %}" + body + "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (
            f"{{% macro say(m) %}}A: {GENERATION}{{% endmacro %}}" + each("{{ say(m) }}"),
            ["{% macro %}"],
        ),
        (each("GENERATION").replace(" %}", " recursive %}", 1), ["{% recursive for %}"]),
        (each("{% generation %}GENERATION{% endgeneration %}"), ["inside"]),
        # marks two letters of an earlier message
        (
            each(
                "{% if m.role == 'user' %}{{ m.content }}{% elif loop.last %}GENERATION{% else %}"
                "{% generation %}{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}"
                "{% endif %}"
            ),
            ["part", "message 2", "assistant"],
        ),
        # marks a call without its content
        (
            each(
                "{% if m.tool_calls %}{{ m.content }}{% generation %}{{ m.tool_calls | tojson }}"
                "{% endgeneration %}{% elif m.role == 'assistant' %}GENERATION"
                "{% else %}{{ m.content }}{% endif %}"
            ),
            ["part", "message 4", "assistant"],
        ),
        (each("GENERATION"), ["message 1", "user"]),
        (
            "{% generation %}" + each("{{ m.content }}") + "{% endgeneration %}",
            ["message 1", "user"],
        ),
    ],
)
def test_marks_that_do_not_match_assistant_messages_are_refused(tokenizer, template, parts):
    talk = [
        *TALK,
        TALK[0],
        {"role": "assistant", "content": "wait", "tool_calls": [chats.CALL]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a long answer2"},
    ]
    if "tool_calls" not in template:
        talk = [*TALK, TALK[0], talk[-1]]
    with assert_refused("{% generation %}", *parts):
        encode({"messages": talk}, tokenizer, template)


def test_a_tool_result_may_repeat_the_name_of_its_call_outside_the_marks(tokenizer):
    template = chats.MARKED.replace(
        "{{ message.content +",
        "{{ loop.previtem.tool_calls[0].function.name if message.role == 'tool' }}"
        "{{ message.content +",
    )
    talk = [*CALLED, {"role": "tool", "content": "t"}, TALK[1]]
    expected = [SHOWN["chatml"][1]({"content": ""} | message) for message in (CALLED[1], TALK[1])]
    assert "weathert<|im_end|>" in tokenizer.decode(
        encode({"messages": talk}, tokenizer, template)[0]
    )
    assert learned_texts({"messages": talk}, tokenizer, template) == expected


def test_marks_may_leave_out_earlier_messages_and_their_thinking(tokenizer):
    last = chats.MARKED.replace("{%- if message.role == 'assistant' %}", "{%- if loop.last %}")
    cut = chats.MARKED.replace(
        "{{ message.content or '' }}", "{{ (message.content or '').split('</think>')[-1] }}"
    )
    thinks = [TALK[0], {"role": "assistant", "content": "<think>hm</think>one"}, *TALK]
    for template, expected in (
        (last, ["answer<|im_end|>\n"]),
        (cut, ["one<|im_end|>\n", "answer<|im_end|>\n"]),
    ):
        assert template != chats.MARKED
        talk = thinks if template == cut else TALK + TALK
        assert (
            learned_texts({"messages": talk}, tokenizer, template, earlier_reasoning="keep")
            == expected
        )


ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"}
MARKED_THINKING = chats.THINKING.replace(
    "{{ content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ content }}{% endgeneration %}"
    "{% else %}{{ content }}{% endif %}",
)
MARKED_LAST = chats.THINKING.replace(
    "{{ content }}",
    "{% if loop.last %}{% generation %}{{ content }}{% endgeneration %}"
    "{% else %}{{ content }}{% endif %}",
)


@pytest.mark.parametrize("template", [chats.THINKING, MARKED_THINKING])
def test_answers_that_lose_their_thinking_are_refused_or_trained_or_not(tokenizer, template):
    talk = [*TALK, TALK[0], ANSWER, TALK[0], ANSWER | {"weight": 0}, TALK[0], ANSWER]

    def runs(**options):
        actual = learned(*encode({"messages": talk}, tokenizer, template, **options))
        return [tokenizer.decode(run).partition("<|im_end|>")[0] for run in actual]

    with assert_refused("message 4", *("no_loss", "keep", "data.chat_template")):
        runs()
    last = "one" if template == MARKED_THINKING else ANSWER["content"]
    assert runs(earlier_reasoning="keep") == ["answer", "one", last]
    assert runs(earlier_reasoning="no_loss") == ["answer", last]
    options = ChatOptions(
        tokenizer=tokenizer, template=template, has_full_loss=False, earlier_reasoning="keep"
    )
    counts = [
        chat.render_record(chats.store({"messages": messages}), options)[0].num_bare_answers
        for messages in (talk, [*TALK, ANSWER], [TALK[0], ANSWER] * 4, TALK)
    ]
    assert counts == [1, 0, 3, 0]


def test_answers_without_loss_may_lose_their_thinking(tokenizer):
    talk = [TALK[0], ANSWER, TALK[0], ANSWER]
    (last,) = learned(*encode({"messages": talk}, tokenizer, MARKED_LAST))
    assert tokenizer.decode(last) == "one"
    prompted = {"prompt": talk[:3], "completion": talk[3:]}
    assert len(learned(*encode(prompted, tokenizer, chats.THINKING))) == 1
    for record, train_on, suggestion in (
        ({"prompt": talk[:1], "completion": talk[1:]}, "assistant", "format: messages"),
        (prompted, "all", "data.train_on=assistant"),
        ({"messages": talk}, "all", "data.train_on=assistant"),
    ):
        for earlier in ("error", "no_loss"):
            with pytest.raises(UserError) as raised:
                encode(record, tokenizer, chats.THINKING, train_on, earlier_reasoning=earlier)
            assert_names(raised.value, "message 2", "data.earlier_reasoning=keep")
        assert_names(raised.value, suggestion)
        encode(record, tokenizer, chats.THINKING, train_on, earlier_reasoning="keep")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Use <think> and </think> in text.", "drops content of message 2"),
        ("<think>\nhm\n</think>\n\na </think> b", "drops content of message 2"),
        ("<think>hm <think> so</think>a", "thinking"),
        ("hm\n</think>\n\na", None),
        (" <think>\nhm</think>a", None),
        ("a <think> b", None),
    ],
)
def test_quoted_think_tags_are_content(tokenizer, content, problem):
    talk = [TALK[0], {"role": "assistant", "content": content}]
    if problem is None:
        encode({"messages": talk}, tokenizer, chats.THINKING)
    else:
        with pytest.raises(UserError, match=problem):
            encode({"messages": talk}, tokenizer, chats.THINKING)
    (written,) = learned(*encode({"messages": talk}, tokenizer, chats.CHATML))
    assert tokenizer.decode(written) == f"{content}<|im_end|>\n"


def test_arguments_of_calls_may_be_rendered_in_any_notation(tokenizer):
    arguments = {"it's": ['a "quoted"\n\\ \u00f6', {"x": "1 < 2 & '3'"}]}
    talk = [
        TALK[0],
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
    ]
    for way in ("tojson", "tojson(ensure_ascii=True)", "string", "string | e"):
        tokens, labels = encode(
            {"messages": talk},
            tokenizer,
            chats.CHATML.replace("call.function | tojson", f"call.function | {way}"),
        )
        assert len(learned(tokens, labels)) == 1


def test_repeated_content_is_located_in_its_own_message(tokenizer):
    """`assistant` stands in the header, `x` in what the user says."""
    words = ["assistant", "x", "user", "x", "x", "assistant", "ask"]
    talk = [
        {"role": ("user", "assistant")[number % 2], "content": word}
        for number, word in enumerate([*words, "<"])
    ]
    expected = [f"{message['content']}<|im_end|>\n" for message in talk[1::2]]
    for template in (chats.MARKED, chats.CHATML, chats.THINKING):
        actual = learned_texts({"messages": talk}, tokenizer, template)
        assert [run.removeprefix("<think>\n\n</think>\n\n") for run in actual] == expected


def test_tokens_do_not_depend_on_the_date_of_today(tokenizer):
    """Llama 3.2's template falls back to a fixed date; a record may set one."""
    dated = (
        "\n  {% if not date_string is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') if strftime_now is defined "
        "else '26 Jul 2024' %}"
        "{% endif %}{{ date_string }}:" + chats.CHATML
    )
    tokens, labels = encode({"messages": TALK}, tokenizer, dated)
    assert tokenizer.decode(tokens).startswith("\n26 Jul 2024:<|im_start|>")
    assert [tokenizer.decode(run) for run in learned(tokens, labels)] == ["answer<|im_end|>\n"]
    date = datetime.date(2025, 5, 1)
    actual = encode({"messages": TALK}, tokenizer, dated, date=date)[0]
    assert tokenizer.decode(actual).startswith("\n01 May 2025:")
    given = {"messages": TALK, "chat_template_kwargs": {"date_string": "1 May 2025"}}
    theirs = tokenizer.apply_chat_template(TALK, chat_template=dated, date_string="1 May 2025")[
        "input_ids"
    ]
    assert encode(given, tokenizer, dated)[0].tolist() == theirs


def test_an_accent_that_joins_the_letter_before_it_is_refused():
    tokenizer = chats.tokenizer(normalizer=normalizers.NFC())
    template = "{% for m in messages %}{{ m.role + ':E' + m.content + '</s>' }}{% endfor %}" + (
        "{{ 'assistant:E' if add_generation_prompt }}"
    )
    messages = [TALK[0], {"role": "assistant", "content": "\u0301x"}]
    with pytest.raises(UserError, match=r"token.*:E'.*'\u0301x</s>'"):
        encode({"messages": messages}, tokenizer, template)
    assert learned_texts({"messages": TALK}, tokenizer, template) == ["answer</s>"]


def test_the_loss_of_a_completion_includes_the_end_token(tokenizer):
    record = {"prompt": "2 + 2 =", "completion": " 4"}
    tokens, _ = encode(record, tokenizer)
    assert tokenizer.decode(tokens) == "2 + 2 = 4</s>"
    assert learned_texts(record, tokenizer) == [" 4</s>"]
    merged = {"prompt": "it is an ", "completion": "answer"}
    assert learned_texts(merged, tokenizer) == [" answer</s>"], (
        "a token across the border is learned"
    )
    assert learned_texts({"prompt": "a", "completion": " b</s>"}, tokenizer) == [" b</s>"]
    assert encode(record, tokenizer, train_on="all")[0].tolist() == tokens.tolist()
    assert learned_texts({"prompt": TALK[:1], "completion": TALK[1:]}, tokenizer) == [
        "answer<|im_end|>\n"
    ]


def test_a_tokenizer_without_offsets_needs_train_on_all():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    with pytest.raises(UserError, match=r"ByT5Tokenizer.*data\.train_on=all"):
        encode({"messages": TALK}, slow)
    tokens, labels = encode({"messages": TALK}, slow, train_on="all")
    assert (slow.decode(tokens).count("answer"), labels) == (1, None)


def test_a_template_is_a_file_or_inline(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)

    def given(name):
        data = {
            "train": [{"source": "x", "format": "messages"}],
            "row_tokens": 8,
            "chat_template": name,
        }
        return chat_template.load_template(DataConfig.model_validate(data), tokenizer)

    (tmp_path / "a.jinja").write_text(chats.CHATML)
    assert given("a.jinja") == given(chats.CHATML) == chats.CHATML
    with pytest.raises(UserError, match=r"data\.chat_template = b\.jinja: .*\{\{ or \{%.*null"):
        given("b.jinja")
    with pytest.raises(UserError, match=r"Jinja.*line 2: unexpected '\}'"):
        given("{{ x }}\n{{ y }")
    with pytest.raises(
        UserError, match=r"data\.chat_template = null: .*data\.chat_template=template\.jinja"
    ):
        given(None)
    own = chats.tokenizer()
    own.chat_template = chats.CHATML
    data = DataConfig.model_validate(
        {"train": [{"source": "x", "format": "messages"}], "row_tokens": 8}
    )
    assert chat_template.load_template(data, own) is None


def test_a_function_call_that_the_template_drops_is_refused(tokenizer):
    """In OpenAI's older format; dropped, an empty answer would be learned."""
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    talk = [TALK[0], {"role": "assistant", "content": "", "function_call": call}, *TALK]
    for template in (chats.CHATML, chats.MARKED):
        with pytest.raises(UserError, match=r"message 2 .*tool_calls"):
            encode({"messages": talk}, tokenizer, template)
        if template == chats.CHATML:
            template = template.replace(
                "(message.content or '')", "message.content + (message.function_call | string)"
            )
        else:
            template = template.replace(
                "message.content or ''", "message.content + (message.function_call | string)"
            )
        (first, _) = learned(*encode({"messages": talk}, tokenizer, template))
        assert "Rome" in tokenizer.decode(first)


THOUGHT = chats.MARKED.replace(
    "{% generation %}{{ message.content or '' }}",
    "{% generation %}{{ message.thinking or '' }}{% endgeneration %}"
    "{% generation %}{{ message.content or '' }}",
)


@pytest.mark.parametrize("template", [chats.CHATML, chats.MARKED, chats.THINKING, THOUGHT])
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": False}]
)
def test_messages_with_weight_0_or_train_false_have_no_loss(tokenizer, template, mark):
    call = {"role": "assistant", "tool_calls": [chats.CALL], **mark}
    talk = [*TALK, TALK[0], {"role": "assistant", "content": "two", **mark}, TALK[0], call, TALK[0]]
    talk.append({"role": "assistant", "content": "three", "weight": 1, "train": True})
    if template == THOUGHT:
        talk = [
            message | {"thinking": "hm"} if message["role"] == "assistant" else message
            for message in talk
        ]
    plain = [
        {key: value for key, value in message.items() if key not in ("weight", "train")}
        for message in talk
    ]
    tokens, labels = encode({"messages": talk}, tokenizer, template)
    whole, every = encode({"messages": plain}, tokenizer, template)
    np.testing.assert_array_equal(tokens, whole)
    one, _, _, three = learned(whole, every)
    assert [run.tolist() for run in learned(tokens, labels)] == [one.tolist(), three.tolist()]


def test_weight_0_is_refused_if_it_cannot_be_applied(tokenizer):
    silent = {**TALK[1], "weight": 0}
    across = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    for record, template, train_on, parts in (
        (
            {"messages": [TALK[0], silent]},
            chats.CHATML,
            "assistant",
            ["every message", "assistant", "weight 0"],
        ),
        (
            {"messages": [*TALK, silent]},
            chats.CHATML,
            "all",
            ["message 3", "weight 0", "data.train_on=assistant"],
        ),
        (
            {"prompt": TALK[:1], "completion": [silent]},
            chats.CHATML,
            "assistant",
            ["weight 0", "format: messages"],
        ),
        ({"messages": [TALK[1], silent]}, across, "assistant", ["{% generation %}", "weight 0"]),
    ):
        with assert_refused(*parts):
            encode(record, tokenizer, template, train_on)
