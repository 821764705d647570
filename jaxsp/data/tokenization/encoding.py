"""Texts become token ids and labels, by one tokenisation of each whole text.

What is learned is told by characters. A text that is tokenised in parts has other tokens at the borders:

    text       <|im_start|> assistant \\n |Hi <|im_end|> \\n|      the bars: what is learned
    tokens       256          3412    198 13347  257    198
    labels      -100          -100   -100 13347  257    198
"""

import contextlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.data.chat.chat import RenderedRecord
from jaxsp.data.chat.template_text import RecordError

if TYPE_CHECKING:
    import transformers

EncodedRecord = tuple[np.ndarray, np.ndarray | None] | RecordError
"""Ids and labels, int32, not shifted (no labels: every token is learned); or why there are none."""


def encode_texts(
    rendered: Sequence[RenderedRecord | RecordError],
    tokenizer: "transformers.PreTrainedTokenizerBase",
) -> list[EncodedRecord]:
    """The tokens of each text and its labels; what was refused stays so.

    A plain text gets the tokenizer's own special tokens, then its end token, if it has one and the text does not end with it
    already (as in TRL, which adds a second one where the tokenizer itself ends with it). A text without a token of its own gets
    none, and is empty.

    Text of special tokens inside a content becomes those tokens, as everywhere in transformers; it moves no label.
    """
    encoded: list[Any] = list(rendered)
    # tokenised together: what needs no labels also needs no places of tokens, and special tokens are of plain texts alone
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for number, one in enumerate(rendered):
        if isinstance(one, RenderedRecord):
            kinds.setdefault((one.loss_spans is not None, one.is_plain), []).append(number)
    for (has_labels, is_plain), chosen in kinds.items():
        make = _encode_with_labels if has_labels else _encode_without_labels
        made = make([encoded[number] for number in chosen], tokenizer, is_plain=is_plain)
        for number, result in zip(chosen, made, strict=True):
            encoded[number] = result
    return encoded


def _encode_without_labels(
    rendered: Sequence[RenderedRecord], tokenizer: Any, *, is_plain: bool
) -> Iterator[EncodedRecord]:
    texts = [one.text for one in rendered]
    end = tokenizer.eos_token_id if is_plain else None
    if _is_fast(tokenizer):
        _reset_backend(tokenizer)
        # 1.6 us a token; numbers to Python and to an array take 0.04, a BatchEncoding of it would take as much again
        lists = [
            one.ids
            for one in tokenizer.backend_tokenizer.encode_batch_fast(
                texts, add_special_tokens=is_plain
            )
        ]
    else:
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        lists = tokenizer(texts, add_special_tokens=is_plain, **options)["input_ids"]
    num_special = tokenizer.num_special_tokens_to_add(pair=False) if is_plain else 0
    for ids in lists:
        made = ids if len(ids) > num_special else []
        if made and end is not None and made[-1] != end:
            made.append(end)
        yield np.fromiter(made, np.int32, len(made)), None


def _encode_with_labels(
    rendered: Sequence[RenderedRecord], tokenizer: Any, *, is_plain: bool
) -> Iterator[EncodedRecord]:
    if not _is_fast(tokenizer):
        name = type(tokenizer).__name__
        problem = f"{name} does not say where its tokens stand: use data.train_on=all, or a tokenizer with a tokenizer.json"
        yield from [RecordError(problem)] * len(rendered)
        return
    _reset_backend(tokenizer)
    before, after = _surrounding_tokens(tokenizer) if is_plain else ([], [])
    end = tokenizer.eos_token_id if is_plain else None
    with _without_post_processor(tokenizer.backend_tokenizer) as backend:
        encodings = backend.encode_batch([one.text for one in rendered], add_special_tokens=False)
    for one, encoding in zip(rendered, encodings, strict=True):
        ids = [*before, *encoding.ids, *after] if encoding.ids else []
        if ids and end is not None and ids[-1] != end:
            ids.append(end)
        tokens = np.fromiter(ids, np.int32, len(ids))
        labels = np.full_like(tokens, NO_LABEL)
        try:
            for start, stop in one.loss_spans or ():
                first, last = _find_tokens(
                    encoding, start, stop, exact=one.has_exact_spans, text=one.text
                )
                last = len(ids) if is_plain else last  # with the end token
                labels[len(before) + first : len(before) + last] = tokens[
                    len(before) + first : len(before) + last
                ]
            if (labels == NO_LABEL).all():
                raise RecordError("there is no token in it to learn")
        except RecordError as problem:
            yield problem
        else:
            yield tokens, labels


def _find_tokens(
    encoding: Any, start: int, stop: int, *, exact: bool, text: str
) -> tuple[int, int]:
    """The first of the tokens of a part of a text, and the end of them. Raises: Refused where they are not the part's alone.

    Source: transformers' `return_assistant_tokens_mask`. Differs: the last character may be several tokens, which are all
        learned; and the tokens' characters are not trimmed, so that a part may begin with a space.
    """
    # characters that the tokenizer's normalizer dropped have no token
    first = next(
        (
            token
            for place in range(start, stop)
            if (token := encoding.char_to_token(place)) is not None
        ),
        None,
    )
    if first is None:
        return len(encoding), len(encoding)
    last = next(
        token
        for place in range(stop - 1, start - 1, -1)
        if (token := encoding.char_to_token(place)) is not None
    )
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1)[0] < stop:
        last += 1
    begins, ends = encoding.token_to_chars(first)[0], encoding.token_to_chars(last)[1]
    # an accent that became one character with the letter before it
    is_joined = bool(unicodedata.combining(text[start])) and encoding.char_to_token(start) is None
    if exact and (is_joined or begins < start or ends > stop):
        place = start if is_joined or begins < start else stop
        around = f"{text[max(place - 12, 0) : place]!r} and the beginning of {text[place : place + 12]!r}"
        raise RecordError(
            f"one token holds the end of {around}, and the assistant says but one of them: change what the turn begins or "
            "ends with (line breaks, mostly), or use data.train_on=all, or a chat template with {% generation %}"
        )
    return first, last + 1


def _is_fast(tokenizer: Any) -> bool:
    """Whether its ids are those of its backend, called directly."""
    import transformers

    fast = transformers.PreTrainedTokenizerFast
    return isinstance(tokenizer, fast) and type(tokenizer)._encode_plus is fast._encode_plus


def _reset_backend(tokenizer: Any) -> None:
    """Puts a backend into the state in which a call of its tokenizer would use it: nothing truncated, nothing padded."""
    tokenizer("", add_special_tokens=False)


@contextlib.contextmanager
def _without_post_processor(backend: Any) -> Iterator[Any]:
    """The backend without what it does after tokenising: adding special tokens, and taking spaces out of tokens' offsets."""
    kept = backend.post_processor
    backend.post_processor = None
    try:
        yield backend
    finally:
        backend.post_processor = kept


def _surrounding_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    encoding = tokenizer.backend_tokenizer.encode("a")
    own = [
        number for number, is_special in enumerate(encoding.special_tokens_mask) if not is_special
    ]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
