"""Finds the tokens that end the assistant's turns in a chat template, by rendering a probe.

Most templates write an end token after each message. GLM-4's write none: there the model stops with
the role marker of the next message, which is missing after the last one. jaxsp adds it (the loss
covers what is between two bars):

    [gMASK]<sop><|user|>\\nHi<|assistant|>|\\nHello.<|user|>|\\nBye<|assistant|>|\\nBye.<|user|>|
"""

import contextlib
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
        next_role = "tool" if template_text.list_tool_calls(last) else "user"
        return self.markers.get(next_role, self.markers["user"])

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
        text = at_end[: template_text.common_prefix_length(at_end, between)]
        return TurnEnd(text=text if text.strip() else at_end, special_token=special_token)
    found = {role: special_token.match(end, len(at_end)) for role, end in ends.items()}
    markers = {role: match.group() for role, match in found.items() if match}
    return TurnEnd(markers=markers if "user" in markers else {}, special_token=special_token)
