"""scripts/bench/memory.py makes a config for each case, and prints its memory."""

import pytest

from scripts.bench import memory
from tests.messages import assert_names


def make_case(options, *, num_devices=8):
    return memory.Case(options=options, num_devices=num_devices, row_tokens=131072, max_segments=64)


@pytest.mark.parametrize("num_devices", memory.TOKENS)
@pytest.mark.parametrize("options", memory.OPTIONS)
def test_the_mesh_of_a_case_has_its_devices(options, num_devices):
    config = memory.make_config(make_case(options, num_devices=num_devices))
    assert config.mesh.data * config.mesh.seq == num_devices
    assert config.batch.rows_per_step == config.mesh.data


def test_each_line_keeps_the_options_of_those_before_it():
    configs = [memory.make_config(make_case(options)) for options in memory.OPTIONS]
    fields = [config.memory for config in configs]
    assert [config.mesh.seq for config in configs] == [1, 1, *[8] * 7]
    assert [memory.loss_tile_tokens for memory in fields] == [131072, *["auto"] * 8]
    mlp_tiles = [131072, 131072, 16384, 16384, *["auto"] * 5]
    assert [memory.mlp_tile_tokens for memory in fields] == mlp_tiles
    remat = [*["none"] * 3, *["save_attention"] * 4, *["full"] * 2]
    assert [memory.remat for memory in fields] == remat
    activations = [*["none"] * 5, *["layer_inputs_and_attention"] * 2, *["layer_inputs"] * 2]
    assert [memory.offload_activations for memory in fields] == activations
    optimizer = [*["none"] * 6, *["state"] * 2, "state_and_gradients"]
    assert [memory.offload_optimizer for memory in fields] == optimizer


def test_a_line_has_the_memory_of_a_case_or_why_it_is_unknown():
    result = memory.Result(status="ok", device_gib=60.25, cudnn_gib=8.0, host_gib=1500.0, fits=True)
    case = make_case("offload")
    start = "8 x h100-80gb 131,072 tokens offload"
    figures = ("60.2 GiB", "8.0", "1500.0 GiB", "fits")
    assert_names(memory.format_case(case, result), *figures, start=start)
    late = memory.Result(status="timed out", message="ended after 6 s")
    assert_names(memory.format_case(case, late), "timed out", "ended after 6 s", start=start)
