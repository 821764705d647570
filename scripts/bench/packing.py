"""Times packing, and how full the rows become, compared with TRL on the same lengths.

    python -m scripts.bench.packing --out scripts/bench/results/today-packing.json
    python -m scripts.bench.packing --trl-documents 1000000    # needs 10 GB of memory

First a million documents with a mean length of 1,000 tokens, then 20,000 documents each of lengths
that are harder to pack. jaxsp plans from the lengths, with at most a number of documents in a row,
a limit that TRL does not have. TRL moves tokens as it packs: here one byte each, the least that it
accepts; making these is not timed. Needs trl for TRL's packer: pip install trl==1.16.0.
"""

import argparse
import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxsp.data import packing
from scripts.bench import machine, results

MODULE = "scripts.bench.packing"

MAX_SEGMENTS = (64, 128)
"""data.max_segments_per_row: the default, and twice that."""

_LINE = "{:<20} {:<31} {:>10} {:>8} {:>8} {:>10} {:>8} {:>6}"

HEADER = _LINE.format("lengths", "packer", "documents", "s", "s for 1M", "full %", "rows", "most")
"""Columns of a case.

s for 1M: in proportion, if fewer were packed. most: segments in a row.
"""

DrawLengths = Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Document lengths to pack."""

    name: str
    row_tokens: int
    draw: DrawLengths
    """Draws a number of lengths."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Packing of some documents by one packer."""

    lengths: str
    row_tokens: int
    packer: str
    documents: int
    seconds: float
    """Time of a call; for jaxsp the median."""
    fullness: float
    """Fraction of the rows' tokens that documents fill."""
    rows: int
    most: int
    """Largest number of segments in a row."""


Packed = tuple[float, np.ndarray]
"""Seconds, and the number of segments of each row."""


def lognormal(mean: float) -> DrawLengths:
    """Lengths with sigma 1 and, before clipping to 1 to 32,768, this mean."""
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
        name="50 to 500,000",  # all orders of magnitude equally often
        row_tokens=131072,
        draw=lambda random, count: np.exp(
            random.uniform(np.log(50), np.log(500_000), count)
        ).astype(np.int64),
    ),
)


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    add = parser.add_argument
    add("--documents", type=int, default=1_000_000, help="with a mean of 1,000 tokens")
    add("--trl-documents", type=int, default=200_000, help="number of these for TRL")
    add("--harder-documents", type=int, default=20_000, help="of each of the other lengths")
    add("--repeats", type=int, default=5, help="of jaxsp's planning")
    args = parser.parse_args(arguments)
    packages = ["numpy"]
    if has_trl():
        packages.append("trl")
    else:
        print("trl is not installed, and left out")
    versions = machine.read_cpu_versions(*packages)
    contents = results.open_results(MODULE, arguments, **versions)
    print(HEADER)
    for case in run_cases(args):
        print(format_case(case), flush=True)
        contents["cases"].append(dataclasses.asdict(case))
        results.write(args.out, contents)
    return 0


def run_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Runs every packer on its lengths."""
    harder = args.harder_documents
    sizes = [(MANY, args.documents, args.trl_documents)]
    sizes += [(drawn, harder, harder) for drawn in HARDER]
    for drawn, num_documents, num_trl in sizes:
        lengths = drawn.draw(np.random.default_rng(0), num_documents)
        for limit in MAX_SEGMENTS:
            seconds, counts = pack_jaxsp(lengths, drawn.row_tokens, limit, args.repeats)
            packer = f"jaxsp, {limit} at most"
            yield make_case(drawn, lengths, packer, seconds, counts)
        if not has_trl():
            continue
        for name, batch_size in (("1,000 at a time", 1000), ("all at once", None)):
            part = lengths[:num_trl]
            seconds, counts = pack_trl(part, drawn.row_tokens, batch_size)
            yield make_case(drawn, part, f"trl best fit, {name}", seconds, counts)


def make_case(
    drawn: Lengths,
    lengths: np.ndarray,
    packer: str,
    seconds: float,
    counts: np.ndarray,
) -> Case:
    """The case of a packer. Args: counts: number of segments of each row."""
    return Case(
        lengths=drawn.name,
        row_tokens=drawn.row_tokens,
        packer=packer,
        documents=len(lengths),
        seconds=seconds,
        fullness=int(lengths.sum()) / (len(counts) * drawn.row_tokens),
        rows=len(counts),
        most=int(counts.max()),
    )


def format_case(case: Case) -> str:
    """Formats a case as a line under HEADER."""
    million_s = ""
    if case.documents != 1_000_000:
        million_s = f"~{case.seconds * 1_000_000 / case.documents:.1f}"
    return _LINE.format(
        case.lengths,
        case.packer,
        f"{case.documents:,}",
        f"{case.seconds:.2f}",
        million_s,
        f"{100 * case.fullness:.3f}",
        f"{case.rows:,}",
        case.most,
    )


def pack_jaxsp(lengths: np.ndarray, row_tokens: int, max_segments: int, repeats: int) -> Packed:
    """Packs with jaxsp."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        segments = packing.split_documents(lengths, row_tokens)
        plan = packing.plan_rows(segments, row_tokens=row_tokens, max_segments=max_segments, seed=0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), np.diff(plan.row_starts)


def pack_trl(lengths: np.ndarray, row_tokens: int, batch_size: int | None) -> Packed:
    """Packs with TRL's best fit. Args: batch_size: documents at a time; TRL's default is 1,000."""
    import trl

    datasets.disable_progress_bars()
    # bfd would truncate documents that are longer than a row
    strategy = "bfd_split" if lengths.max() > row_tokens else "bfd"
    options = {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False}
    documents = make_zeros(lengths)
    # the first call imports modules
    trl.pack_dataset(make_zeros(lengths[:10]), row_tokens, strategy, options)
    began = time.perf_counter()
    rows = trl.pack_dataset(documents, row_tokens, strategy, options)
    seconds = time.perf_counter() - began
    chunks = rows.data["seq_lengths"].chunks
    return seconds, np.concatenate([pc.list_value_length(chunk) for chunk in chunks])


def make_zeros(lengths: np.ndarray) -> datasets.Dataset:
    """Documents of zeros with these lengths."""
    offsets = np.cumsum([0, *lengths])
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    if offsets[-1] < 2**31:  # the type that `datasets` gives to lists
        tokens = tokens.cast(pa.list_(pa.int8()))
    return datasets.Dataset(pa.table({"input_ids": tokens}))


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
