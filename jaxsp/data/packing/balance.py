"""Balance of attention between devices, from the segments of packed rows."""

import itertools

import numpy as np

from jaxsp.core.layout import Layout


def count_row_work(
    starts: np.ndarray,
    lengths: np.ndarray,
    row_starts: np.ndarray,
    *,
    row_tokens: int,
    layout: Layout,
) -> np.ndarray:
    """Counts the attention work of rows in each ring step on each device. [rows, steps, devices]

    In step s, a device attends to the keys of the device s places before it. Where rows keep their
    order, one step on one device stands for the group, whose devices share the heads.

    Args:
        starts, lengths: first token in its row, and tokens of each segment.
        row_starts: first segment of each row, and the number of segments.
    Units: twice the pairs of a query and a key before it: the squared length of a segment.
    """
    if layout.keeps_order:
        return count_segment_pairs(lengths, row_starts)[:, None, None]
    devices = layout.degree
    order = np.array(layout.chunk_order())
    borders = np.arange(layout.num_chunks + 1) * layout.chunk_tokens(row_tokens)
    # queries in one chunk and keys in another, twice if the keys come first
    factor_NN = 1.0 + np.sign(order[:, None] - order)
    work = []
    for begin, end in itertools.pairwise(row_starts):
        tokens_before = np.clip(borders - starts[begin:end, None], 0, lengths[begin:end, None])
        tokens_SN = np.diff(tokens_before, axis=1)[:, order].astype(np.float64)
        pairs_NN = tokens_SN.T @ tokens_SN * factor_NN
        work.append(pairs_NN.reshape(devices, len(order) // devices, devices, -1).sum((1, 3)))
    work_RDD = np.array(work, np.int64)
    here = np.arange(devices)
    return np.stack([work_RDD[:, here, (here - step) % devices] for step in range(devices)], 1)


def count_segment_pairs(lengths: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """Attention work of each row, by which rows are sorted: the squared lengths of its segments."""
    work_before = np.append(0, np.cumsum(lengths.astype(np.int64) ** 2))
    return np.diff(work_before[row_starts])


def compute_imbalance(work: np.ndarray, *, has_ring_steps: bool) -> float:
    """Work of the slowest devices relative to the mean: 1 is balanced.

    The devices of a group wait for each other in each ring step, or in each layer if there is no
    ring, and groups wait for each other in each microbatch.

    Args: work: [microbatches, groups, steps, devices].
    """
    if not has_ring_steps:
        work = work.sum(2, keepdims=True)
    slowest = work.max(3).sum(2).max(1).sum()
    mean = work.mean(3).sum(2).mean(1).sum()
    return float(slowest / mean) if mean else 1.0
