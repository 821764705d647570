"""Suggests a segment limit or a row length if the limit on segments leaves rows empty."""

import bisect
import dataclasses

import numpy as np

from jaxsp.data.packing.packing import PackingPlan, plan_rows

FULL_FRACTION = 0.99
"""Fraction of the tokens of a row from which on rows count as full."""

_MAX_SEGMENTS_STEP = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingAdvice:
    """Suggestions for rows that the limit on segments leaves empty; either of the two is enough."""

    filled_fraction: float
    """Tokens of the plan's rows, divided by the tokens that they could hold."""
    max_segments: int
    """Segment limit that fills rows of the current length; a multiple of 16."""
    row_tokens: int | None
    """Longest rows that the current limit fills; None if no length of at least 1/32 does."""
    num_cut: int
    """Documents that rows of `row_tokens` would split, and rows of the current length do not."""


def suggest_limits(
    plan: PackingPlan, *, row_tokens: int, max_segments: int
) -> PackingAdvice | None:
    """Returns limits that would fill the rows of a plan.

    None if the rows are full, or if the limit on segments is not the main reason why they are not.

    Rows count as filled at FULL_FRACTION, or if they are as full as without a limit. The limits are
    found by packing a sample of the documents, about a hundred thousand documents or a hundred
    rows. Their mean length is not enough: where 117 documents make a row, a limit of 128 leaves 1 %
    of the rows empty for the spread of chats (lognormal, sigma 1), and 4 % for sigma 1.5.
    """
    fullness = int(plan.length.sum()) / (max(len(plan), 1) * row_tokens)
    is_limit_reached = np.diff(plan.row_starts).max(initial=0) >= max_segments
    if fullness >= FULL_FRACTION or len(plan) == 1 or not is_limit_reached:
        return None
    lengths = np.bincount(plan.document, plan.length).astype(np.int64)
    lengths = np.sort(lengths[lengths > 0])
    sample = _sample_lengths(lengths, row_tokens)
    num_tokens = int(sample.sum())
    unlimited = plan_rows(sample, row_tokens=row_tokens, max_segments=num_tokens, seed=0)
    num_segments = len(unlimited.length)
    if num_tokens < row_tokens:  # all segments fit into one row
        return PackingAdvice(
            filled_fraction=fullness,
            max_segments=-(-num_segments // _MAX_SEGMENTS_STEP) * _MAX_SEGMENTS_STEP,
            row_tokens=None,
            num_cut=0,
        )
    unlimited_slots = len(unlimited) * row_tokens
    limited_slots = _count_slots(sample, row_tokens, max_segments)
    if limited_slots - unlimited_slots <= (limited_slots - num_tokens) / 2:
        return None
    # a little fuller than FULL_FRACTION, because each epoch has another plan
    enough = max(unlimited_slots, num_tokens / (FULL_FRACTION + 0.002))
    mean_segments = num_segments * row_tokens / enough
    lowest = int(max(max_segments, mean_segments)) // _MAX_SEGMENTS_STEP + 1
    # from this limit on, `plan_rows` uses the same order and makes the same rows as without a limit
    highest = max(
        int(np.diff(unlimited.row_starts).max()),
        -(-4 * num_segments * row_tokens // num_tokens),
    )
    limits = range(lowest * _MAX_SEGMENTS_STEP, highest + _MAX_SEGMENTS_STEP, _MAX_SEGMENTS_STEP)
    limit_index = bisect.bisect_left(
        limits, True, key=lambda limit: _count_slots(sample, row_tokens, limit) <= enough
    )
    shorter = _find_row_tokens(sample, row_tokens, max_segments, enough)
    num_cut = 0
    if shorter is not None:
        num_cut = int(np.sum((lengths > shorter) & (lengths <= row_tokens)))
    return PackingAdvice(
        filled_fraction=fullness,
        max_segments=limits[limit_index],
        row_tokens=shorter,
        num_cut=num_cut,
    )


def _find_row_tokens(
    sample: np.ndarray, row_tokens: int, max_segments: int, enough: int | float
) -> int | None:
    """Longest rows, shorter than `row_tokens`, that need at most `enough` slots; or None."""
    step = 2 ** max(0, (row_tokens // 32).bit_length() - 1)
    sizes = range((row_tokens - 1) // step * step, 0, -step)
    index = bisect.bisect_left(
        sizes, True, key=lambda size: _count_slots(sample, size, max_segments) <= enough
    )
    return sizes[index] if index < len(sizes) else None


def _count_slots(sample: np.ndarray, row_tokens: int, max_segments: int) -> int:
    """Number of tokens that the rows of a sample could hold."""
    plan = plan_rows(sample, row_tokens=row_tokens, max_segments=max_segments, seed=0)
    return len(plan) * row_tokens


def _sample_lengths(lengths: np.ndarray, row_tokens: int) -> np.ndarray:
    """Every n-th of the sorted lengths.

    In a random sample, the mean of a hundred thousand chats would be off by 0.6 %.
    """
    every = max(1, min(len(lengths) // 100_000, int(lengths.sum()) // (100 * row_tokens)))
    return lengths[every // 2 :: every]
