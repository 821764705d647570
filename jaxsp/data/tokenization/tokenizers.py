"""Which tokenizer makes the tokens: one of our own, a folder's, or the hub's."""

import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

from jaxsp.core import paths
from jaxsp.core.errors import UserError

if TYPE_CHECKING:
    import transformers

# transformers prints on import that PyTorch was not found, which jaxsp does not need
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

BYTE_TOKENIZER = "bytes"
"""The name of the tokenizer of our own making."""


def make_byte_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """A tokenizer that needs no files: token id = byte value, and 256 is the end of a document.

    Source: byte-level BPE (GPT-2) without merges. Its alphabet writes bytes as printable characters in another order
        than their values, so the vocabulary names each one.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    # the alphabet's bytes that are printable stand for themselves, the rest follow from 256 in the order of their values
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # "<eos>" in a text is five bytes, not the end of a document
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", split_special_tokens=True
    )


def load(name: str, *, error_prefix: str | None = None) -> "transformers.PreTrainedTokenizerBase":
    """The tokenizer of a folder or of the hub, or BYTES. Raises: UserError if there is none, or it makes no tokens.

    Args: asked: how a message about it begins; model.tokenizer and the name by default.
    """
    import transformers

    if name == BYTE_TOKENIZER:
        return make_byte_tokenizer()
    error_prefix = error_prefix or f"model.tokenizer = {name}:"
    way_out = (
        f"As model.tokenizer, give a folder with tokenizer.json, a hub name, or {BYTE_TOKENIZER}."
    )
    if paths.is_path(name) and not pathlib.Path(name).exists():
        raise UserError(f"{error_prefix} there is no such folder. {way_out}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (
        Exception
    ) as error:  # transformers and tokenizers raise a bare Exception for some broken files
        reason = next(iter(str(error).splitlines()), type(error).__name__).strip().rstrip(":.")
        raise UserError(f"{error_prefix} cannot be loaded: {reason}. {way_out}") from None
    if not tokenizer("some text 1", add_special_tokens=False)["input_ids"]:
        raise UserError(f"{error_prefix} has an empty vocabulary, text becomes nothing. {way_out}")
    return tokenizer


def is_loaded_unchanged(
    tokenizer: "transformers.PreTrainedTokenizerBase", folder: str | os.PathLike[str]
) -> bool:
    """Whether AutoTokenizer makes of an exported folder what was put there.

    It does not always: of a folder with model_type qwen2 it makes a Qwen2Tokenizer, whatever the folder says.
    """
    import transformers

    probe = "e\u0301 caf\u00e9\n\t2026 x_1"
    # else transformers asks on the terminal whether to run what tokenizer_config.json names
    loaded = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return (
        len(loaded) == len(tokenizer)
        and loaded(probe)["input_ids"] == tokenizer(probe)["input_ids"]
    )


def serialize_files(tokenizer: "transformers.PreTrainedTokenizerBase") -> list[tuple[str, bytes]]:
    """Everything that a tokenizer is made of but its chat templates, as the files that it would save."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [
            path
            for path in sorted(pathlib.Path(folder).rglob("*"))
            if path.is_file() and path.suffix != ".jinja"
        ]
        return [(path.name, path.read_bytes()) for path in files]
