"""Balance of attention between devices, from the segments of packed rows."""

import numpy as np

from jaxsp.core.layout import Layout


def count_row_work(
    starts: np.ndarray, lengths: np.ndarray, *, row_tokens: int, layout: Layout
) -> np.ndarray:
    """Counts the attention work of a row in each ring step on each device. [steps, devices]

    In step s, a device attends to the keys of the device s places before it. Where rows keep their
    order, one step on one device stands for the group, whose devices share the heads.

    Units: twice the pairs of a query and a key before it: the squared length of a segment.
    """
    lengths = lengths.astype(np.int64)
    if layout.keeps_order:
        return np.array([[np.sum(lengths**2)]])
    num_chunks = layout.num_chunks
    chunk_tokens = layout.chunk_tokens(row_tokens)
    first_N = np.arange(num_chunks, dtype=np.int64) * chunk_tokens
    work_NN = _count_earlier_keys(starts.astype(np.int64), lengths, first_N, chunk_tokens)
    ends = starts + lengths
    own = np.clip(ends[:, None] - first_N, 0, chunk_tokens)
    own -= np.clip(starts[:, None] - first_N, 0, chunk_tokens)
    work_NN += np.diag((own**2).sum(0))
    devices = layout.degree
    k = layout.chunks_per_device
    order = np.array(layout.chunk_order())
    work_PP = work_NN[np.ix_(order, order)].reshape(devices, k, devices, k).sum((1, 3))
    here = np.arange(devices)
    return np.stack([work_PP[here, (here - step) % devices] for step in range(devices)])


def _count_earlier_keys(
    starts: np.ndarray, lengths: np.ndarray, first_N: np.ndarray, chunk_tokens: int
) -> np.ndarray:
    """Twice the pairs of queries in a chunk and keys in an earlier one. [chunks, chunks]"""
    reaches_in_MN = (starts[:, None] < first_N) & ((starts + lengths)[:, None] > first_N)
    # At most one segment reaches from before a chunk into it
    start_N = np.where(reaches_in_MN, starts[:, None], 0).sum(0)
    end_N = np.where(reaches_in_MN, (starts + lengths)[:, None], 0).sum(0)
    queries_N = np.clip(end_N - first_N, 0, chunk_tokens)
    keys_NN = chunk_tokens - np.clip(start_N[:, None] - first_N, 0, chunk_tokens)
    return np.tril(2 * queries_N[:, None] * keys_NN, -1)


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
