"""The Mosaic kernels for experts equal XLA's loop on a GPU, for the sizes of published models."""

import pytest

from jaxsp.core.errors import UserError
from jaxsp.experts import kernels
from jaxsp.hf import model_config, published
from jaxsp.run import selfcheck

pytestmark = pytest.mark.gpu

MODELS = ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B", "openai/gpt-oss-20b", "zai-org/GLM-4.5-Air")


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_loop(gpu, name):
    model = model_config.parse_model_config(published.read_models()[name].fields)
    dims = (model.hidden_size, model.experts.size)
    try:
        kernels.choose("mosaic", dims=dims, dtype="bfloat16", devices=[gpu])
    except UserError as error:
        pytest.skip(str(error))
    selfcheck.check_experts("mosaic", width=dims[0], size=dims[1]).run(gpu)
