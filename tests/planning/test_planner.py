"""Suggestions of a plan."""

import dataclasses
from unittest.mock import Mock

from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import KernelSettings
from jaxsp.attention.selection import KernelChoice
from jaxsp.core.errors import UserError
from jaxsp.planning import planner
from jaxsp.planning.fit import CompiledStep, MemoryUse
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import specs
from tests.training import runs


def test_larger_microbatches_are_suggested_only_with_the_same_kernel(monkeypatch):
    spec = runs.make_spec({"remat": "save_attention_and_mlp"}, sizes=(1, 2, 4))
    room = MemoryLimit(1e12, 1e12)
    fitted = CompiledStep(spec=spec, executable=None, memory_use=MemoryUse(1, 0), memory_limit=room)
    assert planner.fits_larger_microbatch(fitted)
    other = dataclasses.replace(
        spec.attention, kernels=(KernelChoice(kernel=CudnnKernel(), settings=KernelSettings()),)
    )
    for behavior in ({"return_value": other}, {"side_effect": UserError("too many rows")}):
        monkeypatch.setattr(specs, "choose_attention", Mock(**behavior))
        assert not planner.fits_larger_microbatch(fitted)
