"""Times the way from memory-mapped tokens to batches on devices, over an epoch, and watches the memory that it takes.

    python -m scripts.bench.batches --out scripts/bench/results/today-batches.json

Documents of 50 to 500,000 tokens (each order of magnitude as often as the next), and chats of 280 in the mean of whose tokens
half have a label, lie in Arrow files in the temporary folder, 5 GB in all unless told otherwise, of which the system keeps in
memory what it can. They are packed into rows of 131,072 tokens, and the train command's own pipeline reads an epoch, in one
process, for one CPU device and for eight virtual ones that share each row four by four. Every batch is waited for, and then
dropped. Beside it the same documents, in random order, as `datasets` gives them: `dataset[i]`.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import datasets
import jax
import numpy as np
import pyarrow as pa

from jaxsp.config import config_file
from jaxsp.data.packing import dataset
from jaxsp.data.packing.loader import BatchLoader
from jaxsp.data.packing.row_reader import Documents
from jaxsp.runtime import device_mesh, jax_platform
from scripts.bench import machine

ROW_TOKENS, ROWS_PER_STEP, MAX_PIECES = 131072, 8, 512
"""Tokens of a row, rows of a step, and as many documents in a row as fill it with chats."""

CHUNK_TOKENS = 2**20
"""In one piece of the file: about what jaxsp's tokenisation writes at a time, 4 MB of text."""

MESHES = {"1 device": (1, 1), "2 x 4 devices": (2, 4)}
"""data and seq."""

DOCUMENTS: dict[str, tuple[Callable[[np.random.Generator], float], bool]] = {
    "50 to 500,000": (lambda random: np.exp(random.uniform(np.log(50), np.log(500_000))), False),
    "chats, mean 280": (lambda random: 1 + random.lognormal(np.log(279) - 0.5, 1), True),
}
"""Draws the tokens of a document; and whether there are labels."""

_LINE = "{:<36} {:>14} {:>8} {:>16} {:>22}"

HEADER = _LINE.format("documents", "tokens", "s", "million tokens/s", "MiB at 0, 50, 100 %")
"""MiB: memory of the process's own at the beginning, in the middle and at the end; pages of mapped files are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What came of an epoch, or of a part of one."""

    name: str
    num_tokens: int
    """Of documents; padding is not counted."""
    seconds: float
    tokens_per_s: float
    anonymous_mib: tuple[float, ...] | None
    """RssAnon of /proc/self/status; null where there is no such file."""


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=400_000_000, help="of all documents")
    parser.add_argument("--seconds", type=float, default=5, help="of dataset[i]")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    jax_platform.choose_platform(virtual_cpu_devices=8)
    print(HEADER)
    cases = []
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as folder:
        for name, (draw, labels) in DOCUMENTS.items():
            documents = write(
                pathlib.Path(folder) / f"{len(cases)}.arrow", given.tokens, draw, labels=labels
            )
            for mesh, (data, seq) in MESHES.items():
                cases.append(epoch(feed(documents, data, seq), f"{name}: {mesh}"))
                print(row(cases[-1]), flush=True)
            for form in (None, "numpy"):
                said = f"{name}: dataset[i], {form or 'plain'}"
                cases.append(one_by_one(documents.with_format(form), said, given.seconds))
                print(row(cases[-1]), flush=True)
    if given.out:
        sizes = {"row_tokens": ROW_TOKENS, "rows_per_step": ROWS_PER_STEP}
        packages = ("jax", "numpy", "grain", "datasets")
        found = [dataclasses.asdict(case) for case in cases]
        machine.write(given.out, "scripts.bench.batches", arguments, packages, **sizes, cases=found)
    return 0


def row(case: Case) -> str:
    """A case as a line under HEADER."""
    memory = (
        "-"
        if case.anonymous_mib is None
        else " ".join(f"{size:,.0f}" for size in case.anonymous_mib)
    )
    speed = f"{case.tokens_per_s / 1e6:.1f}"
    return _LINE.format(case.name, f"{case.num_tokens:,}", f"{case.seconds:.2f}", speed, memory)


def write(
    file: pathlib.Path,
    num_tokens: int,
    draw: Callable[[np.random.Generator], float],
    *,
    labels: bool,
) -> datasets.Dataset:
    """Random documents in an Arrow file, mapped into memory, with at least as many tokens in all."""
    random = np.random.default_rng(0)
    ids = pa.large_list(pa.int32())
    names = ["tokens", *["labels"] * labels]
    with pa.ipc.new_stream(str(file), pa.schema([(name, ids) for name in names])) as stream:
        written = 0
        while written < num_tokens:
            ends = [0]
            while ends[-1] < min(CHUNK_TOKENS, num_tokens - written):
                ends.append(ends[-1] + int(draw(random)))
            tokens = random.integers(0, 100_000, ends[-1], dtype=np.int32)
            marks = (
                np.where(random.random(len(tokens), np.float32) < 0.5, tokens, np.int32(-100))
                if labels
                else tokens
            )
            columns = [
                pa.LargeListArray.from_arrays(np.array(ends), one) for one in (tokens, marks)
            ]
            stream.write_batch(pa.record_batch(columns[: len(names)], names))
            written += len(tokens)
    return datasets.Dataset.from_file(str(file))


def feed(documents: datasets.Dataset, data: int, seq: int) -> BatchLoader:
    """The train command's pipeline over one epoch."""
    config = config_file.parse(
        {
            "run": {"directory": "unused", "epochs": 1},
            "model": {"config": {"model_type": "llama"}},
            "mesh": {"data": data, "seq": seq},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": ROW_TOKENS,
                "max_segments_per_row": MAX_PIECES,
            },
            "batch": {"rows_per_step": ROWS_PER_STEP},
            "optimizer": {"learning_rate": 1.0},
        }
    )
    mesh = device_mesh.make_mesh(
        {"replica": 1, "data": data, "seq": seq}, jax.devices()[: data * seq]
    )
    packed = dataset.pack_documents("train", Documents([documents]), config, digests=["unused"])
    return packed.make_loader(config, mesh, packed.make_schedule(config, epochs=1), layout_degree=1)


def epoch(steps: BatchLoader, name: str) -> Case:
    """All batches of a pipeline, each waited for."""
    num_tokens, memory = 0, []
    watched = (
        1,
        steps.num_steps // 2,
        steps.num_steps - 1,
    )  # the last is read ahead when the one before it is there
    began = time.perf_counter()
    for number, (batch, counts) in enumerate(steps.batches()):
        jax.block_until_ready(batch)
        num_tokens += int(counts.segment_lengths.sum())
        if number in watched:
            memory.append(anonymous_mib())
    return _case(name, num_tokens, time.perf_counter() - began, memory)


def one_by_one(documents: datasets.Dataset, name: str, seconds: float) -> Case:
    """Documents in random order from `datasets`, for so many seconds."""
    num_tokens, memory = 0, [anonymous_mib()]
    began = time.perf_counter()
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        num_tokens += len(
            np.array(documents[index]["tokens"], np.int32)
        )  # a copy, as a batch has to be
        if time.perf_counter() - began > seconds:
            break
    took = time.perf_counter() - began
    return _case(name, num_tokens, took, [*memory, anonymous_mib()])


def anonymous_mib() -> float | None:
    """Memory that this process holds, without the pages of files; None where the system does not tell."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), None)


def _case(name: str, num_tokens: int, seconds: float, memory: list[float | None]) -> Case:
    known = tuple(size for size in memory if size is not None)
    return Case(
        name=name,
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        anonymous_mib=known or None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
