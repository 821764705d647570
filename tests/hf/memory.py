"""Peak memory of two processes, four devices each, that import a checkpoint together.

Command: python -m tests.hf.memory [GB]
"""

import dataclasses
import json
import math
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
import safetensors.numpy

from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.hf import folder, weights
from jaxsp.model import decoder
from jaxsp.system import device_mesh
from jaxsp.training import train_state
from tests import batches

NUM_SHARDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """Memory of one process, in bytes."""

    before: int
    """Resident memory before anything was read."""
    peak: int
    """Peak resident memory."""
    held: int
    """Size of the arrays on its four devices in the end."""
    largest: int
    """Size of the largest tensor, float32."""


def model(num_bytes: float) -> ModelConfig:
    """A model of four layers with about `num_bytes` of float32 weights.

    A layer has 15 D^2 weights, embedding and head have 4 D^2.
    """
    hidden = round(math.sqrt(num_bytes / 4 / (4 * 15 + 4)) / 128) * 128
    sizes = {
        "hidden_size": hidden,
        "vocab_size": 2 * hidden,
        "intermediate_size": 4 * hidden,
        "num_layers": 4,
    }
    heads = {"num_heads": hidden // 64, "num_kv_heads": hidden // 128, "head_dim": 64}
    return batches.model(**sizes, **heads)


def write(directory: pathlib.Path, config: ModelConfig) -> None:
    """A checkpoint of random numbers, float32, a file for every layer and one for the rest."""
    rng = np.random.default_rng(0)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for param in jax.tree.leaves(decoder.param_table(config)):
        for layer in [None] if param.num_layers is None else range(param.num_layers):
            file = f"model-{0 if layer is None else layer + 1}.safetensors"
            name = param.hf_name.format(layer=layer)
            files.setdefault(file, {})[name] = param.shape
    for file, shapes in files.items():
        values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        safetensors.numpy.save_file(values, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (directory / folder.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")


def measure(num_bytes: float) -> list[Peak]:
    """The peaks of both processes."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        write(pathlib.Path(name), model(num_bytes))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "tests.hf.memory", name, str(num_bytes), str(port)]
        repo = pathlib.Path(__file__).parents[2]
        workers = [
            subprocess.Popen([*command, str(index)], cwd=repo, stdout=subprocess.PIPE, text=True)
            for index in range(2)
        ]
        printed = [worker.communicate(timeout=500)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
    return [Peak(**json.loads(text.splitlines()[-1])) for text in printed]


def worker(name: str, num_bytes: str, port: str, index: str) -> None:
    """Runs one of the two processes; prints its Peak."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, int(index), cluster_detection_method="deactivate"
    )
    mesh = device_mesh.make_mesh({axes.REPLICA: 1, axes.DATA: 2, axes.SEQ: 4})
    source = folder.find(name)
    table = decoder.param_table(model(float(num_bytes)))
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.local_devices()])
    before = resident("VmRSS")
    master = train_state.load_weights(table, mesh, weights.open_folder(source, table).read)
    peak = Peak(
        before=before,
        peak=resident("VmHWM"),
        held=sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(master)
            for shard in leaf.addressable_shards
        ),
        largest=max(param.size * 4 for param in jax.tree.leaves(table)),
    )
    assert len(jax.devices()) == NUM_SHARDS
    assert "torch" not in sys.modules
    print(json.dumps(dataclasses.asdict(peak)), flush=True)
    jax.distributed.shutdown()


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


if __name__ == "__main__":
    if len(sys.argv) > 2:
        worker(*sys.argv[1:])
    else:
        size = float((sys.argv[1:] or ["2"])[0])
        for number, peak in enumerate(measure(size * 1e9)):
            megabytes = {
                field: f"{value / 1e6:,.0f} MB" for field, value in dataclasses.asdict(peak).items()
            }
            print(f"process {number} of 2, {size:g} GB in float32: {megabytes}")
