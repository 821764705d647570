"""Renders a conversation, or a prompt and its completion, to text and the spans with loss."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxsp.data.chat import assistant_spans, generation_marks, template_text
from jaxsp.data.chat.chat_template import TemplateRenderer, clean_messages
from jaxsp.data.chat.template_text import Messages, RecordError

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderedRecord:
    """A record as text."""

    text: str
    loss_spans: tuple[tuple[int, int], ...] | None = None
    """First character and end of each part with loss; None: the whole text."""
    has_exact_spans: bool = True
    """A token that lies partly in a span: refuse the record if True, train on the token if not."""
    is_plain: bool = False
    """Add the tokenizer's special tokens around the text, and its end token after it."""


def render_record(
    record: dict[str, Any],
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase",
    template: str | None,
    train_on: str,
) -> RenderedRecord:
    """Renders a record of `messages`, or of `prompt` and `completion`.

    Args:
        template: None to use the tokenizer's own.
        train_on: data.train_on.
    Raises: RecordError if the record cannot be used.
    Source: TRL 1.16's SFTTrainer with `assistant_only_loss` for messages and `completion_only_loss`
        for prompt and completion: ids and labels are the same for the same template. Differs: TRL
        replaces templates without marks by its own for the models it knows; a prompt that is
        written differently when its completion follows is refused (TRL trains from where they
        differ), unless only the generation prompt is; a template never writes the date of today.
    """
    has_full_loss = train_on == "all"
    if "messages" in record:
        messages = clean_messages(record["messages"], "messages")
        render = TemplateRenderer(
            record, tokenizer=tokenizer, template=template, with_marks=not has_full_loss
        )
        return _render_conversation(messages, render, has_full_loss=has_full_loss)
    prompt = record["prompt"]
    completion = record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        spans = None if has_full_loss else ((len(prompt), len(text)),)
        return RenderedRecord(text=text, loss_spans=spans, has_exact_spans=False, is_plain=True)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordError("prompt and completion must be both text or both messages")
    return _render_completion(
        clean_messages(prompt, "prompt"),
        clean_messages(completion, "completion"),
        TemplateRenderer(record, tokenizer=tokenizer, template=template, with_marks=False),
        has_full_loss=has_full_loss,
    )


def _render_conversation(
    messages: Messages, render: TemplateRenderer, *, has_full_loss: bool
) -> RenderedRecord:
    text, marks = render(messages)
    template_text.check_messages_present(messages, text)
    if has_full_loss:
        _check_all_have_loss(messages, "use data.train_on=assistant")
        return RenderedRecord(text=text)
    indices = [
        index
        for index, message in enumerate(messages)
        if message["role"] == template_text.ASSISTANT
    ]
    if not indices:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise RecordError(
            f"has no message with the role {template_text.ASSISTANT} to train on, only {roles}. "
            "Map the source's role names with roles, or use data.train_on=all"
        )
    loss_indices = [index for index in indices if template_text.has_loss(messages[index])]
    if not loss_indices:
        raise RecordError(
            f"every message with the role {template_text.ASSISTANT} has weight 0 or train false. "
            "Leave the record out"
        )
    if render.has_marks:
        spans = generation_marks.read_marked_spans(
            messages, indices, text, marks, render, loss_indices=loss_indices
        )
    else:
        spans = assistant_spans.infer_spans(messages, loss_indices, text, render)
    return RenderedRecord(text=text, loss_spans=tuple(spans), has_exact_spans=not render.has_marks)


def _check_all_have_loss(messages: Messages, suggestion: str) -> None:
    """Raises: RecordError for an assistant message without loss."""
    for number, message in enumerate(messages, 1):
        if message["role"] == template_text.ASSISTANT and not template_text.has_loss(message):
            raise RecordError(
                f"message {number} has weight 0 or train false, but the whole text is trained on: "
                f"{suggestion}"
            )


def _render_completion(
    prompt: Messages, completion: Messages, render: TemplateRenderer, *, has_full_loss: bool
) -> RenderedRecord:
    messages = prompt + completion
    text, _ = render(messages)
    template_text.check_messages_present(messages, text)
    if has_full_loss:
        _check_all_have_loss(messages, "use data.train_on=assistant")
        return RenderedRecord(text=text)
    _check_all_have_loss(completion, "use format: messages")
    prompt_text, _ = render(prompt)
    prompted, _ = render(prompt, prompt=True)
    start = assistant_spans.common_prefix_length(prompted, text)
    if start < min(len(prompted), assistant_spans.common_prefix_length(prompt_text, prompted)):
        raise RecordError(
            "the chat template writes the prompt differently when the completion follows, so that "
            "the completion cannot be located: use data.train_on=all, or another template"
        )
    assistant_spans.check_span(
        messages,
        range(len(prompt), len(messages)),
        text,
        (start, len(text)),
        render,
        suggestion="use data.train_on=all, or format: messages and a data.chat_template with "
        "{% generation %} marks",
    )
    return RenderedRecord(text=text, loss_spans=((start, len(text)),), has_exact_spans=False)
