"""Small models are sharded as large ones are."""

import pytest

from jaxsp.training import sharding


@pytest.fixture(scope="module")
def small_shards():
    """Only weights of fewer than 100 elements stay whole, instead of 65,536. For modules, by an autouse fixture of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "REPLICATED_BELOW", 100)
        yield
