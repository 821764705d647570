"""LongPPL: perplexity of the tokens that depend on far context.

A token counts if its loss falls by more than MIN_GAIN, to less than MAX_LOSS, when the model sees
the whole text before it instead of the CONTEXT_TOKENS to CONTEXT_TOKENS + BLOCK_TOKENS before it.
The same weights find the tokens and are measured on them.

Source: Fang et al. 2024, "What is wrong with perplexity for long-context language modeling?",
arXiv:2410.23771, with the parameters of its published code.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.dataset import PackedDataset
from jaxsp.evaluation.token_losses import DocumentLosses

CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 1024
MIN_GAIN = 2.0
MAX_LOSS = 2.0


class ShortText(NamedTuple):
    """Part of a segment: at least CONTEXT_TOKENS of context, and up to BLOCK_TOKENS with labels."""

    document: int
    begin: int
    """First token, as a number in the document."""
    tokens: np.ndarray
    labels: np.ndarray
    """Label of each token, not shifted."""


class LongPPL(NamedTuple):
    """Result for a data set."""

    long_ppl: float | None
    """exp(mean loss) of the key tokens; None if there are none."""
    num_key_tokens: int | None


def check(row_tokens: int) -> None:
    """Checks that rows hold enough context. Raises: UserError."""
    least = CONTEXT_TOKENS + BLOCK_TOKENS
    if row_tokens <= least:
        raise UserError(
            f"eval.long_ppl = true: compares the loss of tokens with up to {least:,} tokens before "
            f"them and with all, so data.row_tokens = {row_tokens:,} must be more than {least:,}. "
            f"Use data.row_tokens={2 * least} or more, or eval.long_ppl=false."
        )


def cut(data: PackedDataset) -> list[ShortText]:
    """Cuts the segments of a data set into short texts that have a label.

    The first CONTEXT_TOKENS + BLOCK_TOKENS of a segment are no short text: with as much before it,
    no token can gain from more.

    Memory: up to five times the tokens of the data set, and as much again when packed.
    """
    segments = data.documents.segments
    texts: list[ShortText] = []
    for number in np.flatnonzero(segments.length > CONTEXT_TOKENS + BLOCK_TOKENS):
        segment = segments.select(slice(number, number + 1))
        length = int(segment.length[0])
        row = data.documents.read_slice(segment, 0, length)
        targets = np.append(np.int32(NO_LABEL), row["labels"][:-1])
        document = int(segment.document[0])
        for begin in range(BLOCK_TOKENS, length - CONTEXT_TOKENS, BLOCK_TOKENS):
            part = slice(begin, begin + CONTEXT_TOKENS + BLOCK_TOKENS)
            labels = targets[part].copy()
            labels[:CONTEXT_TOKENS] = NO_LABEL
            if (labels != NO_LABEL).any():
                first = int(segment.offset[0]) + begin
                texts.append(ShortText(document, first, row["tokens"][part], labels))
    return texts


def compute(texts: Sequence[ShortText], full: DocumentLosses, short: DocumentLosses) -> LongPPL:
    """Computes LongPPL from the losses of a data set and those of its short texts."""
    losses = []
    for number, text in enumerate(texts):
        # a token's loss is at the token before it
        num_targets = len(text.tokens) - CONTEXT_TOKENS
        with_all = full.read(text.document, text.begin + CONTEXT_TOKENS - 1, num_targets)
        with_few = short.read(number, CONTEXT_TOKENS - 1, num_targets)
        is_key = (with_few - with_all > MIN_GAIN) & (with_all < MAX_LOSS)
        losses.append(with_all[is_key])
    key_losses = np.concatenate(losses) if losses else np.zeros(0)
    mean = key_losses.mean() if len(key_losses) else None
    return LongPPL(None if mean is None else math.exp(mean), len(key_losses))
