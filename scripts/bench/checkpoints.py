"""Times checkpoints: how long a save takes and delays training, and how long a restore takes.

    python -m scripts.bench.checkpoints --folder /scratch --out results.json

The state is that of a Llama model with AdamW, by default 1 GB, on the machine's GPUs or on eight
virtual CPU devices. It is saved as the train command saves it, with checksums, restored onto the
mesh, and read as export reads it.
"""

import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

import jax

from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter, WriteOutcome
from jaxsp.config.run_schema import CheckpointConfig
from jaxsp.hf import model_config
from jaxsp.memory import row_meshes
from jaxsp.runtime import jax_platform
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec
from scripts.bench import configs, machine, results

MODULE = "scripts.bench.checkpoints"

HIDDEN_SIZE = 1024
VOCAB_SIZE = 16384

_LINE = "{:<22} {:>8} {:>10} {:>11}"
HEADER = _LINE.format("", "GB", "s", "of it waits")
"""waits: the time that training waits for the copy to host memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One save or restore."""

    name: str
    num_bytes: int
    seconds: float
    blocked_s: float
    """Part of `seconds` in which no step can start."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights and moments")
    parser.add_argument("--saves", type=int, default=3)
    where = "where checkpoints are written, and removed; default: the temporary folder"
    parser.add_argument("--folder", help=where)
    args = parser.parse_args(arguments)
    jax_platform.choose_platform(virtual_cpu_devices=8)
    spec = make_program(args.gigabytes)
    contents = results.open_results(
        MODULE,
        arguments,
        **machine.read_cpu_versions("jax", "orbax-checkpoint", "tensorstore"),
        num_devices=jax.device_count(),
        device=jax.devices()[0].device_kind,
    )
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-", dir=args.folder) as folder:
        for case in time_checkpoints(spec, pathlib.Path(folder), args.saves):
            figures = (case.num_bytes / 1e9, case.seconds, case.blocked_s)
            print(_LINE.format(case.name, *(f"{figure:.2f}" for figure in figures)), flush=True)
            contents["cases"].append(dataclasses.asdict(case))
            results.write(args.out, contents)
    return 0


def make_program(gigabytes: float) -> StepSpec:
    """A Llama model with as many layers as weights and moments of this size have."""
    layer_size = 16 * HIDDEN_SIZE**2
    embedding_size = 2 * VOCAB_SIZE * HIDDEN_SIZE
    num_layers = round((gigabytes * 1e9 / 12 - embedding_size) / layer_size)
    fields = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 4 * HIDDEN_SIZE,
        "num_hidden_layers": max(1, num_layers),
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    num_devices = jax.device_count()
    config = configs.make_config(
        fields,
        mesh={"data": num_devices},
        data={"row_tokens": 128},
        batch={"rows_per_step": num_devices},
    )
    model = model_config.parse_model_config(fields, field="model.config")
    return row_meshes.make_step_spec(config, model, devices=jax.devices())


def time_checkpoints(spec: StepSpec, folder: pathlib.Path, num_saves: int) -> Iterator[Case]:
    """Saves a random state several times, and reads the latest checkpoint."""
    state = jax.block_until_ready(train_state.random_state(spec, seed=0))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.master, state.opt_state)))
    retention = CheckpointConfig(keep_latest=1)
    with CheckpointWriter(folder, table=spec.table, retention=retention) as writer:
        for step in range(1, num_saves + 1):
            meta = CheckpointMeta(
                config={}, model={}, data={}, step=step, rows_consumed=0, num_tokens_total=0
            )
            began = time.perf_counter()
            outcome = writer.save(state, meta)
            blocked_s = time.perf_counter() - began
            outcome = outcome or writer.poll(wait=True)
            assert outcome == WriteOutcome(step=step, failure=None)
            seconds = time.perf_counter() - began
            name = "save" if step > 1 else "save, which compiles"
            yield Case(name=name, num_bytes=num_bytes, seconds=seconds, blocked_s=blocked_s)
    latest = folder / str(num_saves)
    template = train_state.abstract_inputs(spec)[0]
    began = time.perf_counter()
    restored = reader.restore(latest, template, table=spec.table, num_steps=num_saves)
    jax.block_until_ready(restored)
    seconds = time.perf_counter() - began
    yield Case(name="restore", num_bytes=num_bytes, seconds=seconds, blocked_s=seconds)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.master))
    began = time.perf_counter()
    reader.read_weights(latest, spec.table)
    seconds = time.perf_counter() - began
    name = "weights, as for export"
    yield Case(name=name, num_bytes=num_bytes, seconds=seconds, blocked_s=seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
