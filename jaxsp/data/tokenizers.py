"""Loads tokenizers: the built-in byte tokenizer, a folder's, or the hub's.

They are kept as their tokenizer.json defines them, where transformers' classes change them:
transformers 5 builds the backend of some classes itself and takes only the vocabulary from
tokenizer.json. For the model_type qwen2 it does so whatever tokenizer_config.json names, so that
models with the shape of DeepSeek-R1-Distill-Qwen would get other ids than they were trained with.

Converts rendered texts to token ids and labels; each text is tokenized as a whole.

Spans with loss are located by characters. Tokenizing a text in parts would give other tokens at the
borders of the parts:

    text       <|im_start|> assistant \\n |Hi <|im_end|> \\n|      bars: the span with loss
    tokens       256          3412    198 13347  257    198
    labels      -100          -100   -100 13347  257    198
"""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError
from jaxsp.system import distributed

if TYPE_CHECKING:
    import tokenizers
    import transformers


import unicodedata
from collections.abc import Sequence

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import at
from jaxsp.data.chat import RenderedRecord

# transformers prints on import that PyTorch was not found, which jaxsp does not need
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

BYTE_TOKENIZER = "bytes"

_FILE = "tokenizer.json"

_PROBE = "it's  12345 e\u0301\n\n\t\u4e2d\u6587 \U0001f600 eBay x"
"""Text whose tokens show whether two tokenizers split text in the same way."""

_TEKKEN_TOKEN = "[AVAILABLE_TOOLS]"
"""Control token of Mistral's Tekken vocabularies."""

_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that the converter for Mistral's files wrote by mistake."""

_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Mistral's Tekken tokenizers."""


def make_byte_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """Creates a tokenizer without files: token ids are byte values, and 256 ends a document.
    Source: byte-level BPE (GPT-2) without merges. Its alphabet has a printable character for each
    byte."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # the text "<eos>" becomes five bytes, not the end of a document
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", split_special_tokens=True
    )


def load(name: str) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer of a folder or of the hub, or BYTE_TOKENIZER.

    The first process prints where it differs from what transformers' AutoTokenizer loads.

    Raises: UserError if it cannot be loaded, or has an empty vocabulary.
    """
    import transformers

    if name == BYTE_TOKENIZER:
        return make_byte_tokenizer()
    suggestion = (
        f"Set model.tokenizer to a folder with tokenizer.json, a hub name, or {BYTE_TOKENIZER}."
    )
    if files.is_path(name) and not pathlib.Path(name).exists():
        raise UserError(f"there is no such folder. {suggestion}")
    if pathlib.Path(name).is_dir():
        files.check_model_folder(pathlib.Path(name))
    try:
        with convert_panics():
            # False: transformers would warn of Mistral's pattern, which _load_as_in_file corrects
            loaded = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, fix_mistral_regex=False
            )
            loaded.init_kwargs.pop("fix_mistral_regex", None)
            tokenizer, notes = _load_as_in_file(loaded, name)
            tokenizer("")  # fails for fields of wrong types
    except Exception as error:  # they raise a bare Exception for some broken files
        reason = errors.first_line(error)
        raise UserError(f"cannot be loaded: {reason}. {suggestion}") from None
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise UserError(f"has an empty vocabulary, so text has no tokens. {suggestion}")
    if distributed.this_process.index == 0:
        for note in notes:
            print(note, flush=True)
    return tokenizer


@contextlib.contextmanager
def convert_panics() -> Iterator[None]:
    """Raises RuntimeError for a panic of a Rust library, which `except Exception` would not catch.
    Its class is not public."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None


def serialize_files(tokenizer: "transformers.PreTrainedTokenizerBase") -> list[tuple[str, bytes]]:
    """Returns the files that a tokenizer saves, except its chat templates."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return [
            (path.name, path.read_bytes())
            for path in sorted(pathlib.Path(folder).rglob("*"))
            if path.is_file() and path.suffix != ".jinja"
        ]


def _load_as_in_file(
    tokenizer: "transformers.PreTrainedTokenizerBase", name: str
) -> tuple["transformers.PreTrainedTokenizerBase", list[str]]:
    """Returns the tokenizer that tokenizer.json defines, and notes for the user. Special tokens
    that only the class of `tokenizer` names are kept if the file has them.
    Args: tokenizer: AutoTokenizer's for this name; returned if there is no tokenizer.json."""
    import transformers
    from transformers.utils import hub

    notes = []
    fast = transformers.PreTrainedTokenizerFast
    if type(tokenizer) is not fast and hub.cached_file(
        name,
        _FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    ):
        from_file = fast.from_pretrained(name)
        missing: dict[str, Any] = {
            role: token
            for role, token in tokenizer.special_tokens_map.items()
            if role not in from_file.special_tokens_map
            and from_file.backend_tokenizer.token_to_id(str(token)) is not None
        }
        if missing:
            from_file = fast.from_pretrained(name, **missing)
        if tokenizer(_PROBE)["input_ids"] != from_file(_PROBE)["input_ids"]:
            notes.append(
                f"{name}: transformers' AutoTokenizer loads a {type(tokenizer).__name__} that "
                "gives other tokens than tokenizer.json. jaxsp uses tokenizer.json, like "
                f"transformers.PreTrainedTokenizerFast.from_pretrained({name!r})."
            )
        tokenizer = from_file
    if _correct_split(getattr(tokenizer, "backend_tokenizer", None)):
        notes.append(
            f"{name}: its tokenizer.json splits text by another pattern than Mistral's tokenizers "
            "do. jaxsp uses Mistral's, like transformers with fix_mistral_regex=True; so does the "
            "export."
        )
    return tokenizer, notes


def correct_file(directory: pathlib.Path) -> None:
    """Corrects the split pattern in a folder's tokenizer.json as `_load_as_in_file` does."""
    import tokenizers

    path = directory / _FILE
    if path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(path))
        if _correct_split(backend):
            backend.save(str(path))


def _correct_split(backend: "tokenizers.Tokenizer | None") -> bool:
    """Corrects a vocabulary of Mistral's whose text is split as Llama 3's; True if it was one."""
    import tokenizers
    from tokenizers import pre_tokenizers

    if backend is None or backend.token_to_id(_TEKKEN_TOKEN) is None or not backend.pre_tokenizer:
        return False
    steps: Any = backend.pre_tokenizer
    splits = json.loads(steps.__getstate__()).get("pretokenizers") or [{}]
    if splits[0].get("pattern") != {"Regex": _LLAMA_SPLIT}:
        return False
    steps[0] = pre_tokenizers.Split(tokenizers.Regex(_TEKKEN_SPLIT), behavior="isolated")
    return True


class TextEncoder:
    """Converts texts to token ids and labels.

    A plain text gets the special tokens that the tokenizer writes before a text, unless it begins
    with them, and an end token, unless it ends with one and white space: rendered chats have both.
    A text that has no tokens of its own gets no special tokens, and stays empty.

    Text of special tokens inside a content becomes those tokens, as everywhere in transformers; it
    moves no label.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._before, after = surrounding_tokens(tokenizer)
        end = tokenizer.eos_token_id
        self._after = after if end is None or after[-1:] == [end] else [end]
        self._end_text: str | None = tokenizer.eos_token

    def tokenize(self, documents: Sequence[RenderedRecord]) -> list[Any]:
        """Tokenizes texts together, for `encode`; None for all if it must tokenize them singly, to
        find the one that fails."""
        texts = [document.text for document in documents]
        has_labels = any(document.loss_spans is not None for document in documents)
        try:
            return self._tokenize(texts, has_labels=has_labels) if texts else []
        except UserError:
            return [None] * len(texts)

    def encode(
        self, document: RenderedRecord, encoding: Any
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns token ids and labels (int32, not shifted; None: every token has loss).
        Args: encoding: what `tokenize` returned for the document.
        Raises: UserError if the tokenizer fails, or a label would be uncertain."""
        if encoding is None:
            has_labels = document.loss_spans is not None
            (encoding,) = self._tokenize([document.text], has_labels=has_labels)
        ids = encoding if isinstance(encoding, list) else encoding.ids
        num_before = self._add_special_tokens(ids, document.text) if document.is_plain else 0
        tokens = np.fromiter(ids, np.int32, len(ids))
        if document.loss_spans is None:
            return tokens, None
        labels = np.full_like(tokens, NO_LABEL)
        for start, end in document.loss_spans:
            first, last = _find_tokens(encoding, start, end, document)
            # the completion of a plain text includes the end token
            span = slice(num_before + first, None if document.is_plain else num_before + last)
            labels[span] = tokens[span]
        if (labels == NO_LABEL).all():
            raise UserError("has no token with loss.")
        return tokens, labels

    def encode_prompt(self, text: str, *, is_plain: bool) -> list[int]:
        """Returns the tokens of a text that a model continues, without an end token.
        Args: is_plain: False for a rendered chat, which has its special tokens.
        Raises: UserError if the tokenizer fails."""
        with at("prompt"):
            (encoding,) = self._tokenize([text], has_labels=False)
        ids = encoding if isinstance(encoding, list) else encoding.ids
        has_before = not is_plain or ids[: len(self._before)] == self._before
        return ids if has_before else [*self._before, *ids]

    def _tokenize(self, texts: list[str], *, has_labels: bool) -> list[Any]:
        """Returns the ids of texts, or encodings with them; with offsets if they have labels.
        Raises: UserError if the tokenizer fails: a word-level tokenizer without an unknown token
        refuses words that it does not have."""
        tokenizer = self._tokenizer
        is_fast = _is_fast(tokenizer)
        if has_labels and not is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} does not report the offsets of its tokens: use "
                "data.train_on=all, or a tokenizer with a tokenizer.json."
            )
        try:
            with convert_panics():
                if not is_fast:
                    return tokenizer(
                        texts,
                        add_special_tokens=False,
                        return_attention_mask=False,
                        return_token_type_ids=False,
                        verbose=False,
                    )["input_ids"]
                # turns off truncation and padding in the backend
                tokenizer("", add_special_tokens=False)
                backend = tokenizer.backend_tokenizer
                if has_labels:
                    post_processor = backend.post_processor
                    backend.post_processor = None  # it would trim the offsets of tokens
                    try:
                        return backend.encode_batch(texts, add_special_tokens=False)
                    finally:
                        backend.post_processor = post_processor
                # 1.6 us a token; conversion to an array takes 0.04, and a BatchEncoding as much
                return backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"the tokenizer fails: {errors.first_line(error)}.") from None

    def _add_special_tokens(self, ids: list[int], text: str) -> int:
        """Adds tokens around the ids of a text; returns the number of those before it."""
        if not ids:
            return 0
        is_ended = ids[len(ids) - len(self._after) :] == self._after
        if not is_ended and self._end_text is not None:
            # or ends with the text of an end token, and at most white space after it
            tail = text.rpartition(self._end_text)[2]
            # this text may be ordinary tokens; white space has at most one for each byte
            num_last = len(tail.encode()) + 1
            is_ended = not tail.strip() and self._after[-1] in ids[-num_last:]
        if not is_ended:
            ids += self._after
        num_before = len(self._before)
        if ids[:num_before] == self._before:
            return 0
        ids[:0] = self._before
        return num_before


def _find_tokens(encoding: Any, start: int, end: int, record: RenderedRecord) -> tuple[int, int]:
    """Returns the first token of a span of text, and the end of its tokens.

    Source: transformers' `return_assistant_tokens_mask`. Differs: the last character may be several
        tokens, which all have loss; and the tokens' characters are not trimmed, so that a span may
        begin with a space.
    Raises: UserError for a token that lies partly in a span that must be exact.
    """
    # characters that the tokenizer's normalizer dropped have no token
    tokens = (encoding.char_to_token(place) for place in range(start, end))
    first = next((token for token in tokens if token is not None), None)
    if first is None:
        return len(encoding), len(encoding)
    tokens = (encoding.char_to_token(place) for place in range(end - 1, start - 1, -1))
    last = next(token for token in tokens if token is not None)
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1)[0] < end:
        last += 1
    text = record.text
    # an accent that became one character with the letter before it
    is_joined = bool(unicodedata.combining(text[start])) and encoding.char_to_token(start) is None
    is_early = is_joined or encoding.token_to_chars(first)[0] < start
    is_late = encoding.token_to_chars(last)[1] > end
    if record.has_exact_spans and (is_early or is_late):
        place = start if is_early else end
        raise UserError(
            f"one token contains the end of {text[max(place - 12, 0) : place]!r} and the beginning "
            f"of {text[place : place + 12]!r}, but only one of them is the assistant's: change how "
            "the message begins or ends (line breaks, mostly), or use data.train_on=all, or a chat "
            "template with {% generation %}."
        )
    return first, last + 1


def _is_fast(tokenizer: Any) -> bool:
    """Returns True if a direct call of the tokenizer's backend gives the same ids."""
    import transformers

    fast = transformers.PreTrainedTokenizerFast
    return isinstance(tokenizer, fast) and type(tokenizer)._encode_plus is fast._encode_plus


def surrounding_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens that the tokenizer puts before and after a text."""
    if not _is_fast(tokenizer):
        ids = tokenizer.build_inputs_with_special_tokens([-1])
        place = ids.index(-1)
        return ids[:place], ids[place + 1 :]
    backend = tokenizer.backend_tokenizer
    if backend.post_processor is None:
        return [], []
    import tokenizers

    # one token of a made-up vocabulary, because the tokenizer's own may lack any given text
    word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0})).encode("x")
    encoding = backend.post_process(word)
    place = encoding.special_tokens_mask.index(0)
    return encoding.ids[:place], encoding.ids[place + 1 :]
