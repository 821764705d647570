"""Properties of every strategy and kernel: causality, isolation, padding, sinks, and residuals."""

import collections
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import CHECKPOINT_NAMES, find_collectives, make_attend
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import AttentionFunctions, ScoreConfig
from jaxsp.attention.strategy import combine
from jaxsp.core import axes
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle
from tests.attention.strategies import make_strategy

L = 48
K = 8

pytestmark = pytest.mark.usefixtures("small_blocks")

ULYSSES_GATHER = make_strategy(seq=4, ulysses_degree=2, tokens="all_gather")
SLOW = (
    make_strategy(seq=4, ulysses_degree=1),
    make_strategy(seq=4, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=2),
    make_strategy(seq=4, ulysses_degree=2),
)
WHOLE_ROWS = [None, combine(1), combine(4)]
"""None: the oracle."""

EACH = pytest.mark.parametrize(
    "strategy",
    [
        *WHOLE_ROWS,
        ULYSSES_GATHER,
        *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in SLOW),
    ],
    ids=lambda strategy: strategy and strategy.description,
)
"""Strategies; a new one is a row here."""


def on_mesh(strategy, kernel, window=None):
    attend = make_attend(
        strategy=strategy, kernel=kernel, layer_scores=[ScoreConfig(window=window)]
    )
    return batches.attend_on_shards(attend) if strategy.seq > 1 else attend


# Inputs of all tests have three rows of four slots, so that they share programs
@functools.cache
def compiled(strategy, window=None):
    """The output, dq, dk and dv. Args: strategy: None: the oracle."""
    if strategy is None:
        return oracle.differentiate(oracle.make_attend(ScoreConfig(window=window)))
    return oracle.differentiate(on_mesh(strategy, "blockwise", window))


def draw(B=3):
    return oracle.draw(B, L, 8, 4, K)


ONE = oracle.make_slots([[(0, L)]] * 3, 4)

PADDED = oracle.make_slots([[(4, 10), (20, 20)], [], [(0, 40)]], 4)
"""Padding before, between and after segments; a row without segments."""

INSIDE = np.asarray(segments.segment_mask(*map(jnp.asarray, PADDED), L))


def test_ulysses_is_two_all_to_alls_and_only_collectives_of_attention_count():
    q, k, v, _ = draw(1)
    attend = jax.jit(on_mesh(combine(4), "blockwise"))
    text = attend.lower(q, k, v, np.int32([[0]]), np.int32([[L]])).compile().as_text()
    assert text.count(" all-to-all(") == len(find_collectives(text)) == 2
    for other in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
        assert f" {other}" not in text
    shard = PartitionSpec(None, axes.SEQ)
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, axes.SEQ, axis=1, tiled=True),
        mesh=batches.mesh(1, 1, 4),
        in_specs=shard,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    text = jax.jit(gather).lower(q).compile().as_text()
    assert " all-gather" in text
    assert find_collectives(text) == []


@EACH
def test_nan_at_padding_changes_nothing(strategy):
    inputs = draw()
    poisoned = [np.where(INSIDE[..., None, None], x, np.float32(np.nan)) for x in inputs]
    actual = compiled(strategy)(*poisoned, *PADDED)
    expected = compiled(strategy)(*inputs, *PADDED)
    for name in expected:
        assert batches.is_bitwise_equal(actual[name], expected[name]), name
        assert (actual[name][~INSIDE] == 0).all(), name
    assert np.abs(actual["out"][INSIDE]).max(-1).min() > 0


@EACH
def test_an_output_does_not_depend_on_later_tokens(strategy):
    """Gradients of outputs up to t are exactly zero for inputs after t, and nonzero for input t."""
    q, k, v, dout = draw()
    for t in (0, 7, 8, 11, 12, 30, 46):
        upto = (np.arange(L) <= t)[None, :, None, None]
        actual = compiled(strategy)(q, k, v, dout * upto, *ONE)
        for name in ("dq", "dk", "dv"):
            assert (actual[name][:, t + 1 :] == 0).all(), (name, t)
            # The first token attends only to itself, with weight 1 for any q and k
            assert (t == 0 and name != "dv") or (actual[name][:, t] != 0).all(), (name, t)


@pytest.mark.parametrize("strategy", WHOLE_ROWS)
def test_an_output_depends_only_on_its_window(strategy):
    """Gradients are zero except for the token and the window - 1 before it; dv is nonzero there."""
    window = 15
    q, k, v, dout = draw()
    for t in (0, 14, 15, 30, 47):
        is_t = (np.arange(L) == t)[None, :, None, None]
        actual = compiled(strategy, window)(q, k, v, dout * is_t, *ONE)
        seen = (np.arange(L) <= t) & (np.arange(L) > t - window)
        for name in ("dk", "dv"):
            assert (actual[name][:, ~seen] == 0).all(), (name, t)
        assert (actual["dv"][:, seen] != 0).all(), t


# Shards of 12 tokens at seq=4: boundaries inside and at the edge of a shard, a segment over three
# shards, and one that fills a shard
ROWS = [
    [(0, 7), (7, 5), (12, 33), (45, 3)],
    [(0, 12), (12, 12), (24, 7)],
    [(5, 28), (33, 1), (34, 14)],
]


@EACH
def test_a_segment_does_not_depend_on_the_others(strategy):
    """Its outputs ignore inputs outside of it, whose gradients are exactly zero."""
    slots = oracle.make_slots(ROWS, 4)
    q, k, v, dout = draw()
    before = compiled(strategy)(q, k, v, dout, *slots)["out"]
    segment = np.asarray(segments.segment_ids(*map(jnp.asarray, slots), L))
    for m in range(4):
        own = (segment == m)[..., None, None]
        others = [np.where(own, x, -3 * x) for x in (q, k, v)]
        actual = compiled(strategy)(*others, dout * own, *slots)
        assert batches.is_bitwise_equal(actual["out"][segment == m], before[segment == m]), m
        for name in ("dq", "dk", "dv"):
            assert (actual[name][segment != m] == 0).all(), (name, m)
            assert (actual[name] != 0).any(), (name, m)


class NanAtPadding(oracle.OracleKernel):
    """The oracle, with NaN wherever a token is in no segment."""

    def make_row_functions(self, settings, score):
        functions = super().make_row_functions(settings, score)

        def poison(rows, x, token_axis=1):
            mask = segments.segment_mask(*rows[:2], x.shape[token_axis])
            other_axes = [axis for axis in range(1, x.ndim) if axis != token_axis]
            return jnp.where(jnp.expand_dims(mask, other_axes), x, jnp.nan)

        def forward(q, k, v, rows):
            out, lse = functions.forward(q, k, v, rows)
            return poison(rows, out), poison(rows, lse, token_axis=2)

        def backward(saved, rows):
            return tuple(poison(rows, x) for x in functions.backward(saved, rows))

        return AttentionFunctions(forward, backward)


SINKS = np.linspace(-2, 3, 4, dtype=np.float32)


@pytest.mark.parametrize(
    ("kernel", "seq"), [("blockwise", 1), ("cudnn", 1), (NanAtPadding(), 1), (NanAtPadding(), 4)]
)
def test_results_at_padding_are_zero_with_sinks(kernel, seq):
    cudnn_contract.on_cpu()
    inputs = [*oracle.draw(2, 128, 4, 2, 8), *oracle.make_slots([[(10, 20), (40, 30)], []], 2)]
    inside = np.asarray(segments.segment_mask(*map(jnp.asarray, inputs[4:]), 128))
    attend = on_mesh(combine(seq), kernel)
    actual = oracle.differentiate(attend)(*inputs, sinks_H=SINKS)
    expected = oracle.differentiate(oracle.make_attend())(*inputs, sinks_H=SINKS)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.STRATEGIES, name
        assert name == "dsinks" or (actual[name][~inside] == 0).all(), name


def test_sinks_are_those_of_gpt_oss():
    torch = pytest.importorskip("torch", reason="transformers computes with it (extra `test`)")
    from transformers.models.gpt_oss import modeling_gpt_oss

    inputs = oracle.draw(1, L, 4, 2, K)
    q, k, v, dout, sinks = (torch.tensor(x, requires_grad=True) for x in (*inputs, SINKS))
    module = types.SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    mask = torch.full((L, L), -torch.inf).triu(1)[None, None]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, _ = modeling_gpt_oss.eager_attention_forward(module, *heads_first, mask, scaling=0.3)
    out.backward(dout)
    right = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "dsinks": sinks.grad}
    attend = make_attend(kernel="blockwise", layer_scores=[ScoreConfig(scale=0.3)])
    slots = oracle.make_slots([[(0, L)]], 1)
    actual = oracle.differentiate(attend)(*inputs, *slots, sinks_H=SINKS)
    for name in right:
        difference = batches.relative_error(actual[name], right[name].numpy())
        assert difference < tolerances.STRATEGIES, name


NUM_LAYERS = 6
NEAR = ScoreConfig(window=13, softcap=2.0)
TWO_KINDS = [ScoreConfig(), NEAR] * 3


def layer_gradient(policy_names, layer_scores):
    """Jaxpr of the gradient of a scan over checkpointed layers with sinks, and its arguments."""
    attend = make_attend(kernel="blockwise", layer_scores=layer_scores)
    policy = jax.checkpoint_policies.save_only_these_names(*policy_names)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(q, inputs):
        kind, sinks_H = inputs
        starts = jnp.zeros((1, 1), jnp.int32)
        lengths = jnp.full((1, 1), L, jnp.int32)
        k = q[:, :, :2] * 0.5
        out = attend(2 * q, k, k, starts, lengths, kind=kind, sinks_H=sinks_H)
        return out + q, None

    def loss(q, sinks_NH):
        kinds = jnp.array(attend.layer_kinds, jnp.int32)
        return (jax.lax.scan(layer, q, (kinds, sinks_NH))[0] ** 2).sum()

    arguments = jnp.ones((1, L, 4, K)), jnp.ones((NUM_LAYERS, 4))
    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arguments)


def test_the_forward_pass_is_not_repeated_if_the_named_residuals_are_kept():
    """Only forward passes compute a maximum; each kind is a branch."""
    out, lse = CHECKPOINT_NAMES
    for scores, num_kinds in (([NEAR] * NUM_LAYERS, 1), (TWO_KINDS, 2)):
        for names, num_passes in (([out, lse], 1), ([out], 2), ([lse], 2), ([], 2)):
            equations = batches.equations(layer_gradient(names, scores))
            count = sum(equation.primitive.name == "reduce_max" for equation in equations)
            assert count == num_passes * num_kinds, (names, num_kinds)


def saved_shapes(jaxpr):
    """Shapes of what the scan over layers saves for the backward pass, with the number of each."""
    forward, _ = (
        equation
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan" and equation.params["length"] == NUM_LAYERS
    )
    saved = [x.aval.shape for x in forward.outvars]
    return collections.Counter(shape for shape in saved if shape[0] == NUM_LAYERS)


def test_residuals_of_two_kinds_are_saved_once():
    """The input, the output and the log-sum-exp of each layer, as with one kind."""
    saved = saved_shapes(layer_gradient(CHECKPOINT_NAMES, TWO_KINDS))
    assert saved == saved_shapes(layer_gradient(CHECKPOINT_NAMES, [NEAR] * NUM_LAYERS))
    assert saved[NUM_LAYERS, 1, L, 4, K] == 2
    assert saved[NUM_LAYERS, 1, 4, L] == 1


def test_one_kind_has_no_switch():
    """Besides those between platforms, which are resolved when the program is lowered."""
    for scores, num_switches in (([NEAR] * NUM_LAYERS, 0), (TWO_KINDS, 2)):
        jaxpr = layer_gradient(CHECKPOINT_NAMES, scores)
        names = [equation.primitive.name for equation in batches.equations(jaxpr)]
        assert names.count("cond") - names.count("platform_index") == num_switches


def test_kinds_are_numbered_in_the_order_of_their_first_layers():
    plain = ScoreConfig()
    attend = make_attend(kernel="blockwise", layer_scores=[NEAR, NEAR, plain, NEAR])
    assert attend.kinds == (NEAR, plain)
    assert attend.layer_kinds == (0, 0, 1, 0)
    chosen = attend.select([1, 1])
    assert (chosen.kinds, chosen.layer_kinds) == ((plain,), (0, 0))
