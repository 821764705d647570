"""The delta rule on spans of rows equals the recurrence, token by token, in float64, and nothing
passes from one document to the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.core import axes
from jaxsp.core.layout import Layout
from jaxsp.delta_rule import delta_rule
from jaxsp.delta_rule.spans import RowSpans, convolve, find_segments
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
DEFAULT = ("1", "3", "zigzag of 4")
"""One device, states from device to device, and states of all spans. Each compiles for 4 s."""

each_layout = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in LAYOUTS],
)


@pytest.fixture(autouse=True, scope="module")
def small_sections():
    """Several groups of several sections of several chunks, and sections with padding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "CHUNK_TOKENS", 8)
        patch.setattr(delta_rule, "SECTION_CHUNKS", 2)
        patch.setattr(delta_rule, "MATRICES_AT_ONCE", 0)
        patch.setattr(delta_rule, "MATRICES_AT_A_TIME", 8 * H)
        yield


def draw(max_decay, *, is_rounded=False, max_strength=1.0):
    """Args: is_rounded: all but decays and strengths are numbers of bfloat16."""
    rng = np.random.default_rng(0)
    shape = (len(SEGMENTS), L)
    normal = lambda *dims: rng.standard_normal((*shape, *dims))
    arrays = {
        "q": normal(G, K),
        "k": normal(G, K),
        "v": normal(H, V),
        "g": -max_decay * rng.random((*shape, H)) ** 4,
        "beta": max_strength * rng.random((*shape, H)),
        "dout": normal(H, V),
    }
    rounded = ("q", "k", "v", "dout") if is_rounded else ()
    return {
        name: x.astype(jnp.bfloat16 if name in rounded else np.float32)
        for name, x in arrays.items()
    }


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
def expected(max_decay, *, is_rounded=False, max_strength=1.0):
    with jax.enable_x64(True):
        segments = find_segments(*map(jnp.asarray, slots()), jnp.arange(L, dtype=jnp.int32))
        drawn = draw(max_decay, is_rounded=is_rounded, max_strength=max_strength)
        arrays = {name: jnp.asarray(x, jnp.float64) for name, x in drawn.items()}
        rest = (segments.is_first_Bl, segments.inside_Bl)
        run = jax.jit(lambda arrays: differentiate(jax.vmap(recurrence), arrays, *rest))
        return jax.tree.map(np.asarray, run(arrays))


def run_on_mesh(seq, function, in_specs, out_specs):
    """A compiled function of this many devices along a row."""
    return jax.jit(
        jax.shard_map(
            function,
            mesh=batches.mesh(1, 1, seq),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
    )


TOKENS = PartitionSpec(None, axes.SEQ)


@functools.cache
def compile_rule(name):
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

    return run_on_mesh(seq, local, (TOKENS, PartitionSpec(), PartitionSpec()), TOKENS)


def compute(name, arrays):
    _, layout = LAYOUTS[name]
    order = layout.token_order(L)
    place = layout.place_of_token(L)
    result = compile_rule(name)({name: x[:, order] for name, x in arrays.items()}, *slots())
    return {name: np.asarray(x)[:, place] for name, x in result.items()}


@each_layout
@pytest.mark.parametrize("max_decay", [0.05, 16.0], ids=["slow decay", "fast decay"])
def test_outputs_and_gradients_are_those_of_the_recurrence(name, max_decay):
    actual = compute(name, draw(max_decay))
    for key, value in expected(max_decay).items():
        assert batches.relative_error(actual[key], value) < 2e-6, key


@each_layout
def test_strengths_up_to_2_are_as_accurate(name):
    """A map of a state has eigenvalues down to -1 then, and still a norm of at most 1."""
    actual = compute(name, draw(0.05, max_strength=2.0))
    for key, value in expected(0.05, max_strength=2.0).items():
        assert batches.relative_error(actual[key], value) < 2e-6, key


@pytest.mark.e2e
def test_in_bfloat16_the_error_is_that_of_rounding():
    """Decays, strengths and states are float32. Measured: 4.9e-3 to 5.9e-3."""
    actual = compute("3", draw(0.05, is_rounded=True))
    assert actual["out"].dtype == jnp.bfloat16
    for key, value in expected(0.05, is_rounded=True).items():
        assert batches.relative_error(actual[key], value) < 1e-2, key


CUTS = (138, 100)
"""Tokens of the first documents of rows: the next one lies over two devices or more."""


@each_layout
@pytest.mark.parametrize("factor", [50, 1e15])
def test_nothing_passes_to_later_documents_bit_for_bit(name, factor):
    arrays = draw(0.05)
    changed = {key: x.copy() for key, x in arrays.items()}
    for row, cut in enumerate(CUTS):
        for key, scale in {
            "q": 50,
            "k": 50,
            "v": factor,
            "dout": factor,
            "g": 2,
            "beta": 0.5,
        }.items():
            changed[key][row, :cut] = np.flip(arrays[key][row, :cut], 0) * np.float32(scale)
    before = compute(name, arrays)
    after = compute(name, changed)
    for key in before:
        assert np.isfinite(after[key]).all()
        for row, cut in enumerate(CUTS):
            assert batches.is_bitwise_equal(after[key][row, cut:], before[key][row, cut:]), key
            assert not np.array_equal(after[key][row, :cut], before[key][row, :cut])


# The convolution

X = 7
W = 4


def convolve_documents(x, filters, dout):
    """Output, and gradients of the input and the filters, document by document, in float64."""
    out, dx = np.zeros((2, *x.shape))
    dfilters = np.zeros(filters.shape)
    for row, segments in enumerate(SEGMENTS):
        for start, length in segments:
            for token in range(start, start + length):
                seen = range(max(start, token - W + 1), token + 1)
                sums = sum(filters[:, W - 1 - (token - i)] * x[row, i] for i in seen)
                sigmoid = 1 / (1 + np.exp(-sums))
                out[row, token] = sums * sigmoid
                dsums = dout[row, token] * sigmoid * (1 + sums * (1 - sigmoid))
                for i in seen:
                    dx[row, i] += filters[:, W - 1 - (token - i)] * dsums
                    dfilters[:, W - 1 - (token - i)] += x[row, i] * dsums
    return out, dx, dfilters


@pytest.mark.parametrize("name", DEFAULT)
def test_the_convolution_and_its_gradients_are_those_of_each_document(name):
    seq, layout = LAYOUTS[name]
    spans = RowSpans(seq=seq, layout=layout, tokens_per_device=L // seq)
    rng = np.random.default_rng(1)
    x, dout = rng.standard_normal((2, len(SEGMENTS), L, X)).astype(np.float32)
    filters = rng.standard_normal((X, W)).astype(np.float32)

    def local(x, filters, dout, starts, lengths):
        segments = find_segments(starts, lengths, spans.own_tokens())

        def run(x, filters):
            out = convolve(x, filters, segments, spans)
            return jnp.where(segments.inside_Bl[..., None], out, 0)

        out, pull = jax.vjp(run, x, filters)
        dx, dfilters = pull(dout)
        return out, dx, jax.lax.psum(dfilters, axes.SEQ)

    whole = PartitionSpec()
    on_mesh = run_on_mesh(
        seq, local, (TOKENS, whole, TOKENS, whole, whole), (TOKENS, TOKENS, whole)
    )
    order = layout.token_order(L)
    out, dx, dfilters = map(np.asarray, on_mesh(x[:, order], filters, dout[:, order], *slots()))
    place = layout.place_of_token(L)
    actual = (out[:, place], dx[:, place], dfilters)
    for a, b in zip(actual, convolve_documents(x, filters, dout), strict=True):
        assert batches.relative_error(a, b) < 1e-6
