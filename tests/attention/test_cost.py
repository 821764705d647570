"""Formulas of the bytes that each strategy sends, against the collectives of compiled layers."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import CHECKPOINT_NAMES, make_attend
from jaxsp.attention.kernels.kernel import AttentionWorkload, ScoreConfig
from jaxsp.core import axes
from jaxsp.planning import hlo
from tests import batches
from tests.attention.strategies import make_strategy
from tests.planning import sent_bytes

B = 2
L = 48
D = 16
K = 8
NUM_LAYERS = 3

POLICIES = {
    "none": None,
    "save_attention": jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Policy of what the backward pass of a layer keeps; None: everything."""


def compiled(strategy, H, G, remat, window):
    """Text of a compiled scan over layers, forward and backward.

    A layer has projections around attention. What is in the loops counts for each layer.
    """
    score = ScoreConfig(window=window)
    attend = make_attend(strategy=strategy, kernel="blockwise", layer_scores=[score])

    def layer(starts, lengths, tables, x, weights):
        q, k, v = ((x @ weight).reshape(*x.shape[:2], -1, K) for weight in weights[:3])
        out = attend(q, k, v, starts, lengths, tables)
        return jnp.tanh(x + out.reshape(*x.shape[:2], -1) @ weights[3].T), None

    def loss(x, weights, starts, lengths):
        tables = attend.make_segment_tables(starts, lengths, tokens_per_device=x.shape[1])
        body = functools.partial(layer, starts, lengths, tables)
        if remat != "none":
            body = jax.checkpoint(body, policy=POLICIES[remat], prevent_cse=False)
        return (jax.lax.scan(body, x, weights)[0] ** 2).sum()

    shard = PartitionSpec(None, axes.SEQ)
    whole = PartitionSpec()
    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=batches.mesh(1, 1, strategy.seq),
        in_specs=(shard, whole, whole, whole),
        out_specs=(shard, whole),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    weights = [
        jax.ShapeDtypeStruct((NUM_LAYERS, D, heads * K), jnp.float32) for heads in (H, G, G, H)
    ]
    slots = jax.ShapeDtypeStruct((B, 1), jnp.int32)
    return jax.jit(gradients).lower(x, weights, slots, slots).compile().as_text()


WINDOW = L // 8

CASES = [
    (make_strategy(seq=8, ulysses_degree=8), 8, 2, None),  # K/V heads are repeated
    (make_strategy(seq=6, ulysses_degree=6), 12, 4, None),  # neither dividing nor divided
    (make_strategy(seq=4, ulysses_degree=1), 6, 3, None),
    (
        make_strategy(seq=4, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=2),
        8,
        4,
        None,
    ),
    (make_strategy(seq=6, ulysses_degree=3), 6, 2, None),
    (make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 6, 3, None),
    (make_strategy(seq=3, ulysses_degree=1, chunks_per_device=4), 6, 3, None),
    (make_strategy(seq=4, ulysses_degree=1), 6, 3, 14),  # 2 hops of a chunk, and one of a token
    (make_strategy(seq=2, ulysses_degree=1), 6, 3, 13),
    (make_strategy(seq=2, ulysses_degree=1, chunks_per_device=4), 6, 3, 13),
    (make_strategy(seq=4, ulysses_degree=1, tokens="all_gather"), 8, 4, WINDOW),
    (make_strategy(seq=6, ulysses_degree=3), 6, 2, WINDOW),
    (make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 6, 3, WINDOW),
]
"""Strategy, query heads, K/V heads and window of all layers."""

TIERS = {
    ("Ulysses of 8", None, "full"): (),
    ("Ulysses of 6", None, "none"): (),
    ("Ulysses of 3 x ring of 2", None, "none"): pytest.mark.e2e,
}
"""Marks by strategy, window and policy; other combinations are slow."""


@pytest.mark.parametrize(
    ("strategy", "H", "G", "window", "remat"),
    [
        pytest.param(
            *case, remat, marks=TIERS.get((case[0].description, case[3], remat), pytest.mark.slow)
        )
        for case in CASES
        for remat in POLICIES
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_the_cost_is_what_the_compiled_layers_send(strategy, H, G, window, remat):
    sent = hlo.parse_collectives(compiled(strategy, H, G, remat, window))
    # The small all-reduce of `make_segment_tables` runs once per microbatch
    sent = [collective for collective in sent if collective.operation != "all-reduce"]
    by_operation = {
        operation: sent_bytes.sum_bytes(sent, operation=operation) for operation in hlo.COLLECTIVES
    }
    workload = AttentionWorkload(
        num_rows=B,
        row_tokens=L,
        max_segments=1,
        num_heads=H,
        num_kv_heads=G,
        head_dim=K,
        dtype="float32",
        seq=strategy.seq,
        remat=remat,
        window=window,
    )
    formula = collections.Counter()
    for _ in range(NUM_LAYERS):
        formula.update(strategy.sent_bytes(workload))
    assert {operation: size for operation, size in by_operation.items() if size} == formula
