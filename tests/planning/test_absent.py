"""Errors of compiling for absent GPUs."""

import pytest

from jaxsp.planning import absent, gpus
from tests.messages import assert_names


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^--device = h100: ") as caught:
        absent.make_cluster("h100", 8)
    assert_names(caught.value, *gpus.GPUS)
    assert str(caught.value).count("h100-80gb") == 2, "in the list, and as the suggestion"


def test_a_missing_compiler_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(absent, "COMPILER_PLUGINS", ("no_such_plugin",))
    with pytest.raises(ValueError, match=r"^--device = h100-80gb: .*pip install 'jaxsp\[plan\]'"):
        absent.make_devices("h100-80gb", 8)


@pytest.mark.parametrize(
    ("device", "num_devices", "options", "expected"),
    [
        ("h100-80gb", 16, {}, (8, 2000, 8)),
        ("h100-80gb", 16, {"node_devices": 4}, (4, 1000, 4)),
        ("gb200-186gb", 8, {}, (4, 894, 8)),
        ("gb200-186gb", 64, {}, (4, 894, 64)),
        ("gb200-186gb", 144, {}, (4, 894, 72)),
        ("gb200-186gb", 2, {}, (2, 447, 2)),
        ("gh200-96gb", 8, {}, (1, 447, 1)),
    ],
)
def test_nodes_and_links_are_those_of_the_gpu(device, num_devices, options, expected):
    cluster = absent.make_cluster(device, num_devices, **options)
    assert (cluster.node_devices, cluster.node_host_gib, cluster.nvlink_domain_size) == expected
