"""Loads chat templates, renders conversations with them, and finds what ends a turn.

Most templates write an end token after each message. GLM-4's write none: there the model stops with
the role marker of the next message, which is missing after the last one. jaxsp adds it (the loss
covers what is between two bars):

    [gMASK]<sop><|user|>\\nHi<|assistant|>|\\nHello.<|user|>|\\nBye<|assistant|>|\\nBye.<|user|>|
"""

import contextlib
import dataclasses
import datetime
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxsp.core import files
from jaxsp.core.errors import UserError, at
from jaxsp.data import spans
from jaxsp.data.data_config import DataConfig
from jaxsp.data.spans import ASSISTANT, Messages, TextSpans

if TYPE_CHECKING:
    import transformers

_DATE_FUNCTION = "strftime_now"
"""Function of transformers that formats the present time."""

_RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "chat_template",
    "conversation",
    "continue_final_message",
    _DATE_FUNCTION,
)

_DATE_CALL = re.compile(rf"""{_DATE_FUNCTION}\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")

_UNDEFINED_DATE = "the_date_of_today"
"""A name that no template defines: a variable set to it counts as undefined."""


def load_template(
    data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> str | None:
    """Returns the config's template, from a file or inline; None to use the tokenizer's own.

    With data.chat_template_kwargs, returns either one with these as defaults of its variables.

    Raises: UserError if neither exists, if the template is not valid Jinja, for a
        data.chat_template_date that it does not write, and for variables that it does not have.
    """
    import jinja2.meta
    from transformers.utils import chat_template_utils

    template = data.chat_template
    if template is not None:
        texts = [resolve_template(template)]
        value = "..." if texts == [template] else template
    elif tokenizer.chat_template:
        named = tokenizer.chat_template
        texts = list(named.values()) if isinstance(named, dict) else [named]
        value = "null: the tokenizer's chat template"
    else:
        raise UserError(
            "data.chat_template = null: the tokenizer has no chat template of its own. Give a "
            "file: data.chat_template=template.jinja.",
            is_named=True,
        )
    with at("data.chat_template", value):
        for text in texts:
            try:
                # without a conversation, the template is only compiled
                chat_template_utils.render_jinja_template([], chat_template=text)
            except jinja2.TemplateSyntaxError as error:
                raise UserError(
                    f"must be a Jinja template: line {error.lineno}: {error.message}."
                ) from None
            # Jinja and Python's compiler raise any error for a template that is too deep or large
            except Exception as error:
                raise UserError(f"cannot be compiled: {_explain_failure(error)}.") from None
    if data.chat_template_date is not None and not any(_DATE_FUNCTION in text for text in texts):
        raise UserError(
            f"data.chat_template_date = {data.chat_template_date}: the chat template writes no "
            "date (strftime_now). Remove it.",
            is_named=True,
        )
    if not data.chat_template_kwargs:
        return None if template is None else texts[0]
    if len(texts) > 1:
        raise UserError(
            "data.chat_template_kwargs: the tokenizer has several chat templates. Use "
            "data.chat_template to choose one.",
            is_named=True,
        )
    known = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(texts[0]))
    defaults = ""
    for name, default in data.chat_template_kwargs.items():
        if name in _RESERVED_KWARGS or name not in known:
            raise UserError(
                f"data.chat_template_kwargs.{name}: the chat template has no variable of this "
                "name. Correct or remove it.",
                is_named=True,
            )
        defaults += f"{{% if {name} is not defined %}}{{% set {name} = {default!r} %}}{{% endif %}}"
    return f"{defaults}\n{texts[0]}"  # Jinja drops the line break after the tag


def resolve_template(chat_template: str) -> str:
    """Returns data.chat_template if it is a template, else the content of the file it names."""
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    with at("data.chat_template", chat_template):
        path = files.expand_user(chat_template)
        try:
            return files.read_text(path)
        except FileNotFoundError:
            raise UserError(
                f"no such file below {pathlib.Path.cwd()}, and not a template, which would contain "
                "{{ or {%. Give a file, or null for the tokenizer's own."
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read: {error}.") from None


class TemplateRenderer:
    """Renders messages as `tokenizer.apply_chat_template` does, with the spans of its marks.

    A RenderFunction. A template that writes today's date writes the config's date instead, so that
    tokens do not change from day to day. Without one it writes a fallback (Llama 3.2's) or fails.
    """

    def __init__(
        self,
        record: dict[str, Any],
        *,
        tokenizer: "transformers.PreTrainedTokenizerBase",
        template: str | None,
        with_marks: bool,
        date: datetime.date | None = None,
    ):
        """Prepares a template (None: the tokenizer's own) for a record's tools and arguments.
        Args: with_marks: return the spans of {% generation %} marks, if the template has some.
        Raises: UserError if the record does not fit the template."""
        self._tools = record.get("tools") or None  # for [], some templates mention tools
        kwargs = record.get("chat_template_kwargs") or {}
        for name in _RESERVED_KWARGS:
            if name in kwargs:
                raise UserError(f"chat_template_kwargs cannot set {name}.")
        self._kwargs = {**tokenizer.special_tokens_map, **kwargs}
        try:
            text = tokenizer.get_chat_template(template, self._tools)
        except ValueError:  # the tokenizer has several templates, and none for this record
            raise UserError(
                "the tokenizer has no chat template for it. Set data.chat_template."
            ) from None
        if _DATE_FUNCTION in text:
            value = _UNDEFINED_DATE
            if date is not None:
                value = repr(date.isoformat())
                # replaced, because transformers passes no functions to a template
                text = _DATE_CALL.sub(lambda call: repr(date.strftime(call[2])), text)
            # Jinja drops the line break after the tag, so the template's first line stays the first
            text = f"{{% set {_DATE_FUNCTION} = {value} %}}\n{text}"
        self.template = text
        self.has_marks = with_marks and spans.has_generation_marks(text)
        if self._tools is not None:
            messages = spans.list_messages(record)
            if self(messages)[0] == self(messages, has_tools=False)[0]:
                raise UserError(
                    "the chat template ignores tools. Remove the tools, or use a template that "
                    "supports them."
                )

    def __call__(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        prompt: bool = False,
        is_open: bool = False,
        marks_loops: bool = False,
        has_tools: bool = True,
    ) -> tuple[str, TextSpans]:
        """Returns the text of messages, and its marked spans.
        Args:
            prompt: append the generation prompt.
            is_open: leave out the end of the last message.
            marks_loops: add the marks of `spans.mark_loops`.
        Raises: UserError if the template fails."""
        from transformers.utils import chat_template_utils

        template = spans.mark_loops(self.template) if marks_loops else self.template
        try:
            rendered: Any = chat_template_utils.render_jinja_template(
                [list(messages)],
                tools=self._tools if has_tools else None,
                chat_template=template,
                return_assistant_tokens_mask=self.has_marks,
                add_generation_prompt=prompt,
                continue_final_message=is_open,
                **self._kwargs,
            )
        except Exception as error:  # raise_exception's, or any that Python raises in a template
            raise UserError(f"the chat template refuses it: {_explain_failure(error)}.") from None
        (text,), marks = rendered
        return text, marks[0] if self.has_marks else []


def make_prompt_renderer(
    data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> TemplateRenderer:
    """Makes a renderer of chats that are not records. Raises: UserError without a template, and for
    variables that it does not have."""
    template = load_template(data, tokenizer)
    date = data.chat_template_date
    with at("chat template"):
        return TemplateRenderer(
            {}, tokenizer=tokenizer, template=template, with_marks=False, date=date
        )


def _explain_failure(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
    if _UNDEFINED_DATE in reason:
        return (
            "it writes today's date, so tokens would change from day to day. Set the "
            "date to write, such as data.chat_template_date=2026-11-25"
        )
    return reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """End of an assistant's turn in a template."""

    text: str = ""
    """Text that the template writes after an assistant message; empty if unknown or none."""
    markers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens that end a turn because the template writes no end token, by the role of the
    next message."""
    special_token: re.Pattern[str]
    """Matches a special token of the tokenizer."""

    @property
    def stops(self) -> list[list[str]]:
        """Alternative ends of a turn, each as its special tokens, which follow each other.
        Generation must stop at one token of each. Empty if a turn ends with ordinary text."""
        if self.markers:
            return [[marker] for marker in self.markers.values()]
        tokens = []
        place = len(self.text) - len(self.text.lstrip())
        while found := self.special_token.match(self.text, place):
            tokens.append(found.group())
            place = found.end()
        return [tokens] if tokens else []

    def complete(self, messages: Messages) -> str:
        """Returns the end that a template leaves out after the last message of a conversation."""
        last = messages[-1]
        if not self.markers or last["role"] != ASSISTANT:
            return ""
        next_role = "tool" if spans.list_tool_calls(last) else "user"
        return self.markers.get(next_role, self.markers["user"])

    def extend(self, text: str, end: int) -> int:
        """Returns the end of a span of text, including the role marker that ends the turn."""
        found = self.special_token.match(text, end) if self.markers else None
        return end if found is None else found.end()


@functools.lru_cache(maxsize=16)
def find_turn_end(tokenizer: "transformers.PreTrainedTokenizerBase", template: str) -> TurnEnd:
    """Finds the end of turns in a template. Nothing is found if it refuses the probe."""
    # the longest first: one token may begin with another
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    special_token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    render = TemplateRenderer({}, tokenizer=tokenizer, template=template, with_marks=False)
    words = spans.unused_words(template)
    contents = [next(words) for _ in range(3)]
    # text after the answer, by the role of the next message; "": none follows
    ends = {}
    for role in ("", "user", "tool"):
        roles = filter(None, ("user", ASSISTANT, role))
        pairs = zip(roles, contents, strict=False)
        with contextlib.suppress(UserError):
            text, _ = render([{"role": name, "content": content} for name, content in pairs])
            _, answer, rest = text.partition(contents[1])
            if answer:
                ends[role] = rest.partition(contents[2])[0]
    if "" not in ends:
        return TurnEnd(special_token=special_token)
    at_end = ends.pop("")
    if at_end.strip():
        # some templates write one more token at the end of a conversation
        between = ends.get("user", "")
        text = at_end[: spans.common_prefix_length(at_end, between)]
        return TurnEnd(text=text if text.strip() else at_end, special_token=special_token)
    found = {role: special_token.match(end, len(at_end)) for role, end in ends.items()}
    markers = {role: match.group() for role, match in found.items() if match}
    return TurnEnd(markers=markers if "user" in markers else {}, special_token=special_token)
