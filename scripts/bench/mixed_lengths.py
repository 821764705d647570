"""Writes token records with the lengths of mixed data, as .jsonl for `format: tokens`.

    python -m scripts.bench.mixed_lengths sft --documents 50000 --out sft.jsonl

sft: 99.9 % of the documents have around 1K tokens and 0.1 % around 40K (log-normal, with a sigma of
0.5 and 0.25). log-uniform: from 128 to 65,536 tokens. Token ids are random; only lengths matter.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

MODULE = "scripts.bench.mixed_lengths"

LONG_FRACTION = 0.001
"""Fraction of long documents in `sft`."""

VOCAB_SIZE = 100
"""Token ids are less than this."""


def draw_sft(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws lengths of short documents, and a few of long ones."""
    short = rng.lognormal(np.log(1024), 0.5, count)
    long = rng.lognormal(np.log(40 * 1024), 0.25, count)
    num_long = max(1, round(LONG_FRACTION * count))
    is_long = rng.permutation(count) < num_long
    return np.where(is_long, np.minimum(long, 65536), np.minimum(short, 8192)).astype(int)


def draw_log_uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws lengths whose logarithm is uniform."""
    return np.exp(rng.uniform(np.log(128), np.log(65536), count)).astype(int)


DISTRIBUTIONS = {"sft": draw_sft, "log-uniform": draw_log_uniform}


def write_records(name: str, count: int, file: pathlib.Path) -> np.ndarray:
    """Writes `count` records with lengths of a distribution, and returns the lengths."""
    rng = np.random.default_rng(0)
    lengths = DISTRIBUTIONS[name](rng, count)
    with file.open("w", encoding="utf-8") as lines:
        for length in lengths.tolist():
            tokens = rng.integers(1, VOCAB_SIZE, length).tolist()
            lines.write(json.dumps({"input_ids": tokens}) + "\n")
    return lengths


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("distribution", choices=DISTRIBUTIONS)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    given = parser.parse_args(arguments)
    lengths = write_records(given.distribution, given.documents, given.out)
    print(
        f"{given.out}: {len(lengths):,} documents, {lengths.sum():,} tokens, "
        f"{lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
