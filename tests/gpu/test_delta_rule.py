"""The delta rule on a GPU equals its recurrence, for the heads of published models."""

import dataclasses

import pytest

from jaxsp.delta_rule import kernels
from jaxsp.hf import model_config, published
from jaxsp.run import selfcheck

pytestmark = pytest.mark.gpu

MODELS = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-27B", "allenai/Olmo-Hybrid-7B")


@pytest.mark.parametrize("kernel", ["xla", "jla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_recurrence(gpu, name, dtype, kernel):
    fields = published.read_models()[name].fields
    sizes = model_config.parse_model_config(fields).delta_net
    choose = {"sizes": (sizes.key_size, sizes.value_size), "dtype": dtype, "devices": [gpu]}
    if kernel == "jla" and kernels.choose("auto", **choose) == "xla":
        pytest.skip("the kernels do not run: another GPU, dtype, size, or package")
    for check in selfcheck.check_delta_rule(dataclasses.replace(sizes, kernel=kernel), dtype):
        check.run(gpu)
