"""Memory of Llama-3.1-8B's training step on 8 H100s, lever by lever, by compiling it: no GPU is needed.

    python -m scripts.bench.memory --out scripts/bench/results/today-memory.json
    python -m scripts.bench.memory --tokens 131072 --levers nothing "tiled loss"

A full fine-tune with AdamW and float32 master weights, each device with a row of its own or 8 sharing one, of documents that
fill it. Each line adds a memory option. The figures are XLA's for the compiled step and, on the
device, an estimate of cuDNN's workspace. Nothing was measured on a GPU. Each cell compiles in a
process of its own, with the plan extra; offloading the optimizer needs jax 0.11.1 or later.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from jaxsp.config import config_file
from jaxsp.planner.compile import gpus
from scripts.bench import machine, report

GIB = 2**30

DEVICE = "h100-80gb"

DEVICE_GIB = gpus.GPUS[DEVICE].memory_bytes / GIB
"""Of each."""

HOST_GIB = {8: 2000, 1: 250}
"""Of host memory, with so many devices in a node."""

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rope_theta": 500000.0,
}
"""Llama-3.1-8B's config.json, but for what is a table."""

LEVERS: dict[str, dict[str, Any]] = {
    "nothing": {"seq": 1, "loss_tile_tokens": "all", "mlp_tile_tokens": "all", "remat": "none"},
    "tiled loss": {"loss_tile_tokens": "auto"},
    "Ulysses": {"seq": 8},
    "remat attention": {"remat": "save_attention"},
    "tiled MLP": {"mlp_tile_tokens": "auto"},
    "offload": {"offload_activations": "layer_inputs_and_attention"},
    "all": {"offload_optimizer": "state"},
    "attention again": {"offload_activations": "layer_inputs", "remat": "full"},
    "gradients too": {"offload_optimizer": "state_and_gradients"},
}
"""Changes of each line from the line before: mesh.seq, and fields of memory. Tiles that are `auto` are
made only if the step does not fit without them. The last two make longer rows fit, for more arithmetic
or traffic."""

TOKENS = {8: (131072, 1048576, 3670016, 5242880), 1: (524288, 655360)}
"""Of a row, by the number of devices."""

ALONE = "--alone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is compiled."""

    levers: str
    """The last line of LEVERS that is pulled."""
    num_devices: int
    row_tokens: int
    max_documents: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What came of it; null where it did not get so far."""

    status: str
    message: str | None = None
    device_gib: float | None = None
    """Memory of each device, including cuDNN's workspace."""
    room_gib: float | None = None
    """Memory available to a step on each device."""
    cudnn_gib: float | None = None
    """Of these, the estimate of what cuDNN takes beside the compiled program."""
    host_gib: float | None = None
    """Of all the node's devices together."""
    fits: bool | None = None
    remat: str | None = None
    mlp_tile_tokens: int | None = None
    loss_tile_tokens: int | None = None
    """Tile sizes as decided; the number of a device's tokens if there are no tiles."""
    head_chunks: int | None = None
    compile_s: float | None = None
    device_memory: dict[str, float] | None = None
    """GiB by category of a device at its peak."""
    host_memory: dict[str, float] | None = None
    """GiB by category of a node's host memory at its peak."""


def main(arguments: list[str]) -> int:
    """The command; 1 if a cell came to no answer."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--levers",
        nargs="+",
        choices=LEVERS,
        default=tuple(LEVERS),
        metavar="NAME",
        help=", ".join(LEVERS),
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        help="of a row; default: 131,072 to 5,242,880 on 8 devices, 524,288 and 655,360 on one",
    )
    parser.add_argument("--devices", nargs="+", type=int, choices=TOKENS, default=tuple(TOKENS))
    parser.add_argument("--documents", type=int, default=64, help="data.max_segments_per_row")
    parser.add_argument(
        "--cell-seconds", type=float, default=600, help="a cell that takes longer is ended"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    cells = [
        Cell(levers=levers, num_devices=count, row_tokens=tokens, max_documents=given.documents)
        for count in given.devices
        for levers in given.levers
        if count > 1 or "seq" not in LEVERS[levers] or levers == "nothing"
        for tokens in given.tokens or TOKENS[count]
    ]
    results = []
    for cell in cells:
        found = apart(cell, seconds=given.cell_seconds)
        results.append({**dataclasses.asdict(cell), **dataclasses.asdict(found)})
        print(line(cell, found), flush=True)
        if given.out:  # after each cell: whoever ends this process has the cells before
            packages = ["jax", "jaxlib", "jax-cuda12-plugin"]
            about = {"device": DEVICE, "device_gib": DEVICE_GIB, "host_gib": HOST_GIB}
            machine.write(
                given.out,
                "scripts.bench.memory",
                arguments,
                packages,
                **about,
                model=MODEL,
                levers=LEVERS,
                cells=results,
            )
    return int(any(result["status"] in (report.FAILED, report.TIMED_OUT) for result in results))


def line(cell: Cell, found: Found) -> str:
    """A cell as a line of text."""
    asked = f"{cell.num_devices} x {DEVICE}  {cell.row_tokens:>9,} tokens  {cell.levers:<16}"
    if found.device_gib is None or found.host_gib is None or found.cudnn_gib is None:
        return f"{asked} {found.status}: {found.message}"
    fits = "fits" if found.fits else "does not fit"
    return (
        f"{asked} {found.device_gib:7.1f} GiB on each device ({found.cudnn_gib:.1f} of them cuDNN's), "
        f"{found.host_gib:7.1f} GiB of host memory: {fits}"
    )


def fields(cell: Cell) -> dict[str, Any]:
    """The config of a cell."""
    pulled: dict[str, Any] = {}
    for name, changes in LEVERS.items():
        pulled |= changes
        if name == cell.levers:
            break
    seq = min(pulled.pop("seq"), cell.num_devices)
    share = cell.row_tokens // seq
    memory = {name: share if value == "all" else value for name, value in pulled.items()}
    return {
        "run": {"directory": "unused", "steps": 1},
        "model": {"config": MODEL},
        "mesh": {"data": cell.num_devices // seq, "seq": seq},
        "data": {
            "train": [{"source": "unused", "format": "tokens"}],
            "row_tokens": cell.row_tokens,
            "max_segments_per_row": cell.max_documents,
        },
        "batch": {"rows_per_step": cell.num_devices // seq},
        "optimizer": {"learning_rate": 1e-5},
        "memory": memory,
    }


# What a cell's own process does


def planned(cell: Cell) -> Found:
    """Compiles a cell's step and says what it takes."""
    import jax

    from jaxsp.core import errors
    from jaxsp.hf import families
    from jaxsp.planner import planning
    from jaxsp.planner.compile import compiled, memory

    site = compiled.make_cluster(DEVICE, cell.num_devices, node_host_gib=HOST_GIB[cell.num_devices])
    try:
        model = families.parse_model_config(MODEL, field="model.config")
        plan = planning.plan_step(config_file.parse(fields(cell)), model=model, cluster=site)
    except errors.UserError as error:
        return Found(status="refused", message=str(error))
    except jax.errors.JaxRuntimeError as error:
        return Found(status="refused", message=f"XLA: {str(error).splitlines()[0]}")
    return Found(
        status=report.OK,
        device_gib=plan.device_gib,
        room_gib=plan.device_limit_gib,
        cudnn_gib=plan.memory[memory.CUDNN_WORKSPACE],
        host_gib=plan.host_gib,
        fits=plan.fits,
        remat=plan.remat,
        mlp_tile_tokens=plan.mlp_tile_tokens,
        loss_tile_tokens=plan.loss_tile_tokens,
        head_chunks=plan.head_chunks,
        compile_s=plan.plan_s,
        device_memory=dict(plan.memory),
        host_memory=dict(plan.host_memory),
    )


def apart(cell: Cell, *, seconds: float) -> Found:
    """Compiles a cell in a process of its own, ended after so many seconds."""
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as folder:
        written = pathlib.Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "scripts.bench.memory",
            ALONE,
            json.dumps(dataclasses.asdict(cell)),
            str(written),
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run(
                command,
                cwd=machine.REPO,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Found(status=report.TIMED_OUT, message=f"ended after {seconds:.0f} s")
        if written.exists():
            return Found(**json.loads(written.read_text(encoding="utf-8")))
    lines = [one for one in done.stderr.splitlines() if one.strip()] or ["without a word"]
    return Found(status=report.FAILED, message=f"exit code {done.returncode}: {lines[-1]}")


def alone(cell: str, written: str) -> None:
    """The process of one cell, from its words on the command line."""
    found = planned(Cell(**json.loads(cell)))
    pathlib.Path(written).write_text(
        json.dumps(dataclasses.asdict(found), allow_nan=False), encoding="utf-8"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [ALONE]:
        alone(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
