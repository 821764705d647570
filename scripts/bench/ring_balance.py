"""Balance of a ring by the number of chunks per device: slowest device over mean.

    python -m scripts.bench.ring_balance --out scripts/bench/results/today-ring-balance.json

40 rows of 131,072 tokens on 8 devices, for each of five distributions of document lengths. Work is
counted in pairs of tokens, of the rows (core/balance.py) and of the blocks that the ring computes
(attention/chunks/chunk_calls.py). Hops are those that the ring makes of its 7 if each row is a
microbatch.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsp.attention.chunks import chunk_calls, ring_hops
from jaxsp.attention.chunks.chunk_calls import ChunkTokens
from jaxsp.attention.kernels import segments
from jaxsp.attention.strategies.ring import Ring
from jaxsp.core import balance
from jaxsp.core.layout import Layout
from scripts.bench import results

MODULE = "scripts.bench.ring_balance"

ROW_TOKENS = 131072
NUM_ROWS = 40
DEVICES = 8
CHUNKS = (2, 4, 8, 16, 32)

_LINE = "{:<42} {:>6} {:>15} {:>15} {:>6}"

HEADER = _LINE.format("documents", "chunks", "rows", "schedule", "hops")
"""Columns: total / per ring step, of the rows and of the computed blocks; mean number of hops."""

DrawLength = Callable[[np.random.Generator], float]

DOCUMENTS: dict[str, tuple[list[int], DrawLength]] = {
    "one document": ([], lambda rng: ROW_TOKENS),
    "log-uniform, 1/64 of the row to the row": (
        [],
        lambda rng: np.exp(rng.uniform(np.log(ROW_TOKENS / 64), np.log(ROW_TOKENS))),
    ),
    "one of half the row, and of 1K to 3K": ([ROW_TOKENS // 2], lambda rng: rng.uniform(1e3, 3e3)),
    "log-normal, sigma 1.5, mean 4K": ([], lambda rng: rng.lognormal(np.log(4096) - 1.125, 1.5)),
    "1K to 3K": ([], lambda rng: rng.uniform(1e3, 3e3)),
}
"""Lengths that each row has, and lengths that are drawn until it is full."""


def draw_rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the segments of all rows, in random order. The last one is cut."""
    fixed, draw = DOCUMENTS[name]
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_ROWS):
        lengths = list(fixed)
        while sum(lengths) < ROW_TOKENS:
            lengths.append(max(1, min(int(draw(rng)), ROW_TOKENS - sum(lengths))))
        rows.append(rng.permutation(lengths))
    max_segments = max(map(len, rows))
    padded = np.array([np.pad(row, (0, max_segments - len(row))) for row in rows])
    starts = np.where(padded > 0, np.cumsum(padded, axis=1) - padded, 0)
    return starts.astype(np.int32), padded.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def count_schedule(ring: Ring, starts_BM: Array, lengths_BM: Array) -> Array:
    """Twice the pairs of the blocks that each device computes in each ring step of each row.

    Shapes: [B, steps, devices].
    """
    chunk_tokens = ring.layout.chunk_tokens(ROW_TOKENS)
    tokens = ChunkTokens(starts_BM, lengths_BM, chunk_tokens)

    def count_blocks(calls: list[chunk_calls.Call]) -> Array:
        areas = [2 * call.blocks.num_queries_B * call.blocks.num_keys_B for call in calls]
        return jnp.asarray(sum(area.reshape(len(starts_BM), -1).sum(1) for area in areas))

    def count_step(step: Array, here: Array) -> Array:
        chunks_k = ring.chunk_numbers(here)
        there = (here - step) % ring.degree
        remote = chunk_calls.find_remote_calls(
            tokens, chunks_k, ring.chunk_numbers(there), there < here
        )
        local = count_blocks(chunk_calls.find_local_calls(tokens, chunks_k))

        def count_diagonal(first_token: Array) -> Array:
            _, lengths = segments.clip_to_chunk(
                starts_BM, lengths_BM, first_token=first_token, num_tokens=chunk_tokens
            )
            return (lengths.astype(jnp.float64) ** 2).sum(1)

        local += jax.vmap(count_diagonal)(chunks_k * chunk_tokens).sum(0)
        return jnp.where(step == 0, local, count_blocks(remote))

    devices = jnp.arange(ring.degree)
    by_device = jax.vmap(count_step, in_axes=(None, 0), out_axes=1)
    return jax.vmap(by_device, in_axes=(0, None), out_axes=1)(devices, devices)


def compute_ratios(work: np.ndarray) -> dict[str, float]:
    """Slowest over mean, in total and per ring step. Args: work: [rows, steps, devices]."""
    total = work.sum(1)
    return {
        "total": float(total.max(1).sum() / total.mean(1).sum()),
        "per_ring_step": balance.compute_imbalance(work[:, None], has_ring_steps=True),
    }


def count_hops(layout: Layout, starts: np.ndarray, lengths: np.ndarray) -> float:
    """Mean number of hops that a ring makes for one of these rows at a time."""
    near = ring_hops.near_hops(layout.degree)
    hops = []
    for row_starts, row_lengths in zip(starts, lengths, strict=True):
        needed = np.asarray(
            ring_hops.needs_hop(layout, row_starts[None], row_lengths[None], row_tokens=ROW_TOKENS)
        )
        is_far = needed.sum() > needed[near].sum()
        hops.append(layout.degree - 1 if is_far else needed.sum())
    return float(np.mean(hops))


def measure(name: str, chunks: int) -> dict[str, object]:
    """Ratios and hops for one distribution and one number of chunks per device."""
    starts, lengths = draw_rows(name)
    ring = Ring(degree=DEVICES, chunks_per_device=chunks)
    work = balance.count_row_work(
        starts.ravel(),
        lengths.ravel(),
        np.repeat(np.arange(NUM_ROWS), starts.shape[1]),
        num_rows=NUM_ROWS,
        row_tokens=ROW_TOKENS,
        layout=ring.layout,
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.int64) for x in (starts, lengths)]
        schedule = np.asarray(count_schedule(ring, *wide))
    return {
        "documents": name,
        "chunks_per_device": chunks,
        "rows": compute_ratios(work),
        "schedule": compute_ratios(schedule),
        "computes_exactly_the_pairs": bool(np.array_equal(schedule, work)),
        "hops": count_hops(ring.layout, starts, lengths),
    }


def format_result(result: dict) -> str:
    """One line of the table."""
    ratios = [
        "{total:.2f} / {per_ring_step:.2f}".format(**result[key]) for key in ("rows", "schedule")
    ]
    hops = f"{result['hops']:.1f}"
    return _LINE.format(result["documents"], result["chunks_per_device"], *ratios, hops)


def main(arguments: list[str]) -> int:
    args = results.make_parser(MODULE, __doc__).parse_args(arguments)
    found = results.open_results(MODULE, arguments)
    print(HEADER)
    for name in DOCUMENTS:
        for chunks in CHUNKS:
            found["cases"].append(measure(name, chunks))
            print(format_result(found["cases"][-1]), flush=True)
            results.write(args.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
