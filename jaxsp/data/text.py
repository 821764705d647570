"""Text becomes tokens, once: the result is cached on disk under the fingerprint of text and tokenizer."""

import functools
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsp.core import batch, config, errors
from jaxsp.data import sources

if TYPE_CHECKING:
    import datasets
    import transformers

BYTES = "bytes"
"""The name of the tokenizer of our own making."""

_VERSION = 1
"""Part of the cache's name: count up when the same text would become other tokens."""

_BATCH_BYTES = 2**24
"""Text given to the tokenizer at a time: documents can be 1 KB or 100 MB."""


def bytes_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """A tokenizer that needs no files: token id = byte value, and 256 is the end of a document.

    Source: byte-level BPE (GPT-2) without merges. Its alphabet writes bytes as printable characters in another order
        than their values, so the vocabulary names each one.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    # the alphabet's bytes that are printable stand for themselves, the rest follow from 256 in the order of their values
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # "<eos>" in a text is five bytes, not the end of a document
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", split_special_tokens=True)


def load_tokenizer(name: str, *, asked: str | None = None) -> "transformers.PreTrainedTokenizerBase":
    """The tokenizer of a folder or of the hub, or BYTES. Raises: UserError if there is none, or it makes no tokens.

    Args: asked: how a message about it begins; model.tokenizer and the name by default.
    """
    import transformers

    if name == BYTES:
        return bytes_tokenizer()
    asked = asked or f"model.tokenizer = {name}:"
    way_out = f"As model.tokenizer, give a folder with tokenizer.json, a hub name, or {BYTES}."
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a bare Exception for some broken files
        reason = next(iter(str(error).splitlines()), type(error).__name__).strip().rstrip(":.")
        raise errors.UserError(f"{asked} cannot be loaded: {reason}. {way_out}") from None
    if not tokenizer("some text 1", add_special_tokens=False)["input_ids"]:
        raise errors.UserError(f"{asked} has an empty vocabulary, text becomes nothing. {way_out}")
    return tokenizer


def loads_as(tokenizer: "transformers.PreTrainedTokenizerBase", folder: str | os.PathLike[str]) -> bool:
    """Whether AutoTokenizer makes of an exported folder what was put there.

    It does not always: of a folder with model_type qwen2 it makes a Qwen2Tokenizer, whatever the folder says.
    """
    import transformers

    probe = "e\u0301 caf\u00e9\n\t2026 x_1"
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    return len(loaded) == len(tokenizer) and loaded(probe)["input_ids"] == tokenizer(probe)["input_ids"]


def tokenize(
    dataset: "datasets.Dataset",
    *,
    source: config.Source,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    workers: int,
    field: str,
) -> "datasets.Dataset":
    """The records of `sources.read` as `tokens` and, where the records have them, `labels` (not shifted yet).

    A text gets the tokenizer's own special tokens, then its end token, if it has one and the text does not end with it
    already (as in TRL). A text without any token stays empty.

    Raises: UserError for a token id that the model has no embedding for.
    """
    import datasets
    import multiprocess

    if source.format == "tokens":
        tokenized = dataset.rename_column("input_ids", "tokens")
    else:
        assert tokenizer is not None, "the config asks for a tokenizer where a source is text"
        # the workers of `datasets`: forking a process in which JAX has threads can hang
        multiprocess.set_start_method("spawn", force=True)
        mean_bytes = max(dataset.data.nbytes // len(dataset), 1)
        batch_size = min(max(_BATCH_BYTES // mean_bytes, 1), 1000)
        fingerprint = datasets.fingerprint.Hasher.hash((_VERSION, dataset._fingerprint, _files(tokenizer)))
        with sources.made_once(pathlib.Path(dataset.cache_files[0]["filename"]).with_name(f"cache-{fingerprint}.arrow")):
            tokenized = dataset.map(
                functools.partial(_encode, tokenizer=tokenizer),
                batched=True,
                batch_size=batch_size,
                writer_batch_size=batch_size,
                input_columns=["text", "place"],
                remove_columns=["text"],
                features=datasets.Features(
                    {"place": datasets.Value("string"), "tokens": datasets.LargeList(datasets.Value("int32"))}
                ),
                # one worker is this process
                num_proc=min(workers, len(dataset)) if workers > 1 else None,
                new_fingerprint=fingerprint,
                desc=f"Tokenising {source.source}",
            )
    for column in (name for name in tokenized.column_names if name != "place"):
        _check_ids(tokenized, column, vocab_size=vocab_size, asked=f"{field} = {source.source}")
    return tokenized.remove_columns("place")


def _encode(texts: list[str], places: list[str], *, tokenizer: Any) -> dict[str, list]:
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    for ids in encoded:
        if ids and end is not None and ids[-1] != end:
            ids.append(end)
    return {"tokens": encoded, "place": places}


def _files(tokenizer: "transformers.PreTrainedTokenizerBase") -> list[tuple[str, bytes]]:
    """Everything that a tokenizer is made of, as the files that it would save."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return [(path.name, path.read_bytes()) for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file()]


def _check_ids(dataset: "datasets.Dataset", column: str, *, vocab_size: int, asked: str) -> None:
    before = 0
    for offsets, values in sources.lists(dataset, column):
        outside = (values < 0) | (values >= vocab_size)
        if column == "labels":
            outside &= values != batch.NO_LABEL
        if outside.any():
            at = int(outside.argmax())
            document = before + int(np.searchsorted(offsets, at, side="right")) - 1
            raise errors.UserError(
                f"{asked}: {dataset[document]['place']}: {column} hold the id {values[at]}, "
                f"but the model's vocab_size is {vocab_size}: ids go from 0 to {vocab_size - 1}. "
                "Use the model's own tokenizer, or set model.config.vocab_size."
            )
        before += len(offsets) - 1
