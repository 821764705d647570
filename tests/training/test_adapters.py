"""Adapters on every mesh, with every strategy and memory option, equal those of a plain program.

The reference differentiates all weights, without a mesh; only the adapters' part is compared.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks import linear
from jaxsp.blocks.config import Lora
from jaxsp.core.errors import UserError
from jaxsp.model import adapters
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.sharding import quantization
from jaxsp.training import trainable
from tests import batches, tolerances
from tests.attention.strategies import make_strategy
from tests.messages import assert_names
from tests.training import runs
from tests.training.test_memory_options import NEEDS_HOST, works_here

PROJECTIONS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
LORA = Lora(rank=3, scale=2.0, targets=PROJECTIONS)
DORA = dataclasses.replace(LORA, is_dora=True)
FUSED = Lora(rank=3, scale=2.0, targets=("self_attn.qkv_proj", "mlp.gate_up_proj"), is_dora=True)
PLAIN = {"type": "lora"}
TILES = {"mlp_tile_tokens": 5, "loss_tile_tokens": 7}
HOST = {"offload_optimizer": "state_and_gradients", "offload_activations": "layer_inputs"}


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: tuple[int, int, int]
    lora: Lora = LORA
    strategy: str = "auto"
    memory: dict = dataclasses.field(default_factory=dict)
    adapter: dict = dataclasses.field(default_factory=lambda: PLAIN)
    model: dict = dataclasses.field(default_factory=dict)
    has_experts: bool = False
    rows: int = 1


SAVED = {"type": "lora", "modules_to_save": ["embed_tokens", "lm_head"]}
CASES = {
    "one device": Case((1, 1, 1), rows=4),
    # Sides and rank that are computed as one product (blocks/adapted.py)
    "data parallel": Case(
        (1, 8, 1), dataclasses.replace(DORA, rank=8), model={"intermediate_size": 128}
    ),
    "ring": Case((1, 1, 4), strategy="ring", rows=4),
    "all_gather": Case((2, 1, 2), DORA, strategy="all_gather", rows=4),
    "replicas": Case((2, 2, 2), adapter=SAVED),
    "tied": Case((2, 2, 2), DORA, adapter=SAVED, model={"tie_embeddings": True}),
    "fused": Case((1, 4, 2), FUSED, model={"has_fused_qkv": True, "has_fused_gate_up": True}),
    "tiles": Case((1, 2, 4), DORA, memory=TILES | {"remat": "full"}),
    "products kept": Case((1, 2, 4), memory={"remat": "none"}),
    "all offloaded": Case((1, 2, 4), DORA, memory=HOST | TILES, adapter=SAVED),
}
STACK = {"remat": "full", "offload_every": 2, "offload_during_attention": "always"}
CASES["own backward pass"] = Case((1, 2, 4), DORA, memory=HOST | TILES | STACK, adapter=SAVED)
for name, sizes in {"int8": (1, 2, 4), "nf4": (2, 2, 2)}.items():
    CASES[name] = Case(sizes, DORA, adapter=PLAIN | {"quantization": name})
    targets = (*PROJECTIONS[:2], "mlp.shared_expert.down_proj")
    lora = dataclasses.replace(LORA, targets=targets)
    adapter = PLAIN | {"quantization": name}
    CASES[f"{name} experts"] = Case(sizes, lora, adapter=adapter, has_experts=True)
OF_EXPERTS = dataclasses.replace(
    LORA,
    targets=PROJECTIONS[:1],
    target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
DOWN_ONLY = dataclasses.replace(
    OF_EXPERTS, targets=(), target_parameters=("mlp.experts.down_proj",)
)
CASES |= {
    "matrices of experts": Case((1, 2, 4), OF_EXPERTS, memory=TILES, has_experts=True),
    "matrices of experts in nf4": Case(
        (2, 2, 2), OF_EXPERTS, adapter=PLAIN | {"quantization": "nf4"}, has_experts=True
    ),
    "matrices of experts offloaded": Case(
        (1, 2, 4), OF_EXPERTS, memory=HOST | TILES | STACK, has_experts=True
    ),
    "experts only": Case((1, 8, 1), DOWN_ONLY, has_experts=True),
}
E2E = ("nf4", "all offloaded")


def marks(name):
    found = [pytest.mark.e2e if name in E2E else pytest.mark.slow]
    return found + ([] if works_here(CASES[name].memory) else [NEEDS_HOST])


each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in CASES]
)


pytestmark = pytest.mark.usefixtures("small_waits")


@pytest.fixture(scope="module")
def run_of(small_waits):
    @functools.cache
    def run(name):
        case = CASES[name]
        model = batches.expert_model() if case.has_experts else batches.model(**case.model)
        strategy = None
        if case.strategy in ("ring", "all_gather"):
            strategy = make_strategy(seq=case.sizes[-1], ulysses_degree=1, tokens=case.strategy)
        return runs.compile_in_thread(
            case.sizes,
            config=batches.make_config(memory=case.memory, adapter=case.adapter),
            model=dataclasses.replace(model, lora=case.lora),
            rows_per_microbatch=case.rows,
            strategy=strategy,
        ).result()

    return run


def round_to_stored(param, weight):
    """A weight as a step sees it, which quantization has changed."""
    stored = quantization.encode(param, np.asarray(weight))
    return quantization.decode(param, stored, jnp.dtype("float32"))


@each_case
def test_loss_gradients_and_weights_are_those_of_a_plain_program(run_of, name, record_property):
    """SGD with learning rate 1: the step subtracts the gradient."""
    run = run_of(name)
    drawn = runs.draw_weights(run.spec.model)
    weights = jax.tree.map(round_to_stored, run.spec.table, drawn)
    runs.check_gradients(run, weights, runs.ROWS, record_property)
    before = {path: np.asarray(x) for path, x in run.unpad(run.state(weights).master).items()}
    _, gradients = runs.compile_reference(run.spec.model)(weights, runs.ROWS)
    state, _ = run.step(run.state(weights), run.rows(runs.ROWS))
    after = run.unpad(state.master)
    trained = batches.name_leaves(trainable.select_trained(run.spec.table, gradients))
    for path, gradient in trained.items():
        error = batches.relative_error(after[path], before[path] - gradient)
        assert error < tolerances.MESH, path
    frozen = after.keys() - trained.keys()
    assert len(frozen) > 10
    for path in frozen:
        assert batches.is_bitwise_equal(after[path], before[path]), path


DROPOUT_MESHES = {
    (1, 1, 1): Case((1, 1, 1), rows=16),
    (1, 2, 4): Case((1, 2, 4)),
    (2, 2, 2): Case((2, 2, 2), strategy="ring", rows=2, memory=TILES),
}


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh_and_differs_between_steps(small_waits):
    """On three meshes, with 1, 2 and 8 microbatches, with and without tiles."""
    model = dataclasses.replace(batches.model(), lora=dataclasses.replace(LORA, dropout=0.3))
    futures = [
        runs.compile_in_thread(
            case.sizes,
            config=batches.make_config(memory=case.memory, adapter=PLAIN | {"dropout": 0.3}),
            model=model,
            rows_per_microbatch=case.rows,
            functions=("step",),
            strategy=None
            if case.strategy == "auto"
            else make_strategy(seq=case.sizes[-1], ulysses_degree=1),
        )
        for case in DROPOUT_MESHES.values()
    ]
    weights = runs.draw_weights(model)
    results = []
    for future in futures:
        run = future.result()
        state = run.state(weights)
        rows = run.rows(runs.ROWS)
        state, first = run.step(state, rows)
        later = dataclasses.replace(run.state(weights), step=jnp.full_like(state.step, 7))
        _, second = run.step(later, rows)
        trained = trainable.select_trained(
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
    config = batches.make_config(adapter=PLAIN | {"quantization": "nf4"})
    model = adapters.add_adapter(batches.expert_model(), config.adapter)
    formats = {
        param.hf_name.removeprefix("model.layers.{layer}.").removesuffix(".weight"): param.frozen_as
        for param in jax.tree.leaves(trainable.build_table(model, config.step)["layers"])
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


NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def test_names_of_experts_may_be_shortened_and_in_any_order():
    section = AdapterConfig(
        type="lora", targets=(), target_parameters=("down_proj", "experts.gate_up_proj")
    )
    lora = adapters.add_adapter(batches.expert_model(), section).lora
    assert (lora.targets, lora.target_parameters) == ((), NAMES)
