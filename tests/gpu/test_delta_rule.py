"""The delta rule on a GPU equals its recurrence, for the heads of published models."""

import pytest

from jaxsp.hf import model_config, published
from jaxsp.run import selfcheck

pytestmark = pytest.mark.gpu

MODELS = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-27B", "allenai/Olmo-Hybrid-7B")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_recurrence(gpu, name, dtype):
    fields = published.read_models()[name].fields
    sizes = model_config.parse_model_config(fields).delta_net
    selfcheck.check_delta_rule(sizes, dtype).run(gpu)
