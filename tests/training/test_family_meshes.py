"""Loss, gradients and counts of each model family on several meshes, and of a model with the
features that no family has, equal those of a plain program with the attention oracle."""

import pytest

from jaxsp.hf import model_config
from tests import batches
from tests.attention.strategies import make_strategy
from tests.hf import oracle
from tests.training import runs
from tests.training.mixed import MIXED

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
    "2x4 Ulysses of 2 x ring of 2": (2, make_strategy(seq=4, ulysses_degree=2)),
    "1x3 ring": (1, make_strategy(seq=3, ulysses_degree=1)),
    "1x5 all-gather": (
        1,
        make_strategy(seq=5, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=1),
    ),
}
"""Size of the data axis, and strategy."""

E2E = {
    ("mixed", "2x4 Ulysses of 2 x ring of 2"),
}
"""Has layers of several kinds. The others are slow: each compiles for about 15 s."""

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
