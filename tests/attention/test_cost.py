"""What Ulysses is said to send, against the all-to-alls of compiled layers."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxsp import attention
from jaxsp.core import axes
from tests import batches

B, L, D, K, NUM_LAYERS = 2, 48, 16, 8, 3

KEPT = {
    "none": None,
    "attention": jax.checkpoint_policies.save_only_these_names(*attention.RESIDUALS),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass of a layer keeps, if it does not keep everything."""


def compiled(seq, H, G, remat):
    """The text of a few layers of projections around attention, scanned, forward and backward: what is in the loops stands for
    a layer."""
    attend = attention.make_attend(seq=seq, kernel="blockwise", window=None)
    starts, lengths = jnp.zeros((B, 1), jnp.int32), jnp.full((B, 1), L, jnp.int32)

    def layer(x, weights):
        q, k, v = ((x @ weight).reshape(*x.shape[:2], -1, K) for weight in weights[:3])
        return jnp.tanh(x + attend(q, k, v, starts, lengths).reshape(*x.shape[:2], -1) @ weights[3].T), None

    body = layer if remat == "none" else jax.checkpoint(layer, policy=KEPT[remat], prevent_cse=False)
    loss = lambda x, weights: (jax.lax.scan(body, x, weights)[0] ** 2).sum()
    share, same = PartitionSpec(None, axes.SEQ), PartitionSpec()
    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=batches.mesh(1, 1, seq),
        in_specs=(share, same),
        out_specs=(share, same),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    weights = [jax.ShapeDtypeStruct((NUM_LAYERS, D, heads * K), jnp.float32) for heads in (H, G, G, H)]
    return jax.jit(gradients).lower(x, weights).compile().as_text()


def bytes_sent(text, seq):
    """By one device, in all all-to-alls of a program: each lists the parts for all devices, of which one is its own."""
    results = [line.partition(" all-to-all(")[0] for line in text.splitlines() if " all-to-all(" in line]
    parts = [math.prod(map(int, dims.split(","))) for result in results for dims in re.findall(r"f32\[([\d,]+)\]", result)]
    assert len(parts) == len(results) * seq
    return 4 * sum(parts) * (seq - 1) // seq


# K/V heads: repeated; neither dividing nor divided
@pytest.mark.parametrize("remat", KEPT)
@pytest.mark.parametrize(("seq", "H", "G"), [(8, 8, 2), (6, 12, 4)])
def test_the_cost_is_what_the_compiled_layers_send(seq, H, G, remat):
    said = attention.cost(
        seq=seq, rows=B, share_tokens=L // seq, num_heads=H, num_kv_heads=G, head_dim=K, itemsize=4, remat=remat
    )
    assert bytes_sent(compiled(seq, H, G, remat), seq) == said


def test_a_device_alone_sends_nothing():
    assert attention.cost(seq=1, rows=1, share_tokens=8, num_heads=2, num_kv_heads=1, head_dim=8, itemsize=2, remat="full") == 0
