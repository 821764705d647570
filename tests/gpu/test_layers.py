"""Kernels of delta nets, experts and 8-bit floats on a GPU, for the sizes of published models."""

import dataclasses

import pytest

from jaxsp.blocks import float8
from jaxsp.core.errors import UserError
from jaxsp.delta_rule import kernels as delta_kernels
from jaxsp.experts import kernels as expert_kernels
from jaxsp.hf import model_config, published
from jaxsp.run import selfcheck

pytestmark = pytest.mark.gpu


def read_model(name):
    return model_config.parse_model_config(published.read_models()[name].fields)


@pytest.mark.parametrize("kernel", ["xla", "jla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-27B", "allenai/Olmo-Hybrid-7B"])
def test_the_delta_rule_is_its_recurrence(gpu, name, dtype, kernel):
    sizes = read_model(name).delta_net
    choose = {"sizes": (sizes.key_size, sizes.value_size), "dtype": dtype, "devices": [gpu]}
    if kernel == "jla" and delta_kernels.choose("auto", **choose) == "xla":
        pytest.skip("the kernels do not run: another GPU, dtype, size, or package")
    for check in selfcheck.check_delta_rule(dataclasses.replace(sizes, kernel=kernel), dtype):
        check.run(gpu)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B", "openai/gpt-oss-20b", "zai-org/GLM-4.5-Air"],
)
def test_the_mosaic_kernels_for_experts_are_the_loop_of_xla(gpu, name):
    model = read_model(name)
    dims = (model.hidden_size, model.experts.size)
    try:
        expert_kernels.choose("mosaic", dims=dims, dtype="bfloat16", devices=[gpu])
    except UserError as error:
        pytest.skip(str(error))
    selfcheck.check_experts("mosaic", width=dims[0], size=dims[1]).run(gpu)


@pytest.mark.parametrize("name", [float8.NAME, float8.ALL])
@pytest.mark.parametrize(("dim_in", "dim_out"), [(4096, 14336), (14336, 4096), (1024, 3072)])
def test_products_in_8_bits_are_those_of_float32_except_for_rounding(gpu, dim_in, dim_out, name):
    try:
        float8.check_devices([gpu])
    except UserError as error:
        pytest.skip(str(error))
    selfcheck.check_float8(dim_in, dim_out, name=name).run(gpu)
