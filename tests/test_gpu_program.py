"""Steps compiled for absent H100s: all-to-alls, calls of cuDNN, and memory of the recipes."""

import json
import math
import pathlib
import re

import pytest

from jaxsp.attention.kernels import cudnn_bins
from jaxsp.hf import model_config, published
from jaxsp.planning import absent, candidates, hlo, planner
from jaxsp.run import config_file
from jaxsp.training.specs import make_spec
from tests import small_runs

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


def small_step(slots, **memory):
    """Text of the step of data 2 x seq 4, bfloat16, rows of 8,192 tokens, 3 microbatches."""
    fields = small_runs.make_fields(
        pathlib.Path("unused"),
        memory=memory,
        model={"config": SMALL, "compute_dtype": "bfloat16"},
        mesh={"data": 2, "seq": 4},
        data={"row_tokens": 8192, "max_segments_per_row": slots},
        batch={"rows_per_step": 6},
    )
    config = config_file.parse(fields)
    model = model_config.parse_model_config(config.model.config)
    devices = absent.make_devices("h100-80gb", 8)
    spec = make_spec(config.step, model, devices=devices)
    return absent.compile_step(spec).dump.hlo_text


def num_calls(text: str) -> tuple[int, int]:
    """Number of calls of cuDNN by a program, forward and backward."""
    targets = [f'custom_call_target="__cudnn$fmhaSoftmax{end}"' for end in ("", "Backward")]
    runs = hlo.count_runs(hlo.parse(text), lambda line: line.opcode == "custom-call")
    return tuple(
        sum(times for line, times in runs if target in line.attributes) for target in targets
    )


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 1], ids=["packed", "one document per row"])
def test_a_step_sends_6_all_to_alls_and_calls_cudnn_once_per_bin_length_and_direction(slots):
    text = small_step(slots)
    # forward q, k and v together, and the output; backward both again, then their transposes
    calls = [sent for sent in hlo.parse_collectives(text) if sent.operation == "all-to-all"]
    assert sum(sent.num_runs for sent in calls) == 6 * 4 * 3
    assert {dtype for sent in calls for dtype in sent.bytes_by_dtype} == {"bf16"}
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


@pytest.mark.parametrize(
    "name",
    [
        "llama31_8b_128k_8xh100",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [
                *("qwen25_7b_64k_8xh100", "qwen3_0p6b_32k_1xh100", "qwen35_9b_256k_8xh100"),
                *("qwen36_27b_256k_8xh100", "qwen3_30b_a3b_128k_8xh100", "gpt_oss_20b_128k_8xh100"),
            ]
        ),
    ],
)
def test_a_recipe_fits_its_gpus_and_states_its_memory(name):
    path = REPO / "configs" / f"{name}.yaml"
    source = config_file.load(path, []).model.source
    fields = json.dumps(published.read_models()[source].fields)
    config = config_file.load(path, ["model.source=null", f"model.config={fields}"])
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
