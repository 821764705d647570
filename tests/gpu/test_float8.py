"""Products in 8-bit floats on a GPU, for the sizes of published models."""

import pytest

from jaxsp.blocks import float8
from jaxsp.core.errors import UserError
from jaxsp.run import float8_check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dim_in", "dim_out"), [(4096, 14336), (14336, 4096), (1024, 3072)])
def test_products_and_gradients_are_those_of_float32_except_for_rounding(gpu, dim_in, dim_out):
    try:
        float8.check_devices([gpu])
    except UserError as error:
        pytest.skip(str(error))
    errors = float8_check.measure_errors(gpu, dim_in, dim_out)
    assert max(errors.values()) < float8_check.TOLERANCE, errors
