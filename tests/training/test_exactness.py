"""A step of every arithmetic, on every mesh and with every memory option, is that of a plain
program.

The table combines models, adapters, strategies, meshes and memory options pairwise. The reference
(`runs.compile_reference`) has no mesh, microbatches or tiles, uses the slow attention oracle, and
differentiates all weights.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.strategy import Strategy
from jaxsp.blocks.config import DELTA_NET, DeltaNetConfig, Lora, ModelConfig
from jaxsp.core.batch import NO_LABEL
from jaxsp.model import decoder
from jaxsp.sharding import quantization, sharding
from jaxsp.system import device_memory
from jaxsp.training import train_state
from tests import batches, tolerances
from tests.attention.strategies import make_strategy
from tests.training import runs
from tests.training.mixed import MIXED

ROWS = batches.make_ragged_rows(num_rows=8, num_tokens=96, vocab_size=131, seed=4)
for name, array in ROWS.items():  # a row without segments
    array[5] = NO_LABEL if name == "labels_BL" else 0

LEARNING_RATE = 1e3
"""SGD: the weights after a step are nearly their gradients, so that one program shows all."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Its rows per microbatch are those of a sequence-parallel group."""

    sizes: tuple[int, int, int]
    model: ModelConfig = runs.MODEL
    strategy: Strategy | None = None
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    adapter: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 1


def heads(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return batches.model(num_heads=num_heads, num_kv_heads=num_kv_heads)


def share(inner: int, degree: int, tokens: str = "ring", kv_heads: int = 1, chunks: int = 2):
    """Ulysses among `inner` neighbors, times a ring or an all-gather of `degree`."""
    options = {"kv_heads_per_gather": kv_heads} if tokens == "all_gather" else {}
    options["chunks_per_device"] = chunks
    return make_strategy(seq=inner * degree, ulysses_degree=inner, tokens=tokens, **options)


def gather(inner: int, degree: int, kv_heads: int = 1, chunks: int = 2):
    return share(inner, degree, "all_gather", kv_heads, chunks)


TILES = {"mlp_tile_tokens": 5, "loss_tile_tokens": 7}
"""Neither divides a device's tokens."""
STACK = {"remat": "full", "offload_activations": "layer_inputs"}
"""Options with which the layers may have their own backward pass (model/layer_stack.py)."""
DURING = STACK | {"offload_during_attention": "always"}
KEPT = {"remat": "save_attention_and_mlp"}
INPUTS = {"offload_activations": "layer_inputs_and_attention"}
STATE = {"offload_optimizer": "state"}
ALL_STATE = {"offload_optimizer": "state_and_gradients"}
HOST = ALL_STATE | {"offload_activations": "layer_inputs"}

DENSE = runs.MODEL
TIED = batches.model(tie_embeddings=True)
FIVE = batches.model(num_layers=5)
EXPERTS = batches.expert_model()
DELTA_NETS = dataclasses.replace(
    DENSE,
    layers=(dataclasses.replace(DENSE.layers[0], mixer=DELTA_NET, rope=None), DENSE.layers[1]),
    delta_net=DeltaNetConfig(num_key_heads=2, num_heads=4, key_size=8, value_size=8, filter_size=4),
)

# Sides and rank of the second are computed as one product (blocks/adapted.py)
LORA = Lora(
    rank=3,
    scale=2.0,
    targets=("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"),
)
DORA = dataclasses.replace(LORA, rank=8, is_dora=True)
FUSED = Lora(rank=3, scale=2.0, targets=("self_attn.qkv_proj", "mlp.gate_up_proj"), is_dora=True)
OF_EXPERTS = Lora(
    rank=3,
    scale=2.0,
    targets=("self_attn.q_proj", "mlp.shared_expert.down_proj"),
    target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
PLAIN = {"type": "lora"}
SAVED = {"type": "lora", "modules_to_save": ["embed_tokens", "lm_head"]}
INT8 = PLAIN | {"quantization": "int8"}
NF4 = PLAIN | {"quantization": "nf4"}


def adapt(lora: Lora, model: ModelConfig = DENSE, **changes: Any) -> ModelConfig:
    return dataclasses.replace(model, lora=lora, **changes)


CASES = {
    # meshes
    "one device": Case((1, 1, 1), rows=8),
    "data 8": Case((1, 8, 1)),
    "Ulysses 8": Case((1, 1, 8), heads(8, 8), rows=4),
    "tied, replicas": Case((2, 2, 2), TIED, rows=2),
    "experts": Case((1, 4, 2), EXPERTS, rows=2),
    "delta nets": Case((1, 2, 4), DELTA_NETS, rows=2),
    "delta nets, data 8, tiles": Case((1, 8, 1), DELTA_NETS, memory=TILES),
    # strategies
    "ring 4, 7 and 1 heads": Case((1, 1, 4), heads(7, 1), share(1, 4)),
    "ring 3, delta nets": Case((1, 1, 3), DELTA_NETS, share(1, 3), {"remat": "none"}, rows=2),
    "ring 3, two groups": Case((1, 2, 3), heads(5, 5), share(1, 3), rows=2),
    "ring 4 of 4 chunks": Case((1, 2, 4), heads(7, 1), share(1, 4, chunks=4), rows=2),
    "Ulysses 4 x ring 2": Case((1, 1, 8), heads(28, 4), share(4, 2), rows=2),
    "Ulysses 2 x ring 2, mixed": Case((1, 2, 4), MIXED, share(2, 2), rows=2),
    "Ulysses 3 x ring 2": Case((1, 1, 6), heads(6, 3), share(3, 2), rows=2),
    "gather 4, two groups": Case((1, 2, 4), heads(8, 4), gather(1, 4)),
    "gather 8 of both heads": Case((1, 1, 8), DENSE, gather(1, 8, 2), rows=4),
    "Ulysses 2 x gather 2 of 8 chunks": Case((2, 1, 4), heads(8, 4), gather(2, 2, chunks=8)),
    "Ulysses 2 x gather 3, 8 and 1 heads": Case((1, 1, 6), heads(8, 1), gather(2, 3), rows=2),
    "gather 3, mixed": Case((1, 1, 3), MIXED, gather(1, 3), {"remat": "none"}),
    # memory
    "nothing computed again": Case((1, 2, 4), memory={"remat": "none"}),
    "MLP kept in two layers": Case((1, 2, 4), FIVE, memory=KEPT | {"kept_mlp_layers": 2}),
    "attention and MLP kept, inputs offloaded": Case((2, 2, 2), memory=KEPT | INPUTS),
    "tiles, all again": Case((1, 1, 8), heads(8, 8), memory=TILES | {"remat": "full"}),
    "tiles, nothing else again": Case((1, 2, 4), memory=TILES | {"remat": "none"}),
    "every second input": Case((1, 2, 4), FIVE, memory=STACK | {"offload_every": 2}),
    "inputs offloaded during attention": Case(
        (2, 2, 2), FIVE, memory=DURING | TILES | ALL_STATE | {"offload_every": 3}
    ),
    "state": Case((2, 2, 2), memory=STATE),
    "all": Case((1, 2, 4), memory=TILES | ALL_STATE | INPUTS),
    "rows side by side": Case((1, 4, 1), TIED, memory=TILES | ALL_STATE, rows=2),
    "all on one device": Case((1, 1, 1), memory=TILES | STATE | STACK),
    "experts, products kept": Case((2, 2, 2), EXPERTS, memory={"remat": "none"}),
    "experts, tiles": Case((1, 2, 4), EXPERTS, memory=TILES),
    "experts, all": Case((1, 2, 4), EXPERTS, memory=DURING | TILES | ALL_STATE),
    "mixed, groups of layers": Case((1, 2, 4), MIXED, memory=DURING | {"offload_every": 3}),
    "mixed ring, groups of layers": Case(
        (1, 2, 4), MIXED, share(1, 4), DURING | {"offload_every": 3}
    ),
    # adapters
    "LoRA, ring": Case((1, 1, 4), adapt(LORA), share(1, 4), {}, PLAIN, rows=4),
    "DoRA": Case((1, 8, 1), adapt(DORA, intermediate_size=128), adapter=PLAIN),
    "DoRA, gather": Case((2, 1, 2), adapt(DORA), gather(1, 2), {}, PLAIN, rows=4),
    "LoRA, saved": Case((2, 2, 2), adapt(LORA), adapter=SAVED),
    "DoRA, tied": Case((2, 2, 2), adapt(DORA, TIED), adapter=SAVED),
    "fused": Case(
        (1, 4, 2),
        adapt(FUSED, has_fused_qkv=True, has_fused_gate_up=True),
        adapter=PLAIN,
    ),
    "DoRA, tiles": Case((1, 2, 4), adapt(DORA), None, TILES | {"remat": "full"}, PLAIN),
    "DoRA, offloaded": Case((1, 2, 4), adapt(DORA), None, HOST | TILES, SAVED),
    "DoRA, own backward pass": Case(
        (1, 2, 4), adapt(DORA), None, DURING | HOST | TILES | {"offload_every": 2}, SAVED
    ),
    "int8": Case((1, 2, 4), adapt(DORA), adapter=INT8),
    "nf4": Case((2, 2, 2), adapt(DORA), adapter=NF4),
    "int8, experts": Case((1, 2, 4), adapt(OF_EXPERTS, EXPERTS), None, TILES, INT8),
    "nf4, experts": Case((2, 2, 2), adapt(OF_EXPERTS, EXPERTS), adapter=NF4),
    "LoRA of experts, offloaded": Case(
        (1, 2, 4), adapt(OF_EXPERTS, EXPERTS), None, DURING | HOST | TILES, PLAIN
    ),
}
DEFAULT = ("tied, replicas",)
E2E = (
    "Ulysses 3 x ring 2",
    "Ulysses 2 x ring 2, mixed",
    "all",
    "inputs offloaded during attention",
    "experts, tiles",
    "delta nets",
    "DoRA, offloaded",
    "nf4",
)
"""The parts of the others, which are slow, are in these."""


def find_marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [] if runs.works_here(CASES[name].memory) else [runs.NEEDS_HOST]
    if name in DEFAULT:
        return marks
    return [*marks, pytest.mark.e2e if name in E2E else pytest.mark.slow]


pytestmark = pytest.mark.usefixtures("small_waits")


@functools.cache
def compile_step(name: str) -> runs.Run:
    case = CASES[name]
    return runs.compile_in_thread(
        case.sizes,
        config=batches.make_config(
            learning_rate=LEARNING_RATE, memory=case.memory, adapter=case.adapter
        ),
        model=case.model,
        rows_per_microbatch=case.rows,
        strategy=case.strategy,
        functions=("step",),
        arrays=ROWS,
    ).result()


def round_to_stored(param, weight):
    """A weight as a step sees it, which quantization has changed."""
    return quantization.decode(
        param, quantization.encode(param, np.asarray(weight)), jnp.dtype("float32")
    )


def check_step(name: str, arrays: batches.Arrays, record_property: Any) -> None:
    run = compile_step(name)
    table = run.spec.table
    weights = jax.tree.map(round_to_stored, table, runs.draw_weights(run.spec.model))
    before = {path: np.array(x) for path, x in run.unpad(run.state(weights).master).items()}
    state, actual = run.step(run.state(weights), run.rows(arrays))
    after = run.unpad(state.master)
    (loss, num_correct), gradients = runs.compile_reference(run.spec.model)(weights, arrays)
    trained = train_state.select_trained(table, gradients)
    errors = {
        path: batches.relative_error(after[path], before[path] - LEARNING_RATE * gradient)
        for path, gradient in batches.name_leaves(trained).items()
    }
    errors["loss"] = batches.relative_error(actual["loss"], loss)
    errors["norm"] = batches.relative_error(actual["grad_norm"], batches.norm(trained))
    record_property("largest relative difference", max(errors.values()))
    assert max(errors.values()) < tolerances.MESH, errors
    frozen = before.keys() - errors.keys()
    assert bool(frozen) == bool(CASES[name].adapter)
    for path in frozen:
        assert batches.is_bitwise_equal(after[path], before[path]), path
    lengths = arrays["lengths_BM"]
    counts = {
        "num_rows": (lengths.sum(1) > 0).sum(),
        "num_tokens": lengths.sum(),
        "num_loss_tokens": (arrays["labels_BL"] != NO_LABEL).sum(),
        "num_correct": num_correct,
    }
    assert {kind: int(actual[kind]) for kind in counts} == counts

    def check_stored(param, stored):  # a quantized weight has several arrays
        if param.frozen_as is None:
            unpadded = runs.remove_padding(param, stored)
            assert np.count_nonzero(stored) == np.count_nonzero(unpadded), "padding is not zero"
            if stored.size > 100 * (param.num_layers or 1):
                kind = device_memory.MEMORY_KIND if run.spec.has_offloaded_state else "device"
                assert stored.sharding.memory_kind == kind, param.hf_name

    jax.tree.map(check_stored, table, state.master)


@pytest.mark.parametrize("name", [pytest.param(name, marks=find_marks(name)) for name in CASES])
def test_a_step_is_that_of_a_plain_program(name, record_property):
    check_step(name, ROWS, record_property)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "where",
    [np.s_[:, 48:72], np.s_[0:2], np.s_[1::2], np.s_[:, 16:23], np.s_[0, 1:]],
    ids=["one shard", "a microbatch", "every row of one group", "a tile", "uneven rows"],
)
def test_a_part_without_labels_changes_nothing(where, record_property):
    """A shard has 24 tokens, a microbatch 2 rows, and a tile 5 tokens."""
    arrays = ROWS | {"labels_BL": ROWS["labels_BL"].copy()}
    arrays["labels_BL"][where] = NO_LABEL
    check_step("experts, tiles", arrays, record_property)


def test_the_model_has_weights_of_every_placement():
    """Whole, or sharded along dimension 0 or 1, with or without padding."""
    params = jax.tree.leaves(decoder.param_table(runs.MODEL))
    placements = [(param, sharding.choose_placement(param, 8)) for param in params]
    kinds = {(place.dim, place.stored_shape != param.shape) for param, place in placements}
    assert kinds == {(None, False), (0, False), (1, False), (0, True), (1, True)}
