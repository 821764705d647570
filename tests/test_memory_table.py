"""scripts/bench/memory.py makes a config for each case."""

import pytest

from scripts.bench import memory


@pytest.mark.parametrize(
    ("options", "num_devices"),
    [(options, num_devices) for options in memory.OPTIONS for num_devices in memory.TOKENS][::5],
)
def test_the_mesh_of_a_case_has_its_devices(options, num_devices):
    case = memory.Case(options=options, num_devices=num_devices, row_tokens=131072, max_segments=64)
    config = memory.make_config(case)
    assert config.mesh.data * config.mesh.seq == num_devices
    assert config.batch.rows_per_step == config.mesh.data
