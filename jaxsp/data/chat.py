"""A conversation, or a prompt and its completion, becomes a text and the parts of it that are learned.

Three turns, as ChatML writes them; what is learned of them is between the bars, the end mark with it:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n|Hello.<|im_end|>\n|

Where the template has {% generation %} marks, they say what is learned. Where it has none, the parts are found by rendering
the conversation in pieces, and are taken only if they prove right:

1.  By prefixes. What the template writes up to an assistant's turn, with its generation prompt, and what it writes up to the
    turn's end, have both to be beginnings of the whole text.
2.  Some templates write a turn differently when others follow (Qwen3 cuts the thinking out of earlier turns; a prefix ends
    with a last turn, which keeps it). There, each assistant's turn is put between pairs of short turns that are not in the
    conversation. Where they stand in the text is where the turn begins and ends, if the text without them is the whole
    text again, character for character.

Whatever this does not settle is refused, never guessed. The text is that of the template in any case: where it cuts the
thinking out of earlier turns, that thinking is not learned.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxsp.core import config, errors

if TYPE_CHECKING:
    import transformers

_MARKS = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")

_ASSISTANT = "assistant"

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which transformers takes a message's thinking."""

_OURS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation", "continue_final_message")
"""What chat_template_kwargs cannot set."""

_WAY_OUT = (
    "use data.train_on=all, or as data.chat_template one with {% generation %} around what the assistant says (TRL has such "
    "templates for many models)"
)


class Refused(ValueError):
    """Why a record cannot be learned from; the text names the reason and, where there is one, the way out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A record as text."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    """Parts of the text, first character and end; None: all."""
    exact: bool = True
    """Whether a token that lies half in a part is refused. If not, it is learned."""
    is_plain: bool = False
    """Whether the tokenizer's special tokens are still to be put around the text, and the end token behind it."""


Render = Callable[..., str]
"""(messages, prompt=False) -> the template's text of them, with the generation prompt if asked for."""


def template(data: config.Data, tokenizer: "transformers.PreTrainedTokenizerBase") -> str | None:
    """The template that the config gives instead of the tokenizer's: of a file, or written out; None for the tokenizer's own.

    Raises: UserError where there is neither, or it is no Jinja.
    """
    import jinja2
    from transformers.utils import chat_template_utils

    asked = data.chat_template
    if asked is None:
        if not tokenizer.chat_template:
            raise errors.UserError(
                "data.chat_template = null: the tokenizer has no chat template of its own. Give a file: "
                "data.chat_template=template.jinja."
            )
        named = tokenizer.chat_template
        texts, what = list(named.values()) if isinstance(named, dict) else [named], "null: the tokenizer's chat template"
    else:
        is_text = "{%" in asked or "{{" in asked
        path = pathlib.Path(asked).expanduser()
        what = "..." if is_text else asked
        try:
            # a whole template is too long for a file's name, and asking for it would be an OSError
            texts = [asked if is_text else path.read_text(encoding="utf-8")]
        except FileNotFoundError:
            raise errors.UserError(
                f"data.chat_template = {asked}: no such file below {pathlib.Path.cwd()}, and no template either, which would "
                "hold {{ or {%. Give a file, or null for the tokenizer's own."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise errors.UserError(f"data.chat_template = {asked}: cannot be read: {error}.") from None
    for text in texts:
        try:
            chat_template_utils.render_jinja_template([], chat_template=text)  # of no conversation: it is only compiled
        except jinja2.TemplateSyntaxError as error:
            raise errors.UserError(
                f"data.chat_template = {what}: is no Jinja template: line {error.lineno}: {error.message}."
            ) from None
    return None if asked is None else texts[0]


def render(
    record: dict[str, Any],
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase",
    template: str | None,
    train_on: str,
) -> Rendered:
    """The text of a record of `messages`, or of `prompt` and `completion`, and what of it is learned.

    Raises: Refused.
    Source: TRL 1.16's SFTTrainer, whose ids and labels these become for the same template: `assistant_only_loss` for messages,
        `completion_only_loss` for prompt and completion. Differs: TRL has templates of its own for the models it knows, and
        puts them in the place of one without marks; a prompt that is written differently when its completion follows is
        refused (TRL learns from where they part), unless only the generation prompt is.
    """
    if "messages" in record:
        messages = _messages(record["messages"], "messages")
        return _conversation(messages, *_renderer(record, tokenizer, template), train_on=train_on)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        learned = None if train_on == "all" else ((len(prompt), len(prompt) + len(completion)),)
        return Rendered(text=prompt + completion, learned=learned, exact=False, is_plain=True)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise Refused("prompt and completion are text and messages; both have to be the same")
    return _completion(
        _messages(prompt, "prompt"),
        _messages(completion, "completion"),
        *_renderer(record, tokenizer, template),
        train_on=train_on,
    )


def _messages(given: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in given):
        raise Refused(f"{name} is no list of messages, each with a role")
    if not given:
        raise Refused(f"{name} is empty: a conversation has at least one message")
    # as transformers does: for templates, a missing key is not the same as null
    return [{name: value for name, value in message.items() if value is not None} for message in given]


def _renderer(
    record: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase", template: str | None
) -> tuple[Callable[..., tuple[str, list[tuple[int, int]]]], bool]:
    """Renders messages as `tokenizer.apply_chat_template` does, with the parts that its marks name; whether there are marks."""
    from transformers.utils import chat_template_utils

    tools = record.get("tools") or None  # [] would make some templates speak of tools
    kwargs = record.get("chat_template_kwargs") or {}
    if taken := [name for name in _OURS if name in kwargs]:
        raise Refused(f"chat_template_kwargs cannot set {taken[0]}")
    try:
        text = tokenizer.get_chat_template(template, tools)
    except ValueError:  # several templates, and none for this
        raise Refused("the tokenizer has no chat template for it: give one as data.chat_template") from None
    marked = bool(_MARKS.search(text))

    def rendered(
        messages: Sequence[dict[str, Any]], *, prompt: bool = False, with_tools: bool = True
    ) -> tuple[str, list[tuple[int, int]]]:
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

    def refusing(*args: Any, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        try:
            return rendered(*args, **options)
        except Exception as error:  # raise_exception's, or any that Python raises in a template
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Refused(f"the chat template refuses it: {reason.rstrip('.')}") from None

    if tools is not None:
        messages = [one for name in ("messages", "prompt", "completion") for one in record.get(name) or []]
        messages = _messages(messages, "messages")
        if refusing(messages)[0] == refusing(messages, with_tools=False)[0]:
            raise Refused("the chat template ignores tools. Leave them out, or give a template that knows them")
    return refusing, marked


def _conversation(
    messages: list[dict[str, Any]], rendered: Callable[..., tuple[str, list[tuple[int, int]]]], marked: bool, *, train_on: str
) -> Rendered:
    whole, marks = rendered(messages)
    _check_all_there(messages, whole)
    if train_on == "all":
        return Rendered(text=whole)
    turns = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
    if not turns:
        raise Refused(
            f"has no turn of the role {_ASSISTANT} to learn from: say what the source calls it with roles, or use "
            "data.train_on=all"
        )
    if marked:
        parts = [(start, end) for start, end in marks if start < end]
        said = "".join(whole[start:end] for start, end in parts)
        if any(words not in said for words in _words(messages[turns[-1]])):
            raise Refused("the template's {% generation %} marks leave out what the assistant says")
        return Rendered(text=whole, learned=tuple(parts), exact=False)

    def render(messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        return rendered(messages, prompt=prompt)[0]

    found = _by_prefixes(messages, turns, whole, render) or _by_insertion(messages, turns, whole, render)
    if found is None:
        raise Refused(
            "the chat template has no {% generation %} marks, and writes turns differently when others follow, so that what "
            f"the assistant says cannot be told apart: {_WAY_OUT}"
        )
    for turn, (start, end) in zip(turns, found, strict=True):
        _check_turn(messages[turn], turn, whole[start:end])
    return Rendered(text=whole, learned=tuple(found))


def _by_prefixes(messages: list[dict[str, Any]], turns: list[int], whole: str, render: Render) -> list[tuple[int, int]] | None:
    """What follows the generation prompt, up to the turn's end; None if a prefix is no beginning of the whole text."""
    parts = []
    for turn in turns:
        try:
            before = render(messages[:turn], prompt=True)
            after = render(messages[: turn + 1]) if turn + 1 < len(messages) else whole
        except Refused:  # of an empty conversation, or of one that stops in the middle
            return None
        if not whole.startswith(before) or not whole.startswith(after) or len(after) <= len(before):
            return None
        parts.append((len(before), len(after)))
    return parts


def _by_insertion(messages: list[dict[str, Any]], turns: list[int], whole: str, render: Render) -> list[tuple[int, int]] | None:
    """Where turns begin and end, by turns put between them; None if they change more than they add."""
    borders = sorted({border for turn in turns for border in (turn, turn + 1) if border < len(messages)})
    words = [_unlike(whole, number) for number in range(2 * len(borders))]
    mixed = []
    for number, message in enumerate(messages):
        if number in borders:
            place = 2 * borders.index(number)
            mixed += [{"role": _ASSISTANT, "content": word} for word in words[place : place + 2]]
        mixed.append(message)
    try:
        with_prompt, text = render(messages, prompt=True), render(mixed)
    except Refused:  # of roles that have to alternate
        return None
    prompt = with_prompt.removeprefix(whole)
    if not prompt or prompt == with_prompt:
        return None

    def header(begin: int, word: str) -> int:
        """Where the turn that says the word begins; -1 where that is not seen."""
        end = text.find(word, begin)
        found = text.rfind(prompt, begin, end)
        # the prompt of a model that thinks may hold more than the header of a turn
        sizes = (size for size in range(len(prompt), 0, -1) if text.endswith(prompt[:size], begin, end))
        return -1 if end < 0 else found if found >= 0 else end - next(sizes, end + 1)

    starts, headers, seen, at = {}, {}, 0, 0
    for border, first, second in zip(borders, words[::2], words[1::2], strict=True):
        one = header(seen, first)
        first_end = text.find(first, seen) + len(first)
        two = header(first_end, second)
        if one < 0 or two < 0 or not whole.startswith(text[seen:one], at):
            return None
        at += one - seen
        starts[border], headers[border] = at, text[one : first_end - len(first)]
        ending = text[first_end:two]
        second_end = text.find(second, two) + len(second)
        if not text.startswith(ending, second_end):
            return None
        seen = second_end + len(ending)
    if text[seen:] != whole[at:]:
        return None
    parts = []
    for turn in turns:
        known = [
            words for words in (prompt, headers[turn]) if prompt.startswith(words) and whole.startswith(words, starts[turn])
        ]
        if not known:
            return None
        parts.append((starts[turn] + len(known[0]), starts.get(turn + 1, len(whole))))
    return parts


def _unlike(whole: str, number: int) -> str:
    """A word that no template changes and that does not stand in a text."""
    word = f"Qx{number}z"
    while word in whole:
        word = f"Q{word}"
    return word


def _completion(
    prompt: list[dict[str, Any]],
    completion: list[dict[str, Any]],
    rendered: Callable[..., tuple[str, list[tuple[int, int]]]],
    marked: bool,
    *,
    train_on: str,
) -> Rendered:
    whole, _ = rendered(prompt + completion)
    _check_all_there(prompt + completion, whole)
    if train_on == "all":
        return Rendered(text=whole)
    alone, _ = rendered(prompt)
    asked, _ = rendered(prompt, prompt=True)
    start = _shared(asked, whole)
    if start < min(len(asked), _shared(alone, asked)):
        raise Refused(
            "the chat template writes the prompt differently when the completion follows, so that what is learned cannot be "
            "told apart: use data.train_on=all, or a template that does not"
        )
    said = whole[start:]
    if any(words not in said for message in completion for words in _words(message)):
        raise Refused("the chat template drops what the completion says")
    return Rendered(text=whole, learned=((start, len(whole)),), exact=False)


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _words(message: dict[str, Any]) -> list[str]:
    """What a template has to write of a message, however it trims it and whatever thinking it cuts."""
    content = message.get("content", "")
    if isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    else:
        parts = []
    if message["role"] == _ASSISTANT:
        parts = [part.rpartition("</think>")[2] for part in parts]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        parts.append(function.get("name", "") if isinstance(function, dict) else "")
    return [part.strip() for part in parts if isinstance(part, str) and part.strip()]


def _thinking(message: dict[str, Any]) -> str:
    """What a message says of its thinking, in a field or in its content."""
    content = message.get("content", "")
    inside = content.rpartition("</think>")[0].rpartition("<think>")[2] if isinstance(content, str) else ""
    return next((message[name] for name in _REASONING if isinstance(message.get(name), str)), inside).strip()


def _check_all_there(messages: list[dict[str, Any]], whole: str) -> None:
    """Raises: Refused where a message, or a part of it, is not in the text."""
    at = 0
    for number, message in enumerate(messages, 1):
        moves = message["role"] not in ("system", "developer")  # what these say may stand elsewhere
        for words in _words(message):
            # what a tool says may be written as JSON
            ways = {words, json.dumps(words, ensure_ascii=False)[1:-1]}
            ends = [place + len(way) for way in ways if (place := whole.find(way, at if moves else 0)) >= 0]
            if not ends:
                raise Refused(f"the chat template drops what message {number} ({message['role']}) says")
            at = min(ends) if moves else at
    last = next((message for message in reversed(messages) if message["role"] == _ASSISTANT), None)
    if last is not None and _thinking(last) not in whole:
        raise Refused(
            "the chat template drops the thinking of the assistant's last turn. Leave it out, or give another template"
        )


def _check_turn(message: dict[str, Any], number: int, said: str) -> None:
    """Raises: Refused where a part found in the text is not what the assistant says and its end mark."""
    at = 0
    for words in _words(message):
        found = said.find(words, at)
        if found < 0:
            raise Refused(f"what message {number + 1} ({_ASSISTANT}) says is not where the chat template ends the prompt")
        at = found + len(words)
    if not said[at:].strip():
        raise Refused(
            f"the chat template puts no end mark behind message {number + 1} ({_ASSISTANT}), so that the model would not learn "
            f"to stop: {_WAY_OUT}"
        )
