"""Times checkpoints: how long a save keeps steps from beginning, when it is on the disk, and how long a restore takes.

    python -m scripts.bench.checkpoints --folder /scratch --out scripts/bench/results/today-checkpoints.json

The state is that of a Llama with AdamW, of a gigabyte unless told otherwise, on the GPUs of the machine or on eight virtual CPU
devices. It is saved as the train command saves it, digests and all, and read back onto the mesh, and as export does.
"""

import argparse
import dataclasses
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import jax

from jaxsp import attention
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.config import config_file
from jaxsp.config.run_schema import CheckpointConfig
from jaxsp.hf import families
from jaxsp.runtime import device_mesh, jax_platform
from jaxsp.training import train_state
from jaxsp.training.program import Program
from scripts.bench import machine

HIDDEN, VOCABULARY = 1024, 16384

_LINE = "{:<22} {:>8} {:>10} {:>11}"
HEADER = _LINE.format("", "GB", "s", "of it waits")
"""waits: training does, for the copy to host memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One save or restore."""

    name: str
    num_bytes: int
    seconds: float
    blocked_s: float
    """Of these, those in which no step could begin."""


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights and averages")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--folder", help="where checkpoints are written, and removed; default: the temporary folder"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    jax_platform.choose_platform(virtual_cpu_devices=8)
    program = _program(given.gigabytes)
    print(HEADER, flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxsp-bench-", dir=given.folder))
    try:
        cases = []
        for case in _times(program, folder, given.saves):
            cases.append(case)
            print(
                _LINE.format(
                    case.name,
                    f"{case.num_bytes / 1e9:.2f}",
                    f"{case.seconds:.2f}",
                    f"{case.blocked_s:.2f}",
                ),
                flush=True,
            )
    finally:
        shutil.rmtree(folder)
    if given.out:
        found = [dataclasses.asdict(case) for case in cases]
        packages = ("jax", "orbax-checkpoint", "tensorstore")
        sizes = {"num_devices": jax.device_count(), "device": jax.devices()[0].device_kind}
        machine.write(
            given.out, "scripts.bench.checkpoints", arguments, packages, **sizes, cases=found
        )
    return 0


def _program(gigabytes: float) -> Program:
    """A Llama of so many layers that its weights and averages have the size."""
    llama = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
    }
    of_layer, of_rest = 12 * HIDDEN**2 * 4 // 3, 2 * VOCABULARY * HIDDEN
    layers = max(1, round((gigabytes * 1e9 / 12 - of_rest) / of_layer))
    llama |= {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8}
    num_devices = jax.device_count()
    fields = {
        "run": {"directory": "unused", "steps": 9},
        "model": {"config": llama},
        "mesh": {"data": num_devices},
        "data": {"train": [{"source": "unused", "format": "tokens"}], "row_tokens": 128},
        "batch": {"rows_per_step": num_devices},
        "optimizer": {"learning_rate": 0.01},
    }
    return Program(
        config=config_file.parse(fields),
        model=families.parse_model_config(llama, field="llama"),
        mesh=device_mesh.make_mesh({"replica": 1, "data": num_devices, "seq": 1}),
        attend=attention.make_attend(seq=1, kernel="blockwise", window=None),
        num_steps=9,
    )


def _times(program: Program, folder: pathlib.Path, num_saves: int) -> Iterator[Case]:
    state = jax.block_until_ready(train_state.random_state(program, seed=0))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((state.master, state.opt_state)))
    with CheckpointWriter(
        folder, table=program.table, retention=CheckpointConfig(keep_latest=1)
    ) as saved:
        for number in range(1, num_saves + 1):
            meta = CheckpointMeta(
                config={}, model={}, data={}, step=number, rows_consumed={}, num_tokens_total=0
            )
            began = time.perf_counter()
            outcome = saved.save(state, meta)
            blocked_s = time.perf_counter() - began
            outcome = outcome or saved.poll(wait=True)
            assert outcome == WriteOutcome(step=number, failure=None)
            name = "save" if number > 1 else "save, which compiles"
            yield Case(
                name=name, num_bytes=whole, seconds=time.perf_counter() - began, blocked_s=blocked_s
            )
    newest, like = folder / str(num_saves), train_state.abstract_inputs(program)[0]
    began = time.perf_counter()
    jax.block_until_ready(reader.restore(newest, like, table=program.table, num_steps=num_saves))
    seconds = time.perf_counter() - began
    yield Case(name="restore", num_bytes=whole, seconds=seconds, blocked_s=seconds)
    began = time.perf_counter()
    reader.read_weights(newest, program.table)
    seconds = time.perf_counter() - began
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state.master))
    yield Case(name="weights, as for export", num_bytes=weights, seconds=seconds, blocked_s=seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
