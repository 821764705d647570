"""The step as it is compiled for eight H100s that are not there: what travels between GPUs, and in which dtype."""

import collections
import os
import re

import pytest

from jaxsp import attention
from jaxsp.core import config, mesh
from jaxsp.hf import families
from jaxsp.training import step

pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.2"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

FIELDS = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}


@pytest.fixture(scope="module")
def program_text():
    """The compiled step of data 2 x seq 4, bfloat16 compute, 8,192 tokens a row."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x8x1").devices
    chosen = config.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": FIELDS},
            "data": {"train": [{"source": "unused", "format": "tokens"}], "row_tokens": 8192},
            "batch": {"rows_per_step": 4},
            "optimizer": {"learning_rate": 0.1},
        }
    )
    program = step.Program(
        config=chosen,
        model=families.model_config(FIELDS, field="model.config"),
        mesh=mesh.make({"replica": 1, "data": 2, "seq": 4}, list(devices)),
        attend=attention.make_attend(seq=4, kernel="auto"),
        num_steps=1,
    )
    return step.compile(program).as_text()


def collectives(text: str) -> dict[str, collections.Counter]:
    """Dtypes of the arrays that each kind of collective brings, and how often."""
    found = collections.defaultdict(collections.Counter)
    for result, kind in re.findall(r"= (\S.*?) (all-to-all|all-gather|reduce-scatter)(?:-start)?\(", text):
        found[kind].update(set(re.findall(r"(\w+)\[\d", result)))
    return found


def test_weights_travel_in_bfloat16_and_gradients_in_float32(program_text):
    found = collectives(program_text)
    assert set(found["all-gather"]) == {"bf16"}
    assert set(found["reduce-scatter"]) == {"f32"}


def test_attention_travels_in_bfloat16_as_often_as_its_docstring_says(program_text):
    # forward q, k and v together, and the output; backward both again, then their transposes: 6 in a loop. XLA writes the loop
    # over 2 layers out and makes the last layer's forward pass once, not again: 12 - 2
    calls = [line for line in attention.collectives(program_text) if re.search(r"all-to-all(-start)?\(", line)]
    assert len(calls) in (6, 10, 12), calls
    assert all("bf16[" in line for line in calls)
