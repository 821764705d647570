"""Layers of several kinds and sinks: every strategy and kernel, residuals, and the choice."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import Kernel, KernelSettings, ScoreConfig
from jaxsp.attention.kernels.residuals import CHECKPOINT_NAMES as ATTENTION_NAMES
from jaxsp.attention.kernels.residuals import AttentionFunctions
from jaxsp.attention.strategies.ring import Ring
from jaxsp.attention.strategies.strategy import combine
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle, test_strategies
from tests.attention.strategies import make_strategy

L = test_strategies.L
K = test_strategies.K

CAPPED = ScoreConfig(scale=0.7, softcap=1.5)
NEAR = ScoreConfig(window=13, softcap=2.0)
PLAIN = ScoreConfig()


QUICK = {"8 and 2 heads: Ulysses of 4"}
"""Strategies in the default tier; `test_strategies.CASES` has all."""

E2E = {"28 and 4 heads: Ulysses of 4 x ring of 2"}


def mark(name):
    """Marks of a case: others are slow."""
    return [] if name in QUICK else [pytest.mark.e2e if name in E2E else pytest.mark.slow]


pytestmark = pytest.mark.usefixtures("small_blocks")


def make_sinks(num_heads):
    return np.linspace(-2, 3, num_heads, dtype=np.float32)


def compile_results(attend):
    """The output and the gradients of q, k, v and the sinks: `(inputs, **options) -> dict`."""

    @jax.jit
    def compute(q, k, v, dout, starts, lengths, sinks_H, options):
        def run(q, k, v, sinks_H):
            return attend(q, k, v, starts, lengths, sinks_H=sinks_H, **options)

        out, pull = jax.vjp(run, q, k, v, sinks_H)
        return dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out, *pull(dout)), strict=True))

    return lambda inputs, sinks_H, **options: jax.tree.map(
        np.asarray, compute(*inputs, sinks_H, options)
    )


def oracle_attend(score):
    """The oracle with output and gradients of 0 at padding."""

    def attend(q, k, v, starts, lengths, **options):
        inside_BL11 = segments.segment_mask(starts, lengths, q.shape[1])[..., None, None]
        qkv = [jnp.where(inside_BL11, x, 0) for x in (q, k, v)]
        out = oracle.attention(*qkv, starts, lengths, score=score, **options)
        return jnp.where(inside_BL11, out, 0)

    return attend


@functools.cache
def expected(H, G, score):
    return compile_results(oracle_attend(score))(test_strategies.inputs(H, G), make_sinks(H))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark(name)) for name in test_strategies.CASES]
)
def test_kinds_softcap_scale_and_sinks_equal_one_device(name, record_property):
    """The kind is traced, as in a scan over layers."""
    strategy, H, G = test_strategies.CASES[name]
    kinds = (CAPPED, NEAR)
    attend = batches.attend_on_shards(
        make_attend(strategy=strategy, kernel="blockwise", layer_scores=kinds)
    )
    run = compile_results(attend)
    for kind, score in enumerate(kinds):
        actual = run(test_strategies.inputs(H, G), make_sinks(H), kind=np.int32(kind))
        differences = {
            key: batches.relative_error(value, expected(H, G, score)[key])
            for key, value in actual.items()
        }
        record_property(f"largest relative difference, kind {kind}", max(differences.values()))
        assert max(differences.values()) < tolerances.STRATEGIES, differences


CUDNN_L = 256
"""A multiple of 128, as cuDNN needs; in a ring of 2, too few tokens for several calls."""


@pytest.mark.parametrize(
    ("strategy", "max_segments"),
    [
        (combine(2), 9),
        (combine(1), 1),
        pytest.param(combine(1, Ring(degree=2)), 9, marks=pytest.mark.slow),
        pytest.param(
            make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 1, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_cudnn_scales_scores_and_has_kinds_and_sinks(strategy, max_segments):
    """Log-sum-exps at padding are NaN here, and so are outputs and gradients of tokens in no
    slot."""
    cudnn_contract.on_cpu()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, CUDNN_L, heads, 16), np.float32) for heads in (4, 2, 2, 4)]
    starts, lengths = np.zeros((2, 2, max_segments), np.int32)
    starts[0, :2] = [0, 70][:max_segments]
    lengths[0, :2] = [70, 100][:max_segments]
    lengths[1, 0] = CUDNN_L - 5
    inputs = [*arrays, starts, lengths]
    far = ScoreConfig(scale=0.1)
    near = ScoreConfig(scale=0.4, window=31)
    attend = make_attend(
        strategy=strategy,
        kernel="cudnn",
        settings=KernelSettings(head_chunks=2),
        layer_scores=[far, near],
    )
    sharded = attend if strategy.seq == 1 else batches.attend_on_shards(attend)
    run = compile_results(sharded)
    for kind, score in enumerate((far, near)):
        actual = run(inputs, make_sinks(4), kind=np.int32(kind))
        right = compile_results(oracle_attend(score))(inputs, make_sinks(4))
        for name in right:
            difference = batches.relative_error(actual[name], right[name])
            assert difference < tolerances.STRATEGIES, (name, kind)


@dataclasses.dataclass(frozen=True)
class NanAtPadding(Kernel):
    """The oracle, with NaN wherever a token is in no segment."""

    name = "nan_at_padding"

    def make_row_functions(self, settings, score):
        def poison(x, starts, lengths, token_axis=1):
            mask = segments.segment_mask(starts, lengths, x.shape[token_axis])
            other_axes = [axis for axis in range(1, x.ndim) if axis != token_axis]
            return jnp.where(jnp.expand_dims(mask, other_axes), x, jnp.nan)

        def forward(q, k, v, rows):
            out, lse = oracle.forward(q, k, v, rows, score=score)
            return poison(out, *rows[:2]), poison(lse, *rows[:2], token_axis=2)

        def backward(saved, rows):
            gradients = oracle.backward(saved, rows, score=score)
            return tuple(poison(x, *rows[:2]) for x in gradients)

        return AttentionFunctions(forward, backward)


@pytest.mark.parametrize("kernel", ["blockwise", "cudnn", NanAtPadding()])
def test_results_at_padding_are_zero_with_sinks(kernel):
    cudnn_contract.on_cpu()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 128, 2, 8), np.float32) for _ in range(4)]
    starts = np.int32([[10, 40], [0, 0]])
    lengths = np.int32([[20, 30], [0, 0]])
    inside = np.zeros((2, 128), bool)
    inside[0, 10:30] = inside[0, 40:70] = True
    actual = compile_results(make_attend(kernel=kernel))([*arrays, starts, lengths], make_sinks(2))
    assert np.isfinite(actual["dsinks"]).all()
    assert (actual["dsinks"] != 0).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (actual[name][~inside] == 0).all(), name
        assert (actual[name][inside] != 0).all(), name


def test_sinks_are_those_of_gpt_oss():
    torch = pytest.importorskip("torch", reason="transformers computes with it (extra `test`)")
    from transformers.models.gpt_oss import modeling_gpt_oss

    inputs = test_strategies.inputs(6, 2)
    q, k, v, dout, *_ = (torch.tensor(x[:1], requires_grad=True) for x in inputs[:4])
    sinks = torch.tensor(make_sinks(6), requires_grad=True)
    module = types.SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=False)
    mask = torch.full((L, L), -torch.inf).triu(1)[None, None]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, _ = modeling_gpt_oss.eager_attention_forward(module, *heads_first, mask, scaling=0.3)
    out.backward(dout)
    right = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "dsinks": sinks.grad}
    attend = make_attend(kernel="blockwise", layer_scores=[ScoreConfig(scale=0.3)])
    rows = [x[:1] for x in inputs[:4]]
    actual = compile_results(attend)(
        [*rows, np.zeros((1, 1), np.int32), np.full((1, 1), L, np.int32)], make_sinks(6)
    )
    for name in right:
        difference = batches.relative_error(actual[name], right[name].numpy())
        assert difference < tolerances.STRATEGIES, name


NUM_LAYERS = 6


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


def num_forward_passes(jaxpr):
    """Only forward passes compute a maximum."""
    return sum(equation.primitive.name == "reduce_max" for equation in batches.equations(jaxpr))


def saved_shapes(jaxpr):
    """Shapes of what the scan over layers saves for the backward pass, with the number of each."""
    forward, _ = (
        equation
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan" and equation.params["length"] == NUM_LAYERS
    )
    saved = [x.aval.shape for x in forward.outvars]
    return collections.Counter(shape for shape in saved if shape[0] == NUM_LAYERS)


@pytest.mark.slow
def test_the_forward_pass_of_two_kinds_is_not_repeated_if_the_named_residuals_are_kept():
    """Each kind is a branch, so each forward pass has two."""
    out, lse = ATTENTION_NAMES
    two_kinds = [PLAIN, NEAR] * (NUM_LAYERS // 2)
    assert num_forward_passes(layer_gradient([out, lse], two_kinds)) == 2
    assert num_forward_passes(layer_gradient([out], two_kinds)) == 4
    assert num_forward_passes(layer_gradient([], two_kinds)) == 4


def test_residuals_of_two_kinds_are_saved_once():
    """The input, the output and the log-sum-exp of each layer, as with one kind."""
    names = ATTENTION_NAMES
    two_kinds = [PLAIN, NEAR] * (NUM_LAYERS // 2)
    saved = saved_shapes(layer_gradient(names, two_kinds))
    assert saved == saved_shapes(layer_gradient(names, [PLAIN] * NUM_LAYERS))
    assert saved[NUM_LAYERS, 1, L, 4, K] == 2
    assert saved[NUM_LAYERS, 1, 4, L] == 1


def test_one_kind_has_no_switch():
    """Besides those between platforms, which are resolved when the program is lowered."""
    for scores, num_switches in (([NEAR] * NUM_LAYERS, 0), ([NEAR, PLAIN] * 3, 2)):
        jaxpr = layer_gradient(ATTENTION_NAMES, scores)
        names = [equation.primitive.name for equation in batches.equations(jaxpr)]
        assert names.count("cond") - names.count("platform_index") == num_switches


def test_kinds_are_numbered_in_the_order_of_their_first_layers():
    attend = make_attend(kernel="blockwise", layer_scores=[NEAR, NEAR, PLAIN, NEAR])
    assert attend.kinds == (NEAR, PLAIN)
    assert attend.layer_kinds == (0, 0, 1, 0)


def test_a_function_as_a_kernel_has_one_kind_and_no_sinks():
    with pytest.raises(AssertionError, match="one kind of layer, and there are 2"):
        make_attend(kernel=oracle.attention, layer_scores=[NEAR, PLAIN])
    attend = make_attend(kernel=oracle.attention)
    with pytest.raises(AssertionError, match="sinks"):
        compile_results(attend)(test_strategies.inputs(2, 1), make_sinks(2))
