"""A conversation, or a prompt and its completion, becomes a text and the parts of it that are learned."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxsp.config.data_schema import DataConfig
from jaxsp.core import paths
from jaxsp.core.errors import UserError
from jaxsp.data.chat import assistant_spans, template_text
from jaxsp.data.chat.template_text import RecordError

if TYPE_CHECKING:
    import transformers

_RESERVED_KWARGS = (
    *(
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "continue_final_message",
    ),
    "strftime_now",
)
"""What chat_template_kwargs cannot set."""

_UNDEFINED_DATE = "the_date_of_today"
"""A name that no template knows: what is set to it is not defined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderedRecord:
    """A record as text."""

    text: str
    loss_spans: tuple[tuple[int, int], ...] | None = None
    """Parts of the text, first character and end; None: all."""
    has_exact_spans: bool = True
    """Whether a token that lies half in a part is refused. If not, it is learned."""
    is_plain: bool = False
    """Whether the tokenizer's special tokens are still to be put around the text, and the end token behind it."""


def load_template(
    data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> str | None:
    """The template that the config gives instead of the tokenizer's: of a file, or written out; None for the tokenizer's own.

    Raises: UserError where there is neither, or it is no Jinja.
    """
    import jinja2
    from transformers.utils import chat_template_utils

    asked = data.chat_template
    if asked is None:
        if not tokenizer.chat_template:
            raise UserError(
                "data.chat_template = null: the tokenizer has no chat template of its own. Give a file: "
                "data.chat_template=template.jinja."
            )
        named = tokenizer.chat_template
        texts, what = (
            list(named.values()) if isinstance(named, dict) else [named],
            "null: the tokenizer's chat template",
        )
    else:
        texts = [resolve_template(asked)]
        what = "..." if texts == [asked] else asked
    for text in texts:
        try:
            chat_template_utils.render_jinja_template(
                [], chat_template=text
            )  # of no conversation: it is only compiled
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"data.chat_template = {what}: is no Jinja template: line {error.lineno}: {error.message}."
            ) from None
    return None if asked is None else texts[0]


def resolve_template(chat_template: str) -> str:
    """The template that data.chat_template is, or that lies in the file it names. Raises: UserError where it is neither."""
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    try:
        return paths.expand_user(chat_template, field="data.chat_template").read_text(
            encoding="utf-8"
        )
    except FileNotFoundError:
        raise UserError(
            f"data.chat_template = {chat_template}: no such file below {pathlib.Path.cwd()}, and no template either, which would "
            "hold {{ or {%. Give a file, or null for the tokenizer's own."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template = {chat_template}: cannot be read: {error}.") from None


def render_record(
    record: dict[str, Any],
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase",
    template: str | None,
    train_on: str,
) -> RenderedRecord:
    """The text of a record of `messages`, or of `prompt` and `completion`, and what of it is learned.

    Raises: Refused.
    Source: TRL 1.16's SFTTrainer, whose ids and labels these become for the same template: `assistant_only_loss` for messages,
        `completion_only_loss` for prompt and completion. Differs: TRL has templates of its own for the models it knows, and
        puts them in the place of one without marks; a prompt that is written differently when its completion follows is
        refused (TRL learns from where they part), unless only the generation prompt is; a template that writes the date of
        today (Llama 3.2's) writes what it has for a renderer that knows no date, so that tokens are the same tomorrow.
    """
    if "messages" in record:
        messages = _clean_messages(record["messages"], "messages")
        render, has_marks = _make_renderer(
            record, tokenizer, template, with_marks=train_on != "all"
        )
        return _render_conversation(messages, render, has_marks=has_marks, train_on=train_on)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        learned = None if train_on == "all" else ((len(prompt), len(prompt) + len(completion)),)
        return RenderedRecord(
            text=prompt + completion, loss_spans=learned, has_exact_spans=False, is_plain=True
        )
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordError("prompt and completion are text and messages; both have to be the same")
    render, _ = _make_renderer(record, tokenizer, template, with_marks=False)
    return _render_completion(
        _clean_messages(prompt, "prompt"),
        _clean_messages(completion, "completion"),
        render,
        train_on=train_on,
    )


def _clean_messages(given: Any, name: str) -> assistant_spans.Messages:
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in given
    ):
        raise RecordError(f"{name} is no list of messages, each with a role")
    if not given:
        raise RecordError(f"{name} is empty: a conversation has at least one message")
    # as transformers does: for templates, a missing key is not the same as null
    return [
        {name: value for name, value in message.items() if value is not None} for message in given
    ]


def _make_renderer(
    record: dict[str, Any],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    template: str | None,
    *,
    with_marks: bool,
) -> tuple[assistant_spans.RenderFunction, bool]:
    """Renders messages as `tokenizer.apply_chat_template` does, with the parts that its marks name; whether there are marks."""
    from transformers.utils import chat_template_utils

    tools = record.get("tools") or None  # [] would make some templates speak of tools
    kwargs = record.get("chat_template_kwargs") or {}
    if taken := [name for name in _RESERVED_KWARGS if name in kwargs]:
        raise RecordError(f"chat_template_kwargs cannot set {taken[0]}")
    try:
        text = tokenizer.get_chat_template(template, tools)
    except ValueError:  # several templates, and none for this
        raise RecordError(
            "the tokenizer has no chat template for it: give one as data.chat_template"
        ) from None
    if (
        "strftime_now" in text
    ):  # the line has an end so that the template's first line stays the first
        text = f"{{% set strftime_now = {_UNDEFINED_DATE} %}}\n{text}"
    marked = with_marks and assistant_spans.has_generation_marks(text)

    def rendered(
        messages: Sequence[dict[str, Any]], *, prompt: bool = False, with_tools: bool = True
    ) -> tuple[str, assistant_spans.TextSpans]:
        made: Any = chat_template_utils.render_jinja_template(
            [list(messages)],
            tools=tools if with_tools else None,
            chat_template=text,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **{**tokenizer.special_tokens_map, **kwargs},
        )
        (text_of_it,), parts = made
        return text_of_it, parts[0] if marked else []

    def refusing(*args: Any, **options: Any) -> tuple[str, assistant_spans.TextSpans]:
        try:
            return rendered(*args, **options)
        except Exception as error:  # raise_exception's, or any that Python raises in a template
            reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
            if _UNDEFINED_DATE in reason:
                reason = "it writes the date of today (strftime_now), and tomorrow other tokens. Write a date into it"
            elif isinstance(error, TypeError) and "concatenate" in reason and '"dict"' in reason:
                reason += ". If it takes the arguments of tool calls for strings, write them in it with | tojson"
            raise RecordError(f"the chat template refuses it: {reason}") from None

    if tools is not None:
        messages = [
            one for name in ("messages", "prompt", "completion") for one in record.get(name) or []
        ]
        messages = _clean_messages(messages, "messages")
        if refusing(messages)[0] == refusing(messages, with_tools=False)[0]:
            raise RecordError(
                "the chat template ignores tools. Leave them out, or give a template that knows them"
            )
    return refusing, marked


def _render_conversation(
    messages: assistant_spans.Messages,
    render: assistant_spans.RenderFunction,
    *,
    has_marks: bool,
    train_on: str,
) -> RenderedRecord:
    whole, marks = render(messages)
    template_text.check_messages_present(messages, whole)
    if train_on == "all":
        _check_all_have_loss(messages, "use data.train_on=assistant")
        return RenderedRecord(text=whole)
    spoken = [
        number
        for number, message in enumerate(messages)
        if message["role"] == template_text.ASSISTANT
    ]
    if not spoken:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise RecordError(
            f"has no turn of the role {template_text.ASSISTANT} to learn from, but of {roles}: say what the source calls it with "
            "roles, or use data.train_on=all"
        )
    with_loss = [number for number in spoken if template_text.has_loss(messages[number])]
    if not with_loss:
        raise RecordError(
            f"every turn of the role {template_text.ASSISTANT} has weight 0 or train false: leave the record out"
        )
    if has_marks:
        parts = assistant_spans.read_marked_spans(
            messages, spoken, whole, marks, render, with_loss=with_loss
        )
        return RenderedRecord(text=whole, loss_spans=tuple(parts), has_exact_spans=False)
    return RenderedRecord(
        text=whole,
        loss_spans=tuple(assistant_spans.infer_spans(messages, with_loss, whole, render)),
    )


def _check_all_have_loss(messages: assistant_spans.Messages, suggestion: str) -> None:
    """Raises: Refused for an assistant turn without loss where all of a text is learned."""
    for number, message in enumerate(messages, 1):
        if message["role"] == template_text.ASSISTANT and not template_text.has_loss(message):
            raise RecordError(
                f"message {number} has weight 0 or train false, and all of the text is to be learned: {suggestion}"
            )


def _render_completion(
    prompt: assistant_spans.Messages,
    completion: assistant_spans.Messages,
    render: assistant_spans.RenderFunction,
    *,
    train_on: str,
) -> RenderedRecord:
    messages = prompt + completion
    whole, _ = render(messages)
    template_text.check_messages_present(messages, whole)
    if train_on == "all":
        _check_all_have_loss(messages, "use data.train_on=assistant")
        return RenderedRecord(text=whole)
    _check_all_have_loss(completion, "use format: messages")
    alone, _ = render(prompt)
    asked, _ = render(prompt, prompt=True)
    start = assistant_spans.common_prefix_length(asked, whole)
    if start < min(len(asked), assistant_spans.common_prefix_length(alone, asked)):
        raise RecordError(
            "the chat template writes the prompt differently when the completion follows, so that what is learned cannot be "
            "told apart: use data.train_on=all, or a template that does not"
        )
    assistant_spans.check_span(
        messages,
        range(len(prompt), len(messages)),
        whole,
        (start, len(whole)),
        render,
        suggestion="use data.train_on=all, or format: messages and a data.chat_template with {% generation %} marks",
    )
    return RenderedRecord(text=whole, loss_spans=((start, len(whole)),), has_exact_spans=False)
