"""Fields of the optimizer: what applies to which optimizer and schedule, and foreign names."""

import pytest

from jaxsp.config import foreign_names
from jaxsp.config.optimizer_schema import DEFAULTS
from jaxsp.core.errors import UserError
from tests import batches
from tests.messages import assert_names


def problems(**options):
    with pytest.raises(UserError) as caught:
        batches.make_config(**options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "lion", "eps": 1e-6}, ["optimizer.eps = 1e-06", "lion", "optimizer.eps=null"]),
        ({"name": "adamw", "momentum": 0.9}, ["momentum = 0.9", "adamw", "optimizer.name=muon"]),
        ({"name": "sgd", "beta2": 0.9}, ["beta2 = 0.9", "sgd", "optimizer.name=adamw"]),
        ({"name": "adafactor", "beta1": 0.9}, ["beta1", "adafactor"]),
        ({"name": "muon", "nesterov": False}, ["nesterov", "muon", "optimizer.name=sgd"]),
        ({"name": "sgd", "nesterov": True}, ["nesterov", "optimizer.momentum=0.9"]),
        ({"decay_steps": 5}, ["decay_steps = 5", "constant", "optimizer.schedule=wsd"]),
        ({"min_learning_rate_fraction": 0.1}, ["constant", "optimizer.schedule=cosine"]),
        ({"schedule": "inverse_sqrt"}, ["needs a warmup", "optimizer.warmup_fraction=0.03"]),
        (
            {"schedule": "wsd", "decay_steps": 5, "decay_fraction": 0.1},
            ["decay_steps = 5", "decay_fraction = 0.1", "only one"],
        ),
        ({"schedule": "wsd", "decay_steps": 0.1}, ["optimizer.decay_fraction=0.1"]),
        ({"schedule": "wsd", "decay_fraction": 10}, ["optimizer.decay_steps=10"]),
        (
            {"groups": [{"pattern": "*", "frozen": True, "weight_decay": 0.1}]},
            ["optimizer.groups.0.weight_decay = 0.1", "frozen", "optimizer.groups.0.frozen=false"],
        ),
        ({"groups": [{"pattern": "*", "learning_rate_factor": -1}]}, ["learning_rate_factor = -1"]),
    ],
    ids=str,
)
def test_a_field_that_does_not_apply_is_an_error(options, words):
    (problem,) = problems(**options)
    assert_names(problem, *words)


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


@pytest.mark.parametrize(
    ("field", "value", "own"),
    [
        ("optimizer.name", "adamw_torch_fused", "adamw"),
        ("optimizer.name", "adamw_bnb_8bit", "adamw8bit"),
        ("optimizer.schedule", "cosine_with_min_lr", "cosine"),
        ("optimizer.schedule", "WSD", "wsd"),
        ("optimizer.schedule", "inverse-square-root", "inverse_sqrt"),
        ("optimizer.decay_shape", "minus_sqrt", "sqrt"),
    ],
)
def test_values_of_other_systems_are_translated(field, value, own):
    assert foreign_names.translate_value(field, value) == own
