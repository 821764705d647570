"""Parameter groups: which weights a pattern selects, and patterns without effect."""

import dataclasses

import jax
import pytest

from jaxsp.blocks.config import DELTA_NET, DeltaNetConfig, LayerConfig
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.training import specs
from tests import batches
from tests.messages import assert_names
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


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["model.embed_tokens.*", "*.mlp.*"], None),
        (["model.embed_token"], ["groups.0", "model.embed_tokens.weight"]),
        (["*", "lm_head*"], ["groups.1", "earlier groups", "first match"]),
        (
            ["model.layers.0.mlp.*"],
            ["groups.0", "cannot be selected", "model.layers.*.mlp.*"],
        ),
        (
            ["layers.*.gate_proj.weight"],
            ["matches no weight", "model.layers.*.mlp.gate_proj.weight"],
        ),
    ],
)
def test_a_pattern_without_effect_is_a_problem(patterns, words):
    own = config(*({"pattern": pattern, "learning_rate_factor": 2.0} for pattern in patterns))
    problems = param_groups.find_problems(own, TABLE)
    assert bool(problems) == bool(words)
    for problem in problems:
        assert_names(problem, *words)


def test_weights_of_a_frozen_group_are_frozen_in_the_table_of_the_program():
    groups = [{"pattern": "model.embed_tokens*", "frozen": True}]
    spec = runs.make_spec({}, groups=groups)
    frozen = {param.hf_name for param in jax.tree.leaves(spec.table) if param.frozen_as is not None}
    assert frozen == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_frozen_weights_keep_the_dtype_that_the_model_computes_with(quantization):
    """In float32, for the decays of a delta net, although the run computes in bfloat16."""
    sizes = DeltaNetConfig(num_key_heads=2, num_heads=4, key_size=8, value_size=8, filter_size=4)
    layers = (LayerConfig(mixer=DELTA_NET, rope=None),)
    model = dataclasses.replace(batches.model(), layers=layers, delta_net=sizes)
    adapter = {"type": "lora", "quantization": quantization}
    frozen_config = batches.make_config(compute_dtype="bfloat16", adapter=adapter)
    table = specs.build_table(model, frozen_config.step)
    formats = {
        param.hf_name.rpartition("}.")[2]: param.frozen_as for param in jax.tree.leaves(table)
    }
    expected = {"A_log": "float32", "dt_bias": "float32", "conv1d.weight": "bfloat16"}
    expected["in_proj_qkv.weight"] = "bfloat16" if quantization == "none" else quantization
    assert expected == {name: formats[f"linear_attn.{name}"] for name in expected}
