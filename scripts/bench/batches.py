"""Times batches from memory-mapped tokens to devices over an epoch, and the memory that they take.

    python -m scripts.bench.batches --out scripts/bench/results/today-batches.json

There are two data sets: documents of 50 to 500,000 tokens (each order of magnitude as often as the
next), and chats of 280 tokens on average, half of them with a label. They are Arrow files in the
temporary folder, by default 5 GB together, which the page cache holds as far as they fit. They are
packed into rows of 131,072 tokens, and the train command's pipeline reads an epoch in one process,
for one CPU device and for 2 x 4 virtual ones. Each batch is waited for and then dropped. For
comparison, `datasets` reads the same documents in random order: `dataset[i]`.
"""

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

from jaxsp.core.layout import KEPT_ORDER
from jaxsp.data.packing import dataset
from jaxsp.data.packing.loader import BatchLoader, RowPlacement
from jaxsp.data.packing.row_reader import Documents
from jaxsp.runtime import device_mesh, jax_platform
from scripts.bench import configs, machine, results

MODULE = "scripts.bench.batches"

ROW_TOKENS = 131072
ROWS_PER_STEP = 8
MAX_SEGMENTS = 512
"""Enough to fill a row with chats."""

CHUNK_TOKENS = 2**20
"""Tokens of one chunk of an Arrow file: about what jaxsp's tokenization writes at a time."""

MESHES = {"1 device": (1, 1), "2 x 4 devices": (2, 4)}
"""Sizes of data and seq."""

DrawLength = Callable[[np.random.Generator], float]

DOCUMENTS: dict[str, tuple[DrawLength, bool]] = {
    "50 to 500,000": (lambda random: np.exp(random.uniform(np.log(50), np.log(500_000))), False),
    "chats, mean 280": (lambda random: 1 + random.lognormal(np.log(279) - 0.5, 1), True),
}
"""A function that draws the length of a document, and True if there are labels."""

_LINE = "{:<36} {:>14} {:>8} {:>16} {:>22}"

HEADER = _LINE.format("documents", "tokens", "s", "million tokens/s", "MiB at 0, 50, 100 %")
"""MiB: anonymous memory of the process at the start, middle and end; not pages of mapped files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Reading an epoch, or a part of one."""

    name: str
    num_tokens: int
    """Tokens of documents, without padding."""
    seconds: float
    tokens_per_s: float
    anonymous_mib: tuple[float, ...] | None
    """RssAnon of /proc/self/status; None without that file."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--tokens", type=int, default=400_000_000, help="of each data set")
    parser.add_argument("--seconds", type=float, default=5, help="time limit of dataset[i]")
    args = parser.parse_args(arguments)
    jax_platform.choose_platform(virtual_cpu_devices=8)
    contents = results.open_results(
        MODULE,
        arguments,
        **machine.read_cpu_versions("jax", "numpy", "grain", "datasets"),
        row_tokens=ROW_TOKENS,
        rows_per_step=ROWS_PER_STEP,
    )

    def record(case: Case) -> None:
        print(format_case(case), flush=True)
        contents["cases"].append(dataclasses.asdict(case))
        results.write(args.out, contents)

    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as folder:
        for number, (name, (draw_length, has_labels)) in enumerate(DOCUMENTS.items()):
            file = pathlib.Path(folder) / f"{number}.arrow"
            documents = write_documents(file, args.tokens, draw_length, has_labels=has_labels)
            for mesh, (data, seq) in MESHES.items():
                record(time_epoch(make_loader(documents, data, seq), f"{name}: {mesh}"))
            for form in (None, "numpy"):
                case = f"{name}: dataset[i], {form or 'plain'}"
                record(time_random_reads(documents.with_format(form), case, args.seconds))
    return 0


def format_case(case: Case) -> str:
    """Formats a case as a line under HEADER."""
    memory = "-"
    if case.anonymous_mib is not None:
        memory = " ".join(f"{size:,.0f}" for size in case.anonymous_mib)
    speed = f"{case.tokens_per_s / 1e6:.1f}"
    return _LINE.format(case.name, f"{case.num_tokens:,}", f"{case.seconds:.2f}", speed, memory)


def write_documents(
    file: pathlib.Path, num_tokens: int, draw_length: DrawLength, *, has_labels: bool
) -> datasets.Dataset:
    """Writes random documents with at least `num_tokens` tokens to an Arrow file, and maps it."""
    random = np.random.default_rng(0)
    names = ["tokens", "labels"] if has_labels else ["tokens"]
    schema = pa.schema([(name, pa.large_list(pa.int32())) for name in names])
    with pa.ipc.new_stream(str(file), schema) as stream:
        num_written = 0
        while num_written < num_tokens:
            ends = [0]
            while ends[-1] < min(CHUNK_TOKENS, num_tokens - num_written):
                ends.append(ends[-1] + int(draw_length(random)))
            columns = [random.integers(0, 100_000, ends[-1], dtype=np.int32)]
            if has_labels:
                is_label = random.random(ends[-1], np.float32) < 0.5
                columns.append(np.where(is_label, columns[0], np.int32(-100)))
            lists = [pa.LargeListArray.from_arrays(np.array(ends), column) for column in columns]
            stream.write_batch(pa.record_batch(lists, names))
            num_written += ends[-1]
    return datasets.Dataset.from_file(str(file))


def make_loader(documents: datasets.Dataset, data: int, seq: int) -> BatchLoader:
    """The train command's pipeline over one epoch."""
    config = configs.make_config(
        {"model_type": "llama"},
        run={"steps": None, "epochs": 1},
        mesh={"data": data, "seq": seq},
        data={"row_tokens": ROW_TOKENS, "max_segments_per_row": MAX_SEGMENTS},
        batch={"rows_per_step": ROWS_PER_STEP},
    )
    sizes = {"replica": 1, "data": data, "seq": seq}
    mesh = device_mesh.make_mesh(sizes, jax.devices()[: data * seq])
    stored = Documents([documents], row_tokens=config.data.row_tokens)
    packed = dataset.pack_documents("train", stored, config, digests=["unused"])
    schedule = packed.make_schedule(config, epochs=1)
    placement = RowPlacement(mesh, KEPT_ORDER, config.batch)
    return packed.make_loader(config, schedule, placement)


def time_epoch(loader: BatchLoader, name: str) -> Case:
    """Reads all batches of a pipeline, and waits for each."""
    num_tokens = 0
    memory = []
    # the last batch is read ahead, so memory is read one batch before it
    measured_steps = (1, loader.num_steps // 2, loader.num_steps - 1)
    began = time.perf_counter()
    for number, (batch, counts) in enumerate(loader.batches()):
        jax.block_until_ready(batch)
        num_tokens += int(counts.segment_lengths.sum())
        if number in measured_steps:
            memory.append(read_anonymous_mib())
    return _make_case(name, num_tokens, time.perf_counter() - began, memory)


def time_random_reads(documents: datasets.Dataset, name: str, seconds: float) -> Case:
    """Reads documents in random order with `datasets`, for `seconds`."""
    num_tokens = 0
    memory = [read_anonymous_mib()]
    began = time.perf_counter()
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        tokens = np.array(documents[index]["tokens"], np.int32)  # a copy, as a batch needs it
        num_tokens += len(tokens)
        if time.perf_counter() - began > seconds:
            break
    elapsed = time.perf_counter() - began
    return _make_case(name, num_tokens, elapsed, [*memory, read_anonymous_mib()])


def read_anonymous_mib() -> float | None:
    """Memory of this process without pages of files; None if the system does not report it."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), None)


def _make_case(name: str, num_tokens: int, seconds: float, memory: list[float | None]) -> Case:
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
