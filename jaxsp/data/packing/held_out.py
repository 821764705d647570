"""Documents of the training sources that are held out for evaluation (data.eval_fraction)."""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.data.ingest import record_cache

if TYPE_CHECKING:
    import datasets

EVAL_SET_NAME = "held_out"
"""Name of the data set of held-out documents."""


def select_records(
    tokenized: "Sequence[datasets.Dataset]",
    *,
    source_names: Sequence[str],
    fraction: float,
    seed: int,
) -> list[np.ndarray]:
    """Selects the records of each source that are held out.

    Each document has a number that depends only on the seed, the source's name and the record's
    index. Those with the smallest numbers are held out, `fraction` of all documents rounded up, so
    the choice is the same on every mesh, in every process and after a resume. Records without
    tokens are never held out.

    Raises: UserError if every document would be held out.
    """
    draws = [
        _draw_numbers(len(dataset), seed=seed, name=name)
        for dataset, name in zip(tokenized, source_names, strict=True)
    ]
    lengths = [
        np.concatenate(
            [np.diff(offsets) for offsets, _ in record_cache.read_lists(dataset, "tokens")]
        )
        for dataset in tokenized
    ]
    # a document of one token has no loss
    usable = np.sort(np.concatenate(draws)[np.concatenate(lengths) > 1])
    num_held_out = max(1, math.ceil(round(fraction * len(usable), 9)))
    if num_held_out < len(usable):
        highest = usable[num_held_out - 1]
        return [
            (draw <= highest) & (length > 0) for draw, length in zip(draws, lengths, strict=True)
        ]
    raise UserError(
        f"data.eval_fraction = {fraction:g}: must leave at least one document of data.train, which "
        f"has {len(usable):,}. {_suggest_fraction(len(usable))}"
    )


def digest_split(source: str, is_chosen: np.ndarray, *, is_held_out: bool) -> str:
    """Digest of one of the two parts of a source.

    Args:
        source: digest of the whole source.
        is_chosen: for each record, True if it is held out.
    """
    if not is_chosen.any() and not is_held_out:
        return source  # nothing is held out
    content = f"{source} {is_held_out} ".encode() + np.packbits(is_chosen).tobytes()
    return hashlib.sha256(content).hexdigest()


def _draw_numbers(num_records: int, *, seed: int, name: str) -> np.ndarray:
    """A number in [0, 1) for each record, by a hash of the seed, the name and the record's index.

    Philox is a counter-based generator: its n-th number is a hash of key and counter. NumPy
    guarantees its stream (NEP 19), unlike those of the distributions.
    """
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_records)
    return (raw >> np.uint64(11)) * 2.0**-53


def _suggest_fraction(num_documents: int) -> str:
    """Suggests a fraction that leaves at least one document to train on."""
    if num_documents < 2:
        return "Name data sets in data.eval instead."
    fraction = min(0.1, 1 / num_documents)
    return f"Use data.eval_fraction={fraction:.1g}, or name data sets in data.eval."
