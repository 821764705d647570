"""The table of scripts/bench/memory.py: what each of its cells asks for, and says."""

import pytest

from jaxsp.config import config_file
from scripts.bench import memory
from tests.messages import assert_names


def cell(levers, *, num_devices=8, row_tokens=131072):
    return memory.Cell(
        levers=levers, num_devices=num_devices, row_tokens=row_tokens, max_documents=64
    )


@pytest.mark.parametrize("num_devices", memory.TOKENS)
@pytest.mark.parametrize("levers", memory.LEVERS)
def test_every_cell_is_a_config_whose_devices_are_as_many_as_it_says(levers, num_devices):
    asked = config_file.parse(memory.fields(cell(levers, num_devices=num_devices)))
    assert (
        asked.mesh.data * asked.mesh.seq
        == num_devices
        == asked.batch.rows_per_step * asked.mesh.seq
    )


def test_each_line_pulls_the_levers_of_those_before_it():
    found = {name: config_file.parse(memory.fields(cell(name))) for name in memory.LEVERS}
    assert [one.mesh.seq for one in found.values()] == [1, 1, *[8] * 7]
    assert [one.memory.loss_tile_tokens for one in found.values()] == [131072, *["auto"] * 8]
    assert [one.memory.mlp_tile_tokens for one in found.values()] == [
        131072,
        131072,
        16384,
        16384,
        *["auto"] * 5,
    ]
    assert [one.memory.remat for one in found.values()] == ["none"] * 3 + ["save_attention"] * 4 + [
        "full"
    ] * 2
    offloaded = ["none"] * 5 + ["layer_inputs_and_attention"] * 2 + ["layer_inputs"] * 2
    assert [one.memory.offload_activations for one in found.values()] == offloaded
    assert [one.memory.offload_optimizer for one in found.values()] == ["none"] * 6 + [
        "state"
    ] * 2 + ["state_and_gradients"]


def test_a_line_says_what_a_cell_takes_or_why_it_is_not_known():
    found = memory.Found(status="ok", device_gib=60.25, cudnn_gib=8.0, host_gib=1500.0, fits=True)
    asked = "8 x h100-80gb 131,072 tokens all"
    assert_names(
        memory.line(cell("all"), found),
        "60.2 GiB",
        "8.0",
        "1500.0 GiB",
        "fits",
        start=asked,
    )
    unknown = memory.Found(status="timed out", message="ended after 6 s")
    assert_names(memory.line(cell("all"), unknown), "timed out", "ended after 6 s", start=asked)
