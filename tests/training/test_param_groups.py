"""Parameter groups: which weights a pattern selects, and patterns without effect."""

import jax
import pytest

from jaxsp.blocks.layers import Parameter
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from tests import batches
from tests.training import runs

TABLE = decoder.param_table(batches.model())


def config(*groups):
    return batches.make_config(groups=list(groups), weight_decay=0.1).optimizer


def select(*groups):
    """Names of the weights of each group, and of those of no group."""
    own = config(*groups)
    selected = {group.pattern: [] for group in (*own.groups, param_groups.DEFAULT)}
    for param in jax.tree.leaves(TABLE):
        selected[param_groups.find_group(own, param).pattern].append(param.hf_name)
    return selected


def test_the_first_pattern_that_matches_a_name_counts():
    selected = select(
        {"pattern": "model.layers.*.q_proj.*", "frozen": True},
        {"pattern": "*.bias", "weight_decay": 1},
        {"pattern": "model.embed_token?.weight"},
    )
    in_layers = "model.layers.{layer}"
    assert selected["model.layers.*.q_proj.*"] == [
        f"{in_layers}.self_attn.q_proj.bias",
        f"{in_layers}.self_attn.q_proj.weight",
    ]
    assert f"{in_layers}.mlp.gate_proj.bias" in selected["*.bias"]
    assert f"{in_layers}.self_attn.q_proj.bias" not in selected["*.bias"]
    assert selected["model.embed_token?.weight"] == ["model.embed_tokens.weight"]
    assert "lm_head.weight" in selected["*"]


def test_only_matrices_of_a_group_decay():
    own = config({"pattern": "model.layers.*", "weight_decay": 0.5})
    decays = {
        param.hf_name: param_groups.weight_decay(own, param) for param in jax.tree.leaves(TABLE)
    }
    assert decays["model.layers.{layer}.mlp.gate_proj.weight"] == 0.5
    assert decays["model.layers.{layer}.mlp.gate_proj.bias"] == 0
    assert decays["model.layers.{layer}.input_layernorm.weight"] == 0
    assert decays["lm_head.weight"] == 0.1


@pytest.mark.skipif(
    "frozen_as" not in Parameter.__dataclass_fields__, reason="weights cannot be frozen yet"
)
def test_weights_of_a_frozen_group_are_frozen_in_the_table_of_the_program():
    groups = [{"pattern": "model.embed_tokens*", "frozen": True}]
    spec = runs.make_spec({}, groups=groups)
    frozen = {param.hf_name for param in jax.tree.leaves(spec.table) if param.frozen_as is not None}
    assert frozen == {"model.embed_tokens.weight"}
