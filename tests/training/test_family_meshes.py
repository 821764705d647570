"""Loss, gradients and counts of each model family on several meshes, and of a model with the
features that no family has, equal those of a plain program with the attention oracle."""

import dataclasses

import pytest

from jaxsp.hf import model_config
from jaxsp.model.config import LayerConfig, NormNames, QueryScale
from tests import batches
from tests.attention.strategies import make_strategy
from tests.hf import oracle
from tests.training import runs
from tests.training.test_memory_options import NEEDS_HOST

ROW_TOKENS = 480
SEGMENTS = [
    [(0, 400), (400, 2), (402, 71)],
    [(0, 2), (2, 3), (5, 57), (70, 211), (290, 190)],
    [(0, 7), (7, 473)],
    [(16, 130), (146, 30), (176, 2), (178, 300)],
]
"""Start and length of each document: 2 to 473 tokens, with padding between some of them."""

MESHES = {
    "2x4 Ulysses": (2, make_strategy(seq=4, ulysses_degree=4)),
    "2x4 hybrid of 2 and a ring of 2": (2, make_strategy(seq=4, ulysses_degree=2)),
    "1x3 ring": (1, make_strategy(seq=3, ulysses_degree=1)),
    "1x5 all-gather": (
        1,
        make_strategy(seq=5, ulysses_degree=1, outer_strategy="all_gather", kv_heads_per_gather=1),
    ),
}
"""Size of the data axis, and strategy."""

ROPES = [batches.make_rope(8), batches.make_rope(8, rope_theta=50.0)]

MIXED = dataclasses.replace(
    batches.model(
        num_kv_heads=4,
        norm="layer",
        norm_names=NormNames(pre_mlp=None, post_attention="after", post_mlp="last"),
        qk_norm="projection",
        activation="gelu_tanh",
        is_parallel=True,
        has_sinks=True,
        query_scale=QueryScale(beta=0.3, original_max_position_embeddings=20),
        attention_scale=0.5,
        attention_softcap=3.0,
        embedding_scale=2.0,
        residual_scale=0.7,
        logit_scale=0.8,
        logit_softcap=4.0,
        tie_embeddings=True,
    ),
    layers=tuple(
        LayerConfig(window=window, rope=rope)
        for window, rope in [(9, ROPES[0]), (100, ROPES[0]), (None, ROPES[1]), (9, ROPES[1])]
    ),
)
"""Three kinds of layers in an irregular order, sinks, and each scale and limit."""

E2E = {
    ("gemma3", "2x4 hybrid of 2 and a ring of 2"),
    ("phi3", "2x4 Ulysses"),
    ("cohere2", "1x3 ring"),
    ("olmo3", "1x5 all-gather"),
    ("mixed", "1x3 ring"),
    ("mixed", "2x4 hybrid of 2 and a ring of 2"),
}
"""Each compiles for about 15 s; the others are slow."""

CASES = [
    pytest.param(
        name,
        mesh,
        id=f"{name}, {mesh}",
        marks=pytest.mark.e2e if (name, mesh) in E2E else pytest.mark.slow,
    )
    for name in [*oracle.MODELS, "mixed"]
    for mesh in MESHES
]


def make_model(name):
    if name == "mixed":
        return MIXED
    return model_config.parse_model_config(
        oracle.MODELS[name], field="model.config", row_tokens=ROW_TOKENS
    )


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_family_gives_the_same_gradients_on_every_mesh(name, mesh, record_property):
    data, strategy = MESHES[mesh]
    model = make_model(name)
    rows = batches.make_rows(SEGMENTS, num_tokens=ROW_TOKENS, vocab_size=model.vocab_size, seed=3)
    run = runs.compile_in_thread(
        (1, data, strategy.seq),
        rows_per_microbatch=1,
        model=model,
        functions=("gradients",),
        arrays=rows,
        strategy=strategy,
    ).result()
    runs.check_gradients(run, runs.draw_weights(model), rows, record_property)


@pytest.mark.e2e
@NEEDS_HOST
@pytest.mark.usefixtures("small_shards")
def test_layers_of_several_kinds_in_groups_have_the_same_gradients(record_property):
    """Four layers, of which the inputs of the first and the last are kept."""
    memory = {
        "remat": "full",
        "offload_activations": "layer_inputs",
        "offload_every": 3,
        "offload_during_attention": "always",
    }
    data, strategy = MESHES["2x4 hybrid of 2 and a ring of 2"]
    rows = batches.make_rows(SEGMENTS, num_tokens=ROW_TOKENS, vocab_size=MIXED.vocab_size, seed=3)
    run = runs.compile_in_thread(
        (1, data, strategy.seq),
        rows_per_microbatch=1,
        config=batches.make_config(memory=memory),
        model=MIXED,
        functions=("gradients",),
        arrays=rows,
        strategy=strategy,
    ).result()
    runs.check_gradients(run, runs.draw_weights(MIXED), rows, record_property)
