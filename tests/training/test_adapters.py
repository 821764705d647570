"""Dropout of adapters, and the matrices that they adapt, quantize and leave out.

`test_exactness.py` compares the gradients of adapters with those of a plain program.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxsp.blocks import linear
from jaxsp.blocks.config import Lora
from jaxsp.core.errors import UserError
from jaxsp.model import adapters
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.training import specs, train_state
from tests import batches, tolerances
from tests.attention.strategies import make_strategy
from tests.messages import assert_names
from tests.training import runs

DROPOUT_MESHES = (
    ((1, 1, 1), {"rows_per_microbatch": 16}, {}),
    ((1, 2, 4), {}, {}),
    (
        (2, 2, 2),
        {"rows_per_microbatch": 2, "strategy": make_strategy(seq=2, ulysses_degree=1)},
        {"mlp_tile_tokens": 5, "loss_tile_tokens": 7},
    ),
)


@pytest.mark.slow
@pytest.mark.usefixtures("small_waits")
def test_dropout_is_the_same_on_every_mesh_and_differs_between_steps():
    """On three meshes, with 1, 2 and 8 microbatches, with and without tiles."""
    lora = Lora(rank=3, scale=2.0, targets=("self_attn.q_proj", "mlp.down_proj"), dropout=0.3)
    model = dataclasses.replace(batches.model(), lora=lora)
    weights = runs.draw_weights(model)
    results = []
    for sizes, options, memory in DROPOUT_MESHES:
        config = batches.make_config(memory=memory, adapter={"type": "lora", "dropout": 0.3})
        run = runs.compile_in_thread(
            sizes, config=config, model=model, functions=("step",), **options
        ).result()
        state = run.state(weights)
        rows = run.rows(runs.ROWS)
        state, first = run.step(state, rows)
        later = dataclasses.replace(run.state(weights), step=jnp.full_like(state.step, 7))
        _, second = run.step(later, rows)
        trained = train_state.select_trained(
            run.spec.table, jax.tree.map(runs.remove_padding, run.spec.table, state.master)
        )
        results.append((float(first["loss"]), float(second["loss"]), batches.name_leaves(trained)))
    expected = results[0]
    plain, _ = runs.compile_reference(model)(weights, runs.ROWS)
    assert abs(expected[0] - expected[1]) > 1e-4
    assert abs(expected[0] - float(plain[0])) > 1e-4
    for result in results[1:]:
        assert result[:2] == pytest.approx(expected[:2], rel=tolerances.MESH)
        for path, weight in expected[2].items():
            assert batches.relative_error(result[2][path], weight) < tolerances.MESH, path


def test_dropout_keeps_the_expected_fraction_and_mean():
    x = jnp.ones((2, 50, 400))
    keys = linear.make_token_keys(
        seed=0, step=jnp.int32(3), rows_B=jnp.arange(2), tokens_l=jnp.arange(50)
    )
    dropped = linear.drop(x, keys, name="q_proj", rate=0.25)
    other = linear.drop(x, keys, name="v_proj", rate=0.25)
    assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert float(((dropped == 0) & (other == 0)).mean()) == pytest.approx(0.0625, abs=0.01)


def test_matrices_of_experts_are_quantized_and_routers_are_not():
    config = batches.make_config(adapter={"type": "lora", "quantization": "nf4"})
    model = adapters.add_adapter(batches.expert_model(), config.adapter)
    formats = {
        param.hf_name.removeprefix("model.layers.{layer}.").removesuffix(".weight"): param.frozen_as
        for param in jax.tree.leaves(specs.build_table(model, config.step)["layers"])
    }
    experts = [f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")]
    assert {formats[name] for name in (*experts, "self_attn.q_proj")} == {"nf4"}
    assert formats["mlp.gate"] == "float32"


@pytest.mark.parametrize("has_own_names", [True, False])
def test_projections_do_not_include_experts_and_routers(has_own_names):
    """Nor projections that PEFT would take for experts because of their names."""
    model = batches.expert_model()
    sizes = dataclasses.replace(model.experts, has_own_names=has_own_names)
    model = dataclasses.replace(model, experts=sizes)
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    expected = attention | {"mlp.shared_expert_gate"} | (set() if has_own_names else shared)
    assert set(adapters.find_targets(model, "all-linear")) == expected
    names = ("gate", "experts", "gate_up_proj", *(["down_proj"] if has_own_names else []))
    for name in names:
        with pytest.raises(UserError) as caught:
            adapters.find_targets(model, ("q_proj", name))
        words = (f"{name} would match experts or routers", "mlp.experts.down_proj", "all-linear")
        assert_names(caught.value, *words)


def test_names_of_experts_may_be_shortened_and_in_any_order():
    section = AdapterConfig(
        type="lora", targets=(), target_parameters=("down_proj", "experts.gate_up_proj")
    )
    lora = adapters.add_adapter(batches.expert_model(), section).lora
    assert (lora.targets, lora.target_parameters) == (
        (),
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    )
