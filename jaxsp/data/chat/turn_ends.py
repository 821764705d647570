"""Finds the tokens that end the assistant's turns in a chat template, by rendering a probe.

Most templates write an end token after each message. GLM-4's write none: there the model stops with
the role marker of the next message, which is missing after the last one. jaxsp adds it (the loss
covers what is between two bars):

    [gMASK]<sop><|user|>\\nHi<|assistant|>|\\nHello.<|user|>|\\nBye<|assistant|>|\\nBye.<|user|>|
"""

import dataclasses
import functools
import re
from typing import TYPE_CHECKING

from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.chat_template import TemplateRenderer
from jaxsp.data.chat.template_text import ASSISTANT, Messages

if TYPE_CHECKING:
    import transformers

_USER = "user"
_TOOL = "tool"


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
        next_role = _TOOL if template_text.list_tool_calls(last) else _USER
        return self.markers.get(next_role, self.markers[_USER])

    def extend(self, text: str, end: int) -> int:
        """Returns the end of a span of text, including the role marker that ends the turn."""
        found = self.special_token.match(text, end) if self.markers else None
        return end if found is None else found.end()


@functools.lru_cache(maxsize=16)
def find(tokenizer: "transformers.PreTrainedTokenizerBase", template: str) -> TurnEnd:
    """Finds the end of turns in a template. Nothing is found if it refuses the probe."""
    # the longest first: one token may begin with another
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    special_token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    render = TemplateRenderer({}, tokenizer=tokenizer, template=template, with_marks=False)
    words = template_text.unused_words(template)
    question, answer, reply = (next(words) for _ in range(3))

    def render_after_answer(*followers: str) -> str | None:
        """Returns the text after the answer, up to the reply with the role of a follower."""
        roles = (_USER, ASSISTANT, *followers)
        pairs = zip(roles, (question, answer, reply), strict=False)
        try:
            text, _ = render([{"role": role, "content": content} for role, content in pairs])
        except UserError:
            return None
        _, found, rest = text.partition(answer)
        return rest.partition(reply)[0] if found else None

    at_end = render_after_answer()
    if at_end is None:
        return TurnEnd(special_token=special_token)
    between = render_after_answer(_USER) or ""
    if at_end.strip():
        # some templates write one more token at the end of a conversation
        text = at_end[: template_text.common_prefix_length(at_end, between)]
        return TurnEnd(text=text if text.strip() else at_end, special_token=special_token)
    markers = {}
    for role, follower in ((_USER, between), (_TOOL, render_after_answer(_TOOL) or "")):
        found = special_token.match(follower, len(at_end))
        if found is not None:
            markers[role] = found.group()
    return TurnEnd(markers=markers if _USER in markers else {}, special_token=special_token)
