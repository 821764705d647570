"""Loss, gradients, their norm and all counts with every strategy equal those of one device."""

import jax
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL
from tests import batches, tolerances
from tests.attention.strategies import make_strategy
from tests.training import runs

ROWS = batches.make_ragged_rows(num_rows=8, num_tokens=96, vocab_size=131, seed=4)


def of(inner, degree, tokens="ring", kv_heads=1, chunks=2):
    options = {"chunks_per_device": chunks}
    if tokens == "all_gather":
        options["kv_heads_per_gather"] = kv_heads
    return make_strategy(seq=inner * degree, ulysses_degree=inner, tokens=tokens, **options)


CASES = {
    "ring, 8 and 2 heads on 8": (8, 2, (1, 1), of(1, 8)),
    "ring, 7 and 1 heads on 4": (7, 1, (1, 1), of(1, 4)),
    "ring, 5 and 5 heads on 3, two groups": (5, 5, (1, 2), of(1, 3)),
    "gather, 8 and 4 heads on 4, two groups": (8, 4, (1, 2), of(1, 4, "all_gather")),
    "gather of both heads, 8 and 2 on 8": (8, 2, (1, 1), of(1, 8, "all_gather", 2)),
    "gather, 6 and 3 heads on 6": (6, 3, (1, 1), of(1, 6, "all_gather")),
    "Ulysses 4 x 2, 28 and 4 heads on 8": (28, 4, (1, 1), of(4, 2)),
    "Ulysses 2 x 4, 6 and 2 heads on 8": (6, 2, (1, 1), of(2, 4)),
    "Ulysses 2 x 2 with gather, 8 and 4 heads on 4, replicas": (
        8,
        4,
        (2, 1),
        of(2, 2, "all_gather"),
    ),
    "Ulysses 3 x 2, 6 and 3 heads on 6": (6, 3, (1, 1), of(3, 2)),
    "Ulysses 2 x 3 with gather, 8 and 1 heads on 6": (8, 1, (1, 1), of(2, 3, "all_gather")),
    "Ulysses, 6 and 2 heads on 6": (6, 2, (1, 1), of(6, 1)),
    "ring, 8 and 8 heads on 2, four groups": (8, 8, (1, 4), of(1, 2)),
    "ring, 28 and 2 heads on 6": (28, 2, (1, 1), of(1, 6)),
    "ring, 6 and 3 heads on 3, replicas": (6, 3, (2, 1), of(1, 3)),
    "gather of all heads, 8 and 4 on 8": (8, 4, (1, 1), of(1, 8, "all_gather", 4)),
    "gather, 7 and 1 heads on 8": (7, 1, (1, 1), of(1, 8, "all_gather")),
    "gather, 5 and 5 heads on 2, four groups": (5, 5, (1, 4), of(1, 2, "all_gather")),
    "Ulysses 4 x 2 with gather, 8 and 8 heads on 8": (8, 8, (1, 1), of(4, 2, "all_gather", 2)),
    "Ulysses 2 x 4 with gather, 8 and 1 heads on 8": (8, 1, (1, 1), of(2, 4, "all_gather")),
    "Ulysses 2 x 2, 28 and 4 heads on 4, two groups": (28, 4, (1, 2), of(2, 2)),
    "Ulysses 3 x 2 with gather, 6 and 6 heads on 6": (6, 6, (1, 1), of(3, 2, "all_gather", 2)),
    "Ulysses, 28 and 4 heads on 4, two groups": (28, 4, (1, 2), of(4, 1)),
    "ring, 7 and 7 heads on 8": (7, 7, (1, 1), of(1, 8)),
    "ring of 4 chunks each, 7 and 1 heads on 4, two groups": (7, 1, (1, 2), of(1, 4, chunks=4)),
    "Ulysses 2 x 2 with gather of 8 chunks each, 6 and 2 heads on 4": (
        6,
        2,
        (1, 1),
        of(2, 2, "all_gather", chunks=8),
    ),
}
"""Query and K/V heads, replica x data, kind."""

E2E = {"Ulysses, 6 and 2 heads on 6"}
"""The others are slow: each compiles for 15 s. `attention/test_strategies.py` tests attention in
more cases."""


STEEP = batches.make_config(learning_rate=1e3)
"""SGD with learning rate 1,000: the weights after a step are nearly their gradients."""


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e if name in E2E else pytest.mark.slow)
        for name in CASES
    ],
)
def test_every_strategy_gives_the_step_of_one_device(name, record_property):
    H, G, (replica, data), strategy = CASES[name]
    model = batches.model(num_heads=H, num_kv_heads=G)
    weights = runs.draw_weights(model)
    rows_per_microbatch = 2 if data * replica < 4 else 1
    options = {
        "rows_per_microbatch": rows_per_microbatch,
        "config": STEEP,
        "functions": ("step",),
        "arrays": ROWS,
    }
    run = runs.compile_in_thread(
        (replica, data, strategy.seq), model=model, strategy=strategy, **options
    ).result()
    state, actual = run.step(run.state(weights), run.rows(ROWS))
    (loss, num_correct), gradients = runs.compile_reference(model)(weights, ROWS)
    lengths = ROWS["lengths_BM"]
    num_labels = (ROWS["labels_BL"] != NO_LABEL).sum()
    assert [
        int(x) for x in (actual["num_rows"], actual["num_tokens"], actual["num_loss_tokens"])
    ] == [(lengths.sum(1) > 0).sum(), lengths.sum(), num_labels]
    assert float(actual["token_accuracy"]) == np.float32(num_correct) / np.float32(num_labels)
    right = batches.name_leaves(jax.tree.map(lambda w, g: w - 1e3 * g, weights, gradients))
    after = run.unpad(state.master)
    differences = {name: batches.relative_error(after[name], right[name]) for name in right}
    differences["loss"] = batches.relative_error(actual["loss"], loss)
    differences["norm"] = batches.relative_error(actual["grad_norm"], batches.norm(gradients))
    record_property("largest relative difference", max(differences.values()))
    assert max(differences.values()) < tolerances.MESH, differences
