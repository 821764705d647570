"""The delta rule on spans of rows equals the recurrence, token by token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.core import axes
from jaxsp.core.layout import Layout
from jaxsp.delta_rule import delta_rule
from jaxsp.delta_rule.spans import RowSpans, find_segments
from tests import batches

G = 2
H = 6
K = 8
V = 5
L = 480
SEGMENTS = [
    [(0, 1), (1, 5), (6, 1), (7, 1), (8, 130), (138, 3), (141, 319)],
    [(3, 64), (67, 2), (100, 380)],
    [],
]
"""Start and length of the segments of each row: over several spans, of one token, none."""
LAYOUTS = {
    "1": (1, Layout()),
    "2": (2, Layout()),
    "3": (3, Layout()),
    "8": (8, Layout()),
    "zigzag of 4": (4, Layout(degree=4, chunks_per_device=2)),
    "zigzag of 2, split among 2": (4, Layout(degree=2, chunks_per_device=4)),
    "zigzag of 2, unevenly split among 3": (6, Layout(degree=2, chunks_per_device=2)),
}


@pytest.fixture(autouse=True, scope="module")
def small_sections():
    """Several groups of several sections of several chunks, and sections with padding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "CHUNK_TOKENS", 8)
        patch.setattr(delta_rule, "SECTION_TOKENS", 16)
        patch.setattr(delta_rule, "MATRICES_AT_A_TIME", 2 * H)
        yield


def draw(max_decay, dtype=np.float32):
    rng = np.random.default_rng(0)
    shape = (len(SEGMENTS), L)
    normal = lambda *dims: rng.standard_normal((*shape, *dims))
    arrays = {
        "q": normal(G, K),
        "k": normal(G, K),
        "v": normal(H, V),
        "g": -max_decay * rng.random((*shape, H)) ** 4,
        "beta": rng.random((*shape, H)),
        "dout": normal(H, V),
    }
    return {name: x.astype(dtype) for name, x in arrays.items()}


def slots():
    starts, lengths = np.zeros((2, len(SEGMENTS), 8), np.int32)
    for row, segments in enumerate(SEGMENTS):
        for slot, (start, length) in enumerate(segments):
            starts[row, slot] = start
            lengths[row, slot] = length
    return starts, lengths


def recurrence(q, k, v, g, beta, is_first, inside):
    """Outputs of one row, token by token."""
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
    repeat = lambda x: jnp.repeat(x, H // G, axis=1)
    q = repeat(unit(q)) * K**-0.5
    k = repeat(unit(k))

    def step(state, token):
        q, k, v, g, beta, is_first, inside = token
        old = jnp.where(is_first, 0, state) * jnp.exp(g)[:, None, None]
        error = v - jnp.einsum("hkv,hk->hv", old, k)
        state = old + jnp.einsum("hk,hv->hkv", k, beta[:, None] * error)
        out = jnp.einsum("hkv,hk->hv", state, q)
        return jnp.where(inside, state, 0), jnp.where(inside, out, 0)

    start = jnp.zeros((H, K, V), q.dtype)
    return jax.lax.scan(step, start, (q, k, v, g, beta, is_first, inside))[1]


def differentiate(function, arrays, *rest):
    """Output and gradients by name."""
    names = ("q", "k", "v", "g", "beta")
    out, pull = jax.vjp(lambda *x: function(*x, *rest), *(arrays[name] for name in names))
    return {"out": out} | dict(zip(names, pull(arrays["dout"]), strict=True))


@functools.cache
def expected(max_decay):
    with jax.enable_x64(True):
        segments = find_segments(*map(jnp.asarray, slots()), jnp.arange(L, dtype=jnp.int32))
        run = lambda *x: jax.vmap(recurrence)(*x)
        arrays = jax.tree.map(jnp.asarray, draw(max_decay, np.float64))
        result = differentiate(run, arrays, segments.is_first_Bl, segments.inside_Bl)
        return jax.tree.map(np.asarray, jax.jit(lambda: result)())


def compute(name, arrays):
    seq, layout = LAYOUTS[name]
    spans = RowSpans(seq=seq, layout=layout, tokens_per_device=L // seq)

    def local(arrays, starts, lengths):
        segments = find_segments(starts, lengths, spans.own_tokens())
        mask = segments.inside_Bl[..., None]

        def run(q, k, v, g, beta):
            q, k, v = (jnp.where(mask[..., None], x, 0) for x in (q, k, v))
            g, beta = (jnp.where(mask, x, 0) for x in (g, beta))
            return delta_rule.compute(q, k, v, g, beta, segments.is_first_Bl, spans=spans)

        return differentiate(run, arrays)

    order = layout.token_order(L)
    place = layout.place_of_token(L)
    mesh = batches.mesh(1, 1, seq)
    tokens = PartitionSpec(None, axes.SEQ)
    on_mesh = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(tokens, PartitionSpec(), PartitionSpec()),
            out_specs=tokens,
            check_vma=False,
        )
    )
    result = on_mesh({name: x[:, order] for name, x in arrays.items()}, *slots())
    return {name: np.asarray(x)[:, place] for name, x in result.items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("max_decay", [0.05, 16.0], ids=["slow decay", "fast decay"])
def test_outputs_and_gradients_are_those_of_the_recurrence(name, max_decay):
    actual = compute(name, draw(max_decay))
    for key, value in expected(max_decay).items():
        assert batches.relative_error(actual[key], value) < 2e-6, key
