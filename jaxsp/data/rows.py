"""Tokens, labels and positions of any part of any row, read from memory-mapped documents."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core import batch, errors
from jaxsp.data import packing, sources

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A range of a row's tokens. Shapes: [tokens of the range], int32."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Where a row's pieces begin and how long they are; unused slots are (0, 0). Shapes: [max_pieces], int32."""

    starts: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Documents that lie together on disk: document d is tokens[offsets[d]:offsets[d + 1]]."""

    offsets: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    """What the token before should say: the tokens themselves unless the records have labels."""

    @property
    def num_loss_tokens(self) -> int:
        firsts = self.offsets[:-1][np.diff(self.offsets) > 0]
        if self.labels is self.tokens:
            return len(self.tokens) - len(firsts)
        return int(np.sum(self.labels != batch.NO_LABEL) - np.sum(self.labels[firsts] != batch.NO_LABEL))


class Documents:
    """The documents of tokenised datasets, one dataset after another; those without tokens are left out.

    Reads: nothing but the tokens asked for, from the Arrow files that `datasets` maps into memory.
    Raises: UserError for a document that the model has no positions for, and where no token has a label.
    """

    def __init__(self, tokenized: "list[datasets.Dataset]", *, field: str = "data.train"):
        self._chunks = [chunk for dataset in tokenized for chunk in _chunks(dataset)]
        lengths = [np.diff(chunk.offsets) for chunk in self._chunks]
        kept = [np.flatnonzero(some) for some in lengths]
        self.lengths = np.concatenate([some[there] for some, there in zip(lengths, kept, strict=True)]).astype(np.int64)
        self.num_empty = sum(map(len, lengths)) - len(self.lengths)
        self.num_loss_tokens = sum(chunk.num_loss_tokens for chunk in self._chunks)
        # where document d is: in which chunk, and as which of its documents
        self._chunk_of, self._place_of = np.repeat(np.arange(len(kept)), list(map(len, kept))), np.concatenate(kept)
        longest = int(self.lengths.max(initial=0))
        if longest > batch.MAX_POSITION:
            raise errors.UserError(
                f"{field}: a document has {longest:,} tokens, and positions end at {batch.MAX_POSITION:,}. "
                "Cut it into shorter documents."
            )
        if self.num_loss_tokens == 0:
            raise errors.UserError(
                f"{field}: no token has a label, there is nothing to learn from. "
                "Give documents of two tokens or more, with labels that are not all -100."
            )

    def share(self, row: packing.Row, begin: int, end: int) -> Share:
        """The tokens `begin` to `end` of a row.

        Labels and positions are those of the whole document, so a token before a cut has its label, and the first one
        after it goes on counting. Behind the last piece is padding: token 0, label -100, position 0.
        """
        share = Share(
            tokens=np.zeros(end - begin, np.int32),
            labels=np.full(end - begin, batch.NO_LABEL, np.int32),
            positions=np.zeros(end - begin, np.int32),
        )
        starts = row.starts
        for piece in range(np.searchsorted(starts + row.length, begin, side="right"), np.searchsorted(starts, end)):
            start = int(starts[piece])
            left, right = max(start, begin), min(start + int(row.length[piece]), end)
            part = slice(left - begin, right - begin)
            first = int(row.first[piece]) + left - start
            last = first + right - left
            tokens, labels = self._document(int(row.document[piece]))
            share.tokens[part] = tokens[first:last]
            following = labels[first + 1 : last + 1]
            share.labels[part][: len(following)] = following
            share.positions[part] = np.arange(first, last)
        return share

    def _document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chunk = self._chunks[self._chunk_of[index]]
        part = slice(*chunk.offsets[self._place_of[index] :][:2])
        return chunk.tokens[part], chunk.labels[part]


def slots(row: packing.Row, max_pieces: int) -> Slots:
    """The row's pieces for attention."""
    free = (0, max_pieces - len(row.length))
    return Slots(starts=np.pad(row.starts, free).astype(np.int32), lengths=np.pad(row.length, free).astype(np.int32))


def _chunks(dataset: "datasets.Dataset") -> list[_Chunk]:
    tokens = list(sources.lists(dataset, "tokens"))
    labels = list(sources.lists(dataset, "labels")) if "labels" in dataset.column_names else tokens
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(tokens, labels, strict=True)), "a label for each token"
    return [
        _Chunk(offsets=offsets, tokens=values, labels=marks)
        for (offsets, values), (_, marks) in zip(tokens, labels, strict=True)
    ]
