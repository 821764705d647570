"""Steps compiled for absent H100s: all-to-alls, calls of cuDNN, and memory of the recipes."""

import json
import math
import pathlib
import re

import pytest

from jaxsp.attention.kernels.cudnn import cudnn_bins
from jaxsp.hf import model_config, published
from jaxsp.planning import absent, candidates, hlo, planner
from jaxsp.run import config_file
from jaxsp.training.specs import make_spec

pytestmark = pytest.mark.e2e

pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")

REPO = pathlib.Path(__file__).parent.parent

SMALL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}


def compiled_step(config):
    """The step of a config with a model.config, on as many H100s as its mesh has."""
    model = model_config.parse_model_config(config.model.config)
    count = config.mesh.data * config.mesh.seq
    devices = absent.make_devices("h100-80gb", count)
    return absent.compile_step(make_spec(config.step, model, devices=devices))


def small_step(slots, **memory):
    """Text of the step of data 2 x seq 4, bfloat16, rows of 8,192 tokens, 3 microbatches."""
    config = config_file.parse(
        {
            "memory": memory,
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": SMALL},
            "mesh": {"data": 2, "seq": 4},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": 8192,
                "max_segments_per_row": slots,
            },
            "batch": {"rows_per_step": 6},
            "optimizer": {"learning_rate": 0.1},
        }
    )
    return compiled_step(config).dump.hlo_text


@pytest.fixture(
    scope="module",
    params=[64, pytest.param(1, marks=pytest.mark.slow)],
    ids=["packed", "one document per row"],
)
def small(request):
    """Maximum number of segments per row, and the text of the compiled step."""
    return request.param, small_step(request.param)


def num_calls(text: str) -> tuple[int, int]:
    """Number of calls of cuDNN by a program, forward and backward."""
    targets = [f'custom_call_target="__cudnn$fmhaSoftmax{end}"' for end in ("", "Backward")]
    runs = hlo.count_runs(hlo.parse(text), lambda line: line.opcode == "custom-call")
    return tuple(
        sum(times for line, times in runs if target in line.attributes) for target in targets
    )


@pytest.mark.slow
def test_attention_sends_bfloat16_in_6_all_to_alls_per_layer_and_microbatch(small):
    # forward q, k and v together, and the output; backward both again, then their transposes
    calls = [sent for sent in hlo.parse_collectives(small[1]) if sent.operation == "all-to-all"]
    assert sum(sent.num_runs for sent in calls) == 6 * 4 * 3
    assert {dtype for sent in calls for dtype in sent.bytes_by_dtype} == {"bf16"}


@pytest.mark.slow
def test_cudnn_is_called_once_per_bin_length_forward_and_not_again_backward(small):
    slots, text = small
    expected = 4 * 3  # layers and microbatches
    if slots > 1:
        calls = cudnn_bins.plan_calls(num_rows=1, row_tokens=8192, max_segments=slots)
        expected *= len(calls)
    assert num_calls(text) == (expected, expected)


@pytest.mark.slow
def test_remat_full_calls_cudnn_forward_again_in_the_backward_pass():
    assert num_calls(small_step(1, remat="full")) == (2 * 4 * 3, 4 * 3)


@pytest.mark.slow
def test_offloaded_activations_are_in_host_memory_with_their_full_size():
    """Layer inputs, and attention outputs of the same size, of a device: 2,048 tokens of 1,024
    numbers in bfloat16 for each of 4 layers."""
    text = small_step(1, offload_activations="layer_inputs_and_attention")
    offloaded = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"bf16\[([\d,]+)\]\{[^}]*S\(5\)\}", text)
    }
    assert {math.prod(dims) for dims in offloaded} == {4 * 2048 * 1024}
    assert num_calls(text) == (4 * 3, 4 * 3)


RECIPES = {
    "llama31_8b_128k_8xh100": published.read_models()["meta-llama/Llama-3.1-8B"].fields,
    "qwen25_7b_64k_8xh100": published.read_models()["Qwen/Qwen2.5-7B"].fields,
    "qwen3_0p6b_32k_1xh100": published.read_models()["Qwen/Qwen3-0.6B"].fields,
    "qwen35_9b_256k_8xh100": published.read_models()["Qwen/Qwen3.5-9B"].fields,
    "qwen36_27b_256k_8xh100": published.read_models()["Qwen/Qwen3.6-27B"].fields,
    "qwen3_30b_a3b_128k_8xh100": published.read_models()["Qwen/Qwen3-30B-A3B-Instruct-2507"].fields,
    "gpt_oss_20b_128k_8xh100": published.read_models()["openai/gpt-oss-20b"].fields,
}
"""Published sizes of each recipe's model."""


@pytest.mark.parametrize(
    "name",
    [
        "llama31_8b_128k_8xh100",
        pytest.param("qwen25_7b_64k_8xh100", marks=pytest.mark.slow),
        pytest.param("qwen3_0p6b_32k_1xh100", marks=pytest.mark.slow),
        pytest.param("qwen35_9b_256k_8xh100", marks=pytest.mark.slow),
        pytest.param("qwen36_27b_256k_8xh100", marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b_128k_8xh100", marks=pytest.mark.slow),
        pytest.param("gpt_oss_20b_128k_8xh100", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_fits_its_gpus_and_states_its_memory(name):
    path = REPO / "configs" / f"{name}.yaml"
    config = config_file.load(
        path, ["model.source=null", f"model.config={json.dumps(RECIPES[name])}"]
    )
    model = model_config.parse_model_config(config.model.config)
    if problems := candidates.find_problems(config.step, platform="gpu", model=model):
        pytest.skip(problems[0])
    groups = config.mesh.data
    plan = planner.plan_step(
        config.step,
        model=model,
        cluster=absent.make_cluster("h100-80gb", groups * config.mesh.seq),
    )
    assert plan.fits
    least, most = re.search(r"Planned\D*(?:(\d+) to )?(\d+) GiB", path.read_text()).groups()
    assert int(least or most) - 0.5 < plan.device_gib < int(most) + 0.5, "with jax 0.10.1 to 0.12"
    # per layer and microbatch, as in the test of all-to-alls above
    microbatches = config.batch.rows_per_step // (groups * config.batch.rows_per_microbatch)
    all_to_alls = sum(sent.num_runs for sent in plan.collectives if sent.kind == "all-to-all")
    assert all_to_alls == (
        6 * len(model.attention_layers) * microbatches if config.mesh.seq > 1 else 0
    )
