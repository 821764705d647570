"""Steps as they are compiled for H100s that are not there: what travels between GPUs and in which dtype, how often cuDNN is
called, and how much memory the recipes in configs/ take.
"""

import collections
import json
import os
import pathlib
import re

import pytest

from jaxsp import attention
from jaxsp.attention.kernels import packed
from jaxsp.core import config, mesh
from jaxsp.hf import families
from jaxsp.training import step

pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")

REPO = pathlib.Path(__file__).parent.parent

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

SMALL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}


def compiled(settings):
    """The step of a config with a model.config."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    from jax.experimental import topologies

    count = settings.mesh.data * settings.mesh.seq
    devices = list(topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x{count}x1").devices)
    model = families.model_config(settings.model.config, field="model.config")
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    choice = attention.choose(settings, devices=devices, **heads)
    attend = attention.make_attend(seq=settings.mesh.seq, kernel=choice.kernel, head_chunks=choice.head_chunks)
    on = mesh.make({"replica": 1, "data": settings.mesh.data, "seq": settings.mesh.seq}, devices)
    program = step.Program(config=settings, model=model, mesh=on, attend=attend, num_steps=1)
    return step.compile(program), choice


@pytest.fixture(scope="module", params=[64, 1], ids=["packed", "one document a row"])
def small(request):
    """Slots of a row, and the compiled step of data 2 x seq 4, bfloat16 compute, 8,192 tokens a row."""
    settings = config.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": SMALL},
            "mesh": {"data": 2, "seq": 4},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": 8192,
                "max_documents_per_row": request.param,
            },
            "batch": {"rows_per_step": 4},
            "optimizer": {"learning_rate": 0.1},
        }
    )
    return request.param, compiled(settings)[0].as_text()


def collectives(text: str) -> dict[str, collections.Counter]:
    """Dtypes of the arrays that each kind of collective brings, and how often."""
    found = collections.defaultdict(collections.Counter)
    for result, kind in re.findall(r"= (\S.*?) (all-to-all|all-gather|reduce-scatter)(?:-start)?\(", text):
        found[kind].update(set(re.findall(r"(\w+)\[\d", result)))
    return found


def num_calls(text: str) -> tuple[int, int]:
    """Calls of cuDNN in a program, forward and backward."""
    return tuple(text.count(f'custom_call_target="__cudnn$fmhaSoftmax{way}"') for way in ("", "Backward"))


def test_weights_travel_in_bfloat16_and_gradients_in_float32(small):
    found = collectives(small[1])
    assert set(found["all-gather"]) == {"bf16"}
    assert set(found["reduce-scatter"]) == {"f32"}


def test_attention_travels_in_bfloat16_as_often_as_its_docstring_says(small):
    # forward q, k and v together, and the output; backward both again, then their transposes: 6 in a loop. XLA writes the loop
    # over 2 layers out and makes the last layer's forward pass once, not again: 12 - 2
    calls = [line for line in attention.collectives(small[1]) if re.search(r"all-to-all(-start)?\(", line)]
    assert len(calls) in (6, 10, 12), calls
    assert all("bf16[" in line for line in calls)


def test_cudnn_is_called_once_for_each_length_forward_and_not_again_backward(small):
    slots, text = small
    expected = 1 if slots == 1 else len(packed.calls(num_rows=1, row_tokens=8192, max_pieces=slots))
    forward, backward = num_calls(text)
    assert forward == expected
    assert backward in (expected, 2 * expected)  # XLA writes the backward loop over 2 layers out


LLAMA31_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

QWEN25_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

RECIPES = {"llama31_8b_128k_8xh100": LLAMA31_8B, "qwen25_7b_64k_8xh100": QWEN25_7B, "qwen3_0p6b_32k_1xh100": QWEN3_06B}
"""The published config.json of each recipe's model, as far as it matters here."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_gpus_and_says_how_much_it_takes(name):
    path = REPO / "configs" / f"{name}.yaml"
    settings = config.load(path, ["model.source=null", f"model.config={json.dumps(RECIPES[name])}"])
    program, choice = compiled(settings)
    memory = program.memory_analysis()
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    gib = (own + choice.uncounted_bytes) / 2**30
    said = int(re.search(r"Planned, not measured: (\d+) GiB", path.read_text())[1])
    assert gib == pytest.approx(said, abs=1)
    assert gib < 70, "an H100 has 80 GB, of which CUDA and NCCL take some"
    shared = settings.mesh.seq > 1
    assert set(collectives(program.as_text())["all-gather"]) == ({"bf16"} if shared else set())
    all_to_alls = [line for line in attention.collectives(program.as_text()) if re.search(r"all-to-all(-start)?\(", line)]
    assert len(all_to_alls) in ((6, 10, 12) if shared else (0,)), "as above"
    forward, backward = num_calls(program.as_text())
    expected = len(packed.calls(num_rows=1, row_tokens=settings.data.row_tokens, max_pieces=64)) * choice.head_chunks
    assert forward == expected
    assert backward in (expected, 2 * expected)
