"""Formulas of the bytes that each strategy sends, against the collectives of compiled layers."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.kernels.residuals import CHECKPOINT_NAMES as ATTENTION_NAMES
from jaxsp.attention.strategies.strategy import LayerWorkload
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
    "save_attention": jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Policy of what the backward pass of a layer keeps; None: everything."""


def compiled(strategy, H, G, remat, windows):
    """Text of a compiled scan over layers, forward and backward.

    A layer has projections around attention. What is in the loops counts for each layer.

    Args: windows: window of each layer.
    """
    attend = make_attend(
        strategy=strategy,
        kernel="blockwise",
        layer_scores=[ScoreConfig(window=window) for window in windows],
    )

    def layer(starts, lengths, tables, x, inputs):
        weights, kind = inputs
        q, k, v = ((x @ weight).reshape(*x.shape[:2], -1, K) for weight in weights[:3])
        return jnp.tanh(
            x
            + attend(q, k, v, starts, lengths, tables, kind=kind).reshape(*x.shape[:2], -1)
            @ weights[3].T
        ), None

    kinds = jnp.array(attend.layer_kinds)

    def loss(x, weights, starts, lengths):
        tables = attend.make_segment_tables(starts, lengths, tokens_per_device=x.shape[1])
        body = functools.partial(layer, starts, lengths, tables)
        if remat != "none":
            body = jax.checkpoint(body, policy=POLICIES[remat], prevent_cse=False)
        return (jax.lax.scan(body, x, (weights, kinds))[0] ** 2).sum()

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


def layer(strategy, H, G, remat, window=None):
    return LayerWorkload(
        num_rows=B,
        tokens_per_device=L // strategy.seq,
        num_heads=H,
        num_kv_heads=G,
        head_dim=K,
        dtype="float32",
        row_tokens=L,
        max_segments=1,
        remat=remat,
        window=window,
    )


WINDOW = L // 8

CASES = [
    (make_strategy(seq=8, ulysses_degree=8), 8, 2),  # K/V heads are repeated
    (make_strategy(seq=6, ulysses_degree=6), 12, 4),  # neither dividing nor divided
    (make_strategy(seq=4, ulysses_degree=1), 6, 3),
    (
        make_strategy(seq=4, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=2),
        8,
        4,
    ),
    (make_strategy(seq=6, ulysses_degree=3), 6, 2),
    (make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 6, 3),
    (make_strategy(seq=3, ulysses_degree=1, chunks_per_device=4), 6, 3),
]


TIERS = {
    ("Ulysses of 8", "full"): (),
    ("Ulysses of 6", "none"): (),
    ("Ulysses of 3 x ring of 2", "none"): pytest.mark.e2e,
}
"""Marks by strategy and policy; other combinations are slow."""

WINDOWED_CASES = [
    (make_strategy(seq=4, ulysses_degree=1), 6, 3, 14),  # 2 hops of a chunk, and one of a token
    (make_strategy(seq=2, ulysses_degree=1), 6, 3, 13),
    (make_strategy(seq=2, ulysses_degree=1, chunks_per_device=4), 6, 3, 13),
    (make_strategy(seq=4, ulysses_degree=1, tokens="all_gather"), 8, 4, WINDOW),
    (make_strategy(seq=6, ulysses_degree=3), 6, 2, WINDOW),
    (make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 6, 3, WINDOW),
]
"""With sliding windows, in tokens."""

WINDOWED_TIERS = {("ring of 4", "full"): ()}


def check_cost(strategy, H, G, remat, windows):
    sent = hlo.parse_collectives(compiled(strategy, H, G, remat, windows))
    # The small all-reduce of `make_segment_tables` runs once per microbatch
    sent = [collective for collective in sent if collective.operation != "all-reduce"]
    by_operation = {
        operation: sent_bytes.sum_bytes(sent, operation=operation) for operation in hlo.COLLECTIVES
    }
    formula = collections.Counter()
    for window in windows:
        workload = layer(strategy, H, G, remat, window)
        has_other_kinds = len(set(windows)) > 1
        workload = dataclasses.replace(workload, has_other_kinds=has_other_kinds)
        formula.update(strategy.sent_bytes(workload))
    assert {operation: size for operation, size in by_operation.items() if size} == formula


@pytest.mark.parametrize(
    ("strategy", "H", "G", "remat"),
    [
        pytest.param(*case, remat, marks=TIERS.get((case[0].description, remat), pytest.mark.slow))
        for case in CASES
        for remat in POLICIES
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_the_cost_is_what_the_compiled_layers_send(strategy, H, G, remat):
    check_cost(strategy, H, G, remat, [None] * NUM_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "H", "G", "window", "remat"),
    [
        pytest.param(
            *case, remat, marks=WINDOWED_TIERS.get((case[0].description, remat), pytest.mark.slow)
        )
        for case in WINDOWED_CASES
        for remat in POLICIES
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_layers_with_windows_send_only_what_the_windows_reach(strategy, H, G, window, remat):
    check_cost(strategy, H, G, remat, [window] * NUM_LAYERS)
