"""Products in 8-bit floats on a GPU, for the sizes of published models."""

import pytest

from jaxsp.blocks import float8
from jaxsp.core.errors import UserError
from jaxsp.run import selfcheck

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [float8.NAME, float8.ALL])
@pytest.mark.parametrize(("dim_in", "dim_out"), [(4096, 14336), (14336, 4096), (1024, 3072)])
def test_products_and_gradients_are_those_of_float32_except_for_rounding(
    gpu, dim_in, dim_out, name
):
    try:
        float8.check_devices([gpu])
    except UserError as error:
        pytest.skip(str(error))
    selfcheck.check_float8(dim_in, dim_out, name=name).run(gpu)
