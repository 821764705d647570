"""Loads tokenizers: the built-in byte tokenizer, a folder's, or the hub's.

They are kept as their tokenizer.json defines them, where transformers' classes change them:
transformers 5 builds the backend of some classes itself and takes only the vocabulary from
tokenizer.json. For the model_type qwen2 it does so whatever tokenizer_config.json names, so that
models with the shape of DeepSeek-R1-Distill-Qwen would get other ids than they were trained with.
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
