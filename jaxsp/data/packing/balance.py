"""Balance of attention between devices, from the segments of packed rows."""

import numpy as np

from jaxsp.core.layout import Layout


def count_row_work(
    starts: np.ndarray,
    lengths: np.ndarray,
    row_of_segment: np.ndarray,
    *,
    num_rows: int,
    row_tokens: int,
    layout: Layout,
) -> np.ndarray:
    """Counts the attention work of rows in each ring step on each device. [rows, steps, devices]

    In step s, a device attends to the keys of the device s places before it. Where rows keep their
    order, one step on one device stands for the group, whose devices share the heads.

    Args: starts, lengths, row_of_segment: first token in its row, tokens and row of each segment.
    Units: twice the pairs of a query and a key before it: the squared length of a segment.
    """
    starts = starts.astype(np.int64)
    lengths = lengths.astype(np.int64)
    if layout.keeps_order:
        work_R = np.zeros(num_rows, np.int64)
        np.add.at(work_R, row_of_segment, lengths**2)
        return work_R[:, None, None]
    devices = layout.degree
    work_RND = _count_chunk_work(starts, lengths, row_of_segment, num_rows, row_tokens, layout)
    by_chunk = (num_rows, devices, layout.chunks_per_device, devices)
    work_RDD = work_RND[:, layout.chunk_order()].reshape(by_chunk).sum(2)
    here = np.arange(devices)
    return np.stack([work_RDD[:, here, (here - step) % devices] for step in range(devices)], 1)


def _count_chunk_work(
    starts: np.ndarray,
    lengths: np.ndarray,
    row_of_segment: np.ndarray,
    num_rows: int,
    row_tokens: int,
    layout: Layout,
) -> np.ndarray:
    """Twice the pairs of queries in a chunk and keys on a device. [rows, chunks, devices]

    P dims are the parts of segments that chunks cut them into.
    """
    chunk_tokens = layout.chunk_tokens(row_tokens)
    num_chunks = layout.num_chunks
    device_N = np.argsort(layout.chunk_order()) // layout.chunks_per_device
    is_on_device_ND = np.eye(layout.degree, dtype=np.int64)[device_N]
    earlier_chunks_ND = np.cumsum(is_on_device_ND, 0) - is_on_device_ND

    ends = starts + lengths
    first_chunks = starts // chunk_tokens
    num_parts = np.where(lengths > 0, (ends - 1) // chunk_tokens - first_chunks + 1, 0)
    segment_P = np.repeat(np.arange(len(starts)), num_parts)
    index_P = np.arange(len(segment_P)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    first_chunk_P = first_chunks[segment_P]
    chunk_P = first_chunk_P + index_P
    queries_P = np.minimum(ends[segment_P], (chunk_P + 1) * chunk_tokens)
    queries_P -= np.maximum(starts[segment_P], chunk_P * chunk_tokens)

    # At most one segment reaches from before a chunk into it, so nothing is added
    row_P = row_of_segment[segment_P]
    is_later = index_P > 0
    first_L = first_chunk_P[is_later]
    tokens_before_L = starts[segment_P[is_later]] - first_L * chunk_tokens
    keys_LD = chunk_tokens * (earlier_chunks_ND[chunk_P[is_later]] - earlier_chunks_ND[first_L])
    keys_LD -= tokens_before_L[:, None] * is_on_device_ND[first_L]
    work_RND = np.zeros((num_rows, num_chunks, layout.degree), np.int64)
    work_RND[row_P[is_later], chunk_P[is_later]] = 2 * queries_P[is_later, None] * keys_LD
    np.add.at(work_RND, (row_P, chunk_P, device_N[chunk_P]), queries_P**2)
    return work_RND


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
