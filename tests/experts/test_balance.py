"""Statistics of routers and their losses, on every mesh and beside those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.core.batch import NO_LABEL
from jaxsp.experts import routing
from jaxsp.hf import model_config
from jaxsp.hf.model_source import ModelSourceConfig
from tests import batches
from tests.training import runs

PLAIN = batches.expert_model()
MODEL = model_config.add_router_losses(
    PLAIN, ModelSourceConfig(source="x", router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
)


def sum_row(logits_NTE, num_chosen):
    """Sums over a row of one segment, on one device."""
    statistics = []
    for logits_TE in logits_NTE:
        _, experts_TK = routing.route(logits_TE, num_chosen=num_chosen, is_normalized=True)
        statistics.append(routing.measure(logits_TE, experts_TK))
    of_row = jax.tree.map(lambda *x: jnp.stack(x).sum(1)[:, None], *statistics)
    lengths_BM = jnp.full((1, 1), logits_NTE.shape[1])
    return jax.shard_map(
        routing.sum_over_rows,
        mesh=batches.mesh(1, 1, 1),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(of_row, lengths_BM)


def test_the_loss_of_a_row_and_its_gradient_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    logits_NTE = np.random.default_rng(0).normal(size=(3, 50, 8)).astype(np.float32)
    theirs = [torch.tensor(logits, requires_grad=True) for logits in logits_NTE]
    expected = modeling_qwen3_moe.load_balancing_loss_func(tuple(theirs), 8, top_k=2)
    expected.backward()
    loss, gradient = jax.value_and_grad(lambda x: sum_row(x, 2)["router_aux_loss_sum"])(
        jnp.asarray(logits_NTE)
    )
    assert batches.relative_error(loss, expected.item()) < 1e-6
    for ours, logits in zip(gradient, theirs, strict=True):
        assert batches.relative_error(ours, logits.grad.numpy()) < 1e-5


def test_statistics_of_known_logits():
    """Tokens of the first layer always choose expert 0; those of the second have equal logits."""
    certain = jnp.tile(jnp.array([30.0, 0.0, 0.0, 0.0]), (6, 1))
    sums = sum_row(jnp.stack([certain, jnp.zeros((6, 4))]), 1)
    assert sums["router_counts_NE"].tolist() == [[6, 0, 0, 0], [6, 0, 0, 0]]
    assert sums["router_entropy_sum"] == pytest.approx(0.5, abs=1e-6)
    assert sums["router_z_loss_sum"] == pytest.approx((30**2 + np.log(4) ** 2) / 2, rel=1e-6)
    # 4 * 1 * (1 + 1/4) / 2
    assert sums["router_aux_loss_sum"] == pytest.approx(2.5, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [
        pytest.param((1, 2, 4), {"mlp_tile_tokens": 7}, marks=pytest.mark.e2e),
    ],
)
def test_gradients_with_losses_of_routers_are_those_of_a_plain_program(
    small_shards, sizes, memory, record_property
):
    run = runs.compile_in_thread(
        sizes,
        rows_per_microbatch=2 if sizes[1] == 2 else 1,
        model=MODEL,
        config=batches.make_config(memory=memory),
        functions=("gradients",),
    ).result()
    weights = runs.draw_weights(MODEL)
    rows = {name: array.copy() for name, array in runs.ROWS.items()}
    for name, array in rows.items():
        array[5] = NO_LABEL if name == "labels_BL" else 0  # a row without segments
    runs.check_gradients(run, weights, rows, record_property)
    _, results = run.gradients(run.state(weights).master, run.rows(rows))
    counts_NE = np.asarray(results["router_counts_NE"])
    num_tokens = rows["lengths_BM"].sum()
    assert counts_NE.sum(1).tolist() == [num_tokens * PLAIN.experts.num_chosen] * PLAIN.num_layers
    assert results["router_max_load"] == pytest.approx(
        (counts_NE.max(1) / counts_NE.mean(1)).max(), rel=1e-6
    )
