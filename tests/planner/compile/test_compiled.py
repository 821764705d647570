"""Errors of compiling for absent GPUs."""

import pytest

from jaxsp.planner.compile import compiled, gpus
from tests.messages import assert_names


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^--device = h100: ") as caught:
        compiled.make_cluster("h100", 8)
    assert_names(caught.value, *gpus.GPUS)
    assert str(caught.value).count("h100-80gb") == 2, "in the list, and as the suggestion"


def test_a_missing_compiler_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER_PLUGINS", ("no_such_plugin",))
    with pytest.raises(ValueError, match=r"^--device = h100-80gb: .*pip install 'jaxsp\[plan\]'"):
        compiled.make_devices("h100-80gb", 8)
