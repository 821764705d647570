"""What each kind of attention is said to send, against the collectives of compiled layers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxsp import attention
from jaxsp.attention.workload import LayerWorkload
from jaxsp.core import axes
from jaxsp.planner.cost import comms
from tests import batches
from tests.attention.strategies import make_strategy

B, L, D, K, NUM_LAYERS = 2, 48, 16, 8, 3

KEPT = {
    "none": None,
    "save_attention": jax.checkpoint_policies.save_only_these_names(*attention.CHECKPOINT_NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass of a layer keeps, if it does not keep everything."""


def compiled(kind, H, G, remat):
    """The text of a few layers of projections around attention, scanned, forward and backward: what is in the loops stands for
    a layer."""
    attend = attention.make_attend(strategy=kind, kernel="blockwise", window=None)
    starts, lengths = jnp.zeros((B, 1), jnp.int32), jnp.full((B, 1), L, jnp.int32)

    def layer(x, weights):
        q, k, v = ((x @ weight).reshape(*x.shape[:2], -1, K) for weight in weights[:3])
        return jnp.tanh(
            x + attend(q, k, v, starts, lengths).reshape(*x.shape[:2], -1) @ weights[3].T
        ), None

    body = (
        layer if remat == "none" else jax.checkpoint(layer, policy=KEPT[remat], prevent_cse=False)
    )
    loss = lambda x, weights: (jax.lax.scan(body, x, weights)[0] ** 2).sum()
    share, same = PartitionSpec(None, axes.SEQ), PartitionSpec()
    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=batches.mesh(1, 1, kind.seq),
        in_specs=(share, same),
        out_specs=(share, same),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    weights = [
        jax.ShapeDtypeStruct((NUM_LAYERS, D, heads * K), jnp.float32) for heads in (H, G, G, H)
    ]
    return jax.jit(gradients).lower(x, weights).compile().as_text()


def layer(kind, H, G, remat):
    return LayerWorkload(
        num_rows=B,
        tokens_per_device=L // kind.seq,
        num_heads=H,
        num_kv_heads=G,
        head_dim=K,
        dtype="float32",
        row_tokens=L,
        max_segments=1,
        remat=remat,
    )


KINDS = [
    (make_strategy(seq=8, ulysses_degree=8), 8, 2),  # K/V heads are repeated
    (make_strategy(seq=6, ulysses_degree=6), 12, 4),  # neither dividing nor divided
    (make_strategy(seq=4, ulysses_degree=1), 6, 3),
    (
        make_strategy(seq=4, ulysses_degree=1, outer_strategy="all_gather", kv_heads_per_gather=2),
        8,
        4,
    ),
    (make_strategy(seq=6, ulysses_degree=3), 6, 2),
    (make_strategy(seq=4, ulysses_degree=2, outer_strategy="all_gather"), 6, 3),
]


TIERS = {
    ("ulysses", "full"): (),
    ("ulysses", "none"): (),
    ("ring", "none"): pytest.mark.e2e,
    ("hybrid", "none"): pytest.mark.e2e,
}


@pytest.mark.parametrize(
    ("kind", "H", "G", "remat"),
    [
        pytest.param(*one, remat, marks=TIERS.get((one[0].name, remat), pytest.mark.slow))
        for one in KINDS
        for remat in KEPT
    ],
    ids=lambda one: getattr(one, "description", None),
)
def test_the_cost_is_what_the_compiled_layers_send(kind, H, G, remat):
    sent = comms.parse_collectives(compiled(kind, H, G, remat))
    found = {one: comms.sum_bytes(sent, operation=one) / NUM_LAYERS for one in comms.COLLECTIVES}
    formula = kind.sent_bytes(layer(kind, H, G, remat))
    assert {one: size for one, size in found.items() if size} == formula


def test_a_device_alone_sends_nothing():
    alone = make_strategy(seq=1, ulysses_degree=1)
    assert alone.sent_bytes(layer(alone, 2, 1, "full")) == {}
