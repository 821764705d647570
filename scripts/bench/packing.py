"""Times the planning of rows, and says how full they become, beside the packers of grain and TRL on the same lengths.

    python -m scripts.bench.packing --out scripts/bench/results/today-packing.json
    python -m scripts.bench.packing --trl-documents 1000000    # in 10 GB of memory

First a million documents of a thousand tokens in the mean, then lengths that are harder to pack, 20,000 documents of each.
Ours plans from the lengths alone, under a cap on the documents of a row, which the others do not have. They move tokens as
they pack, here of a byte each, which is the least that they can be given; making these is not counted.
TRL's is left out where it is not installed: pip install trl==1.16.0.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import grain
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.data.packing import packing
from scripts.bench import machine

CAPS = (64, 128)
"""data.max_segments_per_row: its default, and twice that."""

NUM_BINS = 64
"""Rows that grain's packers fill at a time."""

_LINE = "{:<20} {:<31} {:>10} {:>8} {:>8} {:>10} {:>8} {:>8} {:>6}"

HEADER = _LINE.format(
    "lengths", "packer", "documents", "s", "s for 1M", "full %", "rows", "bound", "most"
)
"""s for 1M: in proportion, where fewer were packed. bound: no packer makes fewer rows. most: documents in a row, or parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Documents to pack: what they are called, the row they go into, and how many tokens so many of them have."""

    name: str
    row_tokens: int
    draw: Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A packer's work on some documents."""

    lengths: str
    row_tokens: int
    packer: str
    documents: int
    seconds: float
    """Of a call; of ours the median."""
    fullness: float
    """Tokens over the tokens that all rows can hold."""
    rows: int
    bound: int
    """No packer makes fewer rows of these pieces, under the same cap."""
    most: int
    """Pieces in a row."""


Packed = tuple[float, np.ndarray]
"""Seconds, and how many pieces each row holds."""


def lognormal(mean: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Lengths with sigma 1 and, before they are clipped to 1 to 32,768, this mean."""
    return lambda random, count: np.clip(
        random.lognormal(np.log(mean) - 0.5, 1, count).astype(np.int64), 1, 32768
    )


MANY = Lengths(name="mean 1,000", row_tokens=32768, draw=lognormal(1000))

HARDER = (
    Lengths(name="chats, mean 280", row_tokens=32768, draw=lognormal(280)),
    Lengths(
        name="1 to a row",
        row_tokens=32768,
        draw=lambda random, count: random.integers(1, 32769, count),
    ),
    Lengths(
        name="0.4 to 0.7 of a row",
        row_tokens=32768,
        draw=lambda random, count: random.integers(13108, 22938, count),
    ),
    Lengths(
        name="50 to 500,000",  # each order of magnitude as often as the next
        row_tokens=131072,
        draw=lambda random, count: np.exp(
            random.uniform(np.log(50), np.log(500_000), count)
        ).astype(np.int64),
    ),
)


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--documents", type=int, default=1_000_000, help="of a thousand tokens in the mean"
    )
    parser.add_argument(
        "--grain-documents",
        type=int,
        nargs="+",
        default=[20_000, 100_000],
        help="as many of these for grain",
    )
    parser.add_argument(
        "--trl-documents", type=int, default=200_000, help="as many of these for TRL"
    )
    parser.add_argument(
        "--harder-documents", type=int, default=20_000, help="of each of the other lengths"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of ours")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    print(HEADER)
    cases = []
    for case in run(given):
        cases.append(dataclasses.asdict(case))
        print(row(case), flush=True)
    if not _trl():
        print("trl is not installed: left out")
    if given.out:
        packages = ["numpy", "grain", *["trl"] * _trl()]
        machine.write(given.out, "scripts.bench.packing", arguments, packages, cases=cases)
    return 0


def run(given: argparse.Namespace) -> Iterator[Case]:
    """Every packer on the lengths that it is for."""
    for kind, count, for_grain, for_trl in [
        (MANY, given.documents, given.grain_documents, given.trl_documents),
        *(
            (kind, given.harder_documents, [given.harder_documents], given.harder_documents)
            for kind in HARDER
        ),
    ]:
        lengths = kind.draw(np.random.default_rng(0), count)
        for cap in CAPS:
            yield measured(
                kind, lengths, f"jaxsp, {cap} at most", ours, cap, given.repeats, cap=cap
            )
        for name, few in itertools.product(("FirstFit", "BestFit"), for_grain):
            yield measured(kind, lengths[:few], f"grain {name}, {NUM_BINS} rows", grains, name)
        for name, batch_size in (
            (("1,000 at a time", 1000), ("all at once", None)) if _trl() else ()
        ):
            yield measured(kind, lengths[:for_trl], f"trl best fit, {name}", trls, batch_size)


def measured(
    kind: Lengths,
    lengths: np.ndarray,
    packer: str,
    pack: Callable[..., Packed],
    *how: Any,
    cap: int = 0,
) -> Case:
    """What comes of `pack(lengths, row_tokens, *how)`."""
    seconds, counts = pack(lengths, kind.row_tokens, *how)
    return Case(
        lengths=kind.name,
        row_tokens=kind.row_tokens,
        packer=packer,
        documents=len(lengths),
        seconds=seconds,
        fullness=int(lengths.sum()) / (len(counts) * kind.row_tokens),
        rows=len(counts),
        bound=bound(pieces(lengths, kind.row_tokens), kind.row_tokens, cap or len(lengths)),
        most=int(counts.max()),
    )


def row(case: Case) -> str:
    """A case as a line under HEADER."""
    scaled = (
        "" if case.documents == 1_000_000 else f"~{case.seconds * 1_000_000 / case.documents:.1f}"
    )
    return _LINE.format(
        case.lengths,
        case.packer,
        f"{case.documents:,}",
        f"{case.seconds:.2f}",
        scaled,
        f"{100 * case.fullness:.3f}",
        f"{case.rows:,}",
        f"{case.bound:,}",
        case.most,
    )


def ours(lengths: np.ndarray, row_tokens: int, cap: int, repeats: int) -> Packed:
    """jaxsp's plan."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan = packing.plan_rows(lengths, row_tokens=row_tokens, max_segments=cap, seed=0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), np.diff(plan.row_starts)


def grains(lengths: np.ndarray, row_tokens: int, name: str) -> Packed:
    """grain's packer of that name. It cuts no documents: it is given pieces."""
    zeros = np.zeros(row_tokens, np.int8)
    source = grain.MapDataset.source(pieces(lengths, row_tokens).tolist()).map(
        lambda length: {"tokens": zeros[:length]}
    )
    packer = getattr(grain.experimental, f"{name}PackIterDataset")
    rows = packer(
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": row_tokens},
        num_packing_bins=NUM_BINS,
    )
    began = time.perf_counter()
    counts = [int(row["tokens_segment_ids"].max()) for row in rows]
    return time.perf_counter() - began, np.array(counts)


def trls(lengths: np.ndarray, row_tokens: int, batch_size: int | None) -> Packed:
    """TRL's best fit, of so many documents at a time; 1,000 is what it takes unless told."""
    import trl

    datasets.disable_progress_bars()
    strategy = "bfd_split" if lengths.max() > row_tokens else "bfd"  # which cuts long documents off
    how = {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False}
    documents = _zeros(lengths)
    trl.pack_dataset(
        _zeros(lengths[:10]), row_tokens, strategy, how
    )  # it imports what it needs when it is first called
    began = time.perf_counter()
    rows = trl.pack_dataset(documents, row_tokens, strategy, how)
    seconds = time.perf_counter() - began
    return seconds, np.concatenate(
        [pc.list_value_length(chunk) for chunk in rows.data["seq_lengths"].chunks]
    )


def _zeros(lengths: np.ndarray) -> datasets.Dataset:
    offsets = np.cumsum([0, *lengths])
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    if offsets[-1] < 2**31:  # as `datasets` makes them of lists
        tokens = tokens.cast(pa.list_(pa.int8()))
    return datasets.Dataset(pa.table({"input_ids": tokens}))


def pieces(lengths: np.ndarray, row_tokens: int) -> np.ndarray:
    """Lengths of documents cut so that each part fits into a row."""
    whole, rest = np.divmod(lengths, row_tokens)
    return np.concatenate([np.full(whole.sum(), row_tokens), rest[rest > 0]])


def bound(lengths: np.ndarray, row_tokens: int, cap: int) -> int:
    """Rows that these pieces need at least, whoever packs them.

    Source: Martello and Toth 1990, Knapsack Problems, sec. 8.3.2, L2. For any size s up to half a row: no row holds two of the
        pieces longer than half a row, those longer than a row less s share theirs with none of s or longer, and what the others
        leave is all that those from s to half a row have besides rows of their own.
    """
    lengths = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    best = max(-(-int(sums[-1]) // row_tokens), -(-len(lengths) // cap))
    half = np.searchsorted(lengths, row_tokens // 2, side="right")
    for size in np.unique(np.linspace(1, row_tokens // 2, 1000).astype(int)):
        small, large = (
            np.searchsorted(lengths, size),
            np.searchsorted(lengths, row_tokens - size, side="right"),
        )
        left = (large - half) * row_tokens - (sums[large] - sums[half])
        best = max(
            best,
            len(lengths)
            - int(half)
            + max(0, -(-int(sums[half] - sums[small] - left) // row_tokens)),
        )
    return best


def _trl() -> bool:
    return importlib.util.find_spec("trl") is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
