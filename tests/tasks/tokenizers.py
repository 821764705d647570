"""Small tokenizers of the kinds that models have."""

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxsp.tasks import haystack

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splitting expression of Llama 3, which merges a period with the line break after it."""


def tokenize_bytes(text):
    return list(text.encode())


def decode_bytes(ids):
    return bytes(ids.tolist()).decode()


@functools.cache
def train(kind):
    """A tokenizer of 600 tokens: byte-level BPE as Llama 3's, or SentencePiece as Llama 2's."""
    if kind == "byte_level":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
        # as Llama 2: a space before the text, and tokens that could hold several words
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            tokenizers.Regex(r"▁*[^▁\n]+|\n"), "isolated"
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = sorted({*map(chr, range(33, 127)), "\n", "▁"})
    codes = "Question: VAR ABCDE = 1234567\nAnswer: ... " + "".join(map(chr, range(33, 127)))
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([codes, *haystack.make_sentences()[:2000]], trainer)
    return tokenizer


def get(kind):
    """Functions that encode and decode."""
    if kind == "bytes":
        return tokenize_bytes, decode_bytes
    tokenizer = train(kind)
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids.tolist()),
    )
