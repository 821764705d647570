"""Fields of the optimizer: what applies to which optimizer and schedule, and foreign names."""

import pytest

from jaxsp.config.optimizer_schema import DEFAULTS
from jaxsp.core.errors import UserError
from tests import batches


def problems(**options):
    with pytest.raises(UserError) as caught:
        batches.make_config(**options)
    return caught.value.problems


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_optimizer_has_its_own_defaults(name):
    config = batches.make_config(name=name).optimizer
    assert {option: config.get_option(option) for option in DEFAULTS[name]} == DEFAULTS[name]
    for option in DEFAULTS[name]:
        if option != "nesterov":
            changed = batches.make_config(name=name, **{option: 0.5}).optimizer
            assert changed.get_option(option) == 0.5


def test_momentum_changes_the_state_of_sgd():
    kinds = [
        batches.make_config(**options).optimizer.state_kind
        for options in ({}, {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5})
    ]
    assert kinds == ["sgd", "sgd", "sgd with momentum", "sgd with momentum"]
