"""Renders a conversation, or a prompt and its completions, to text and the spans with loss.

Three messages as ChatML writes them; the loss is on the text between the bars:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n|Hello.<|im_end|>\n|

If the template has {% generation %} marks, they name the spans (spans.py). Otherwise the
spans are found by marks of the template's loops, and then checked.

A span must begin with the message's content or its thinking: otherwise a header that the generation
prompt does not write would be trained on. It must end with more than the content: a message without
an end-of-turn token never teaches the model to stop. If a template writes none, the role marker of
the next message is the end (chat_template.py).

A record that fails a check is refused; nothing is guessed. The text is always the template's. If it
drops the thinking of earlier messages, data.earlier_reasoning decides about the bare answers.
"""

import contextlib
import dataclasses
import datetime
from typing import Any

from jaxsp.core.errors import UserError, at
from jaxsp.data import chat_template, spans
from jaxsp.data.chat_template import TemplateRenderer
from jaxsp.data.source import COMPLETION_FIELDS
from jaxsp.data.spans import ASSISTANT, Messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options that determine the text of a record and its spans with loss."""

    tokenizer: Any
    template: str | None
    """Chat template of the config; None: the tokenizer's own."""
    has_full_loss: bool
    """data.train_on = all."""
    earlier_reasoning: str = "error"
    """data.earlier_reasoning."""
    date: datetime.date | None = None
    """data.chat_template_date."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderedRecord:
    """A document of a record as text."""

    text: str
    name: str = ""
    """The document's name in messages; empty if the record has only one."""
    loss_spans: tuple[tuple[int, int], ...] | None = None
    """First character and end of each part with loss; None: the whole text."""
    has_exact_spans: bool = False
    """Refuse the record if a token lies only partly in a span; if False, train on that token."""
    is_plain: bool = False
    """True for a text without a chat template: the tokenizer's special tokens are added around it,
    and its end token after it."""
    num_bare_answers: int = 0
    """Number of messages whose thinking the template dropped, and that would have a loss."""


def render_record(record: dict[str, Any], options: ChatOptions) -> tuple[RenderedRecord, ...]:
    """Renders a record of `messages`, or of `prompt` and completions, as Chat stores them.

    Returns: a document for each completion. Raises: UserError.
    Source: TRL 1.16's SFTTrainer with `assistant_only_loss` for messages and `completion_only_loss`
        for prompt and completion: ids and labels are the same for the same template. Differs: TRL
        replaces templates without marks by its own for the models it knows; a prompt that is
        written differently when its completion follows is refused (TRL trains from where they
        differ), unless only the generation prompt is; a template never writes today's date.
    """
    prompt = record.get("prompt", [])
    fields = [name for name in ("messages", *COMPLETION_FIELDS) if name in record]
    names = [field.replace("_", " ") for field in fields] if len(fields) > 1 else [""]
    if isinstance(prompt, str):
        texts = [prompt + record[field] for field in fields]
        return tuple(
            RenderedRecord(
                text=text,
                name=name,
                loss_spans=None if options.has_full_loss else ((len(prompt), len(text)),),
                is_plain=True,
            )
            for name, text in zip(names, texts, strict=True)
        )
    is_conversation = fields == ["messages"] and not options.has_full_loss
    render = TemplateRenderer(
        record,
        tokenizer=options.tokenizer,
        template=options.template,
        with_marks=is_conversation,
        date=options.date,
    )
    if is_conversation:
        return (_render_conversation(record["messages"], render, options),)
    documents = []
    for field, name in zip(fields, names, strict=True):
        with at_document(name):
            documents.append(_render_completion(prompt, record[field], render, options, name=name))
    return tuple(documents)


def at_document(name: str) -> contextlib.AbstractContextManager[None]:
    """Context that names a document in errors. Args: name: empty if its record has no other."""
    return at(name) if name else contextlib.nullcontext()


def _render_conversation(
    messages: Messages, render: TemplateRenderer, options: ChatOptions
) -> RenderedRecord:
    text, marks = render(messages)
    spans.check_messages_present(messages, text)
    indices = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    loss_indices = [index for index in indices if spans.has_loss(messages[index])]
    bare = spans.find_bare_answers(messages, loss_indices, text, render)
    if not indices:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise UserError(
            f"has no message with the role {ASSISTANT} to train on, only {roles}. Map the source's "
            "role names with roles, or use data.train_on=all."
        )
    if options.earlier_reasoning == "no_loss":
        loss_indices = [index for index in loss_indices if index not in bare]
    if not loss_indices:
        reason = " or loses its thinking" if bare else ""
        raise UserError(
            f"every message with the role {ASSISTANT} has weight 0{reason}. Leave the record out."
        )
    if render.has_marks:
        loss_spans, marked = spans.read_marked_spans(
            messages, indices, text, marks, render, loss_indices=loss_indices
        )
        bare = [index for index in bare if index in marked]
    else:
        turn_end = chat_template.find_turn_end(options.tokenizer, render.template)
        loss_spans, opening = spans.find_spans(messages, loss_indices, text, render)
        # the last may end after the text, with the end that the template leaves out
        text += turn_end.complete(messages)
        loss_spans = [(start, turn_end.extend(text, end)) for start, end in loss_spans]
        for index, span in zip(loss_indices, loss_spans, strict=True):
            spans.check_span(
                messages,
                [index],
                text,
                span,
                opening=opening,
                suggestion=spans.MARKS_SUGGESTION,
            )
    spans.check_bare_answers(bare, options.earlier_reasoning)
    return RenderedRecord(
        text=text,
        loss_spans=tuple(loss_spans),
        has_exact_spans=not render.has_marks,
        num_bare_answers=len(bare),
    )


def _render_completion(
    prompt: Messages,
    completion: Messages,
    render: TemplateRenderer,
    options: ChatOptions,
    *,
    name: str,
) -> RenderedRecord:
    """Renders a prompt and a completion, which has the loss unless all messages have."""
    messages = prompt + completion
    turn_end = chat_template.find_turn_end(options.tokenizer, render.template)
    text = render(messages)[0] + turn_end.complete(messages)
    spans.check_messages_present(messages, text)
    first = len(prompt)
    suggestion = "leave the record out" if name else "use format: messages"
    if options.has_full_loss:
        first = 0
        suggestion = "use data.train_on=assistant"
    indices = range(first, len(messages))
    answers = [index for index in indices if messages[index]["role"] == ASSISTANT]
    for index in answers:
        if not spans.has_loss(messages[index]):
            raise UserError(
                f"message {index - first + 1} has weight 0 (no loss), but the whole text is "
                f"trained on: {suggestion}."
            )
    bare = spans.find_bare_answers(messages, answers, text, render)
    spans.check_bare_answers(bare, options.earlier_reasoning, instead_of_no_loss=suggestion)
    if options.has_full_loss:
        return RenderedRecord(text=text, name=name, num_bare_answers=len(bare))
    prompted, _ = render(prompt, prompt=True)
    start = spans.common_prefix_length(prompted, text)
    prompt_length = spans.common_prefix_length(render(prompt)[0], prompted)
    use = "use" if name else "use data.train_on=all, or"
    if start < min(len(prompted), prompt_length):
        raise UserError(
            "the chat template writes the prompt differently when the completion follows, so that "
            f"the completion cannot be located: {use} another template."
        )
    header = ""
    has_content = bool(spans.visible_content(completion[0]).strip())
    if not has_content or spans.list_tool_calls(completion[0]):
        word = next(spans.unused_words(text))
        spoken = {"role": completion[0]["role"], "content": word}
        header = render([*prompt, spoken])[0].partition(word)[0]
    marked = "format: messages and a data.chat_template with {% generation %} marks"
    spans.check_span(
        messages,
        indices,
        text,
        (start, len(text)),
        opening=(prompted, header),
        suggestion=f"{use} {'another template' if name else marked}",
    )
    return RenderedRecord(
        text=text,
        name=name,
        loss_spans=((start, len(text)),),
        num_bare_answers=len(bare),
    )
