"""Loads tokenizers: the built-in byte tokenizer, a folder's, or the hub's."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxsp.core import errors, files, paths
from jaxsp.core.errors import UserError, at
from jaxsp.data.tokenization import tokenizer_json
from jaxsp.processes import distributed

if TYPE_CHECKING:
    import transformers

# transformers prints on import that PyTorch was not found, which jaxsp does not need
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

BYTE_TOKENIZER = "bytes"


def make_byte_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """Creates a tokenizer without files: token ids are byte values, and 256 ends a document.

    Source: byte-level BPE (GPT-2) without merges. Its alphabet has a printable character for
        each byte.
    """
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


def load(name: str, *, error_prefix: str | None = None) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer of a folder or of the hub, or BYTE_TOKENIZER.

    The first process prints where it differs from what transformers' AutoTokenizer loads.

    Args: error_prefix: beginning of error messages; by default model.tokenizer and the name.
    Raises: UserError if it cannot be loaded, or has an empty vocabulary.
    """
    import transformers

    if name == BYTE_TOKENIZER:
        return make_byte_tokenizer()
    error_prefix = error_prefix or f"model.tokenizer = {name}:"
    suggestion = (
        f"Set model.tokenizer to a folder with tokenizer.json, a hub name, or {BYTE_TOKENIZER}."
    )
    if paths.is_path(name) and not pathlib.Path(name).exists():
        raise UserError(f"{error_prefix} there is no such folder. {suggestion}")
    if pathlib.Path(name).is_dir():
        with at(error_prefix.removesuffix(":")):
            files.check_model_folder(pathlib.Path(name))
    try:
        with convert_panics():
            # False: transformers would warn of Mistral's pattern, which load_as_in_file corrects
            loaded = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, fix_mistral_regex=False
            )
            loaded.init_kwargs.pop("fix_mistral_regex", None)
            tokenizer, notes = tokenizer_json.load_as_in_file(loaded, name)
            tokenizer("")  # fails for fields of wrong types
    except Exception as error:  # they raise a bare Exception for some broken files
        reason = errors.first_line(error)
        raise UserError(f"{error_prefix} cannot be loaded: {reason}. {suggestion}") from None
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise UserError(
            f"{error_prefix} has an empty vocabulary, so text has no tokens. {suggestion}"
        )
    if distributed.this_process().index == 0:
        for note in notes:
            print(note, flush=True)
    return tokenizer


@contextlib.contextmanager
def convert_panics() -> Iterator[None]:
    """Raises RuntimeError for a panic of a Rust library, which `except Exception` would not catch.

    Its class is not public.
    """
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
