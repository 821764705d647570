"""The self-check passes correct kernels and gradients, and refuses errors that releases have
had."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import cudnn_calls, segments
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.selection import KERNELS
from jaxsp.attention.strategy import combine
from jaxsp.blocks.config import DeltaNetConfig
from jaxsp.core.errors import UserError
from jaxsp.delta_rule import chunk, delta_rule
from jaxsp.planning import absent
from jaxsp.run import selfcheck
from jaxsp.run.selfcheck import KernelCheck
from tests import batches, messages
from tests.attention import cudnn_contract, oracle
from tests.gpu import test_memory_options

TOLERANCE = 1e-2


def make_check(kernel, **changes):
    arguments = {
        "heads": (4, 2),
        "head_dim": 16,
        "max_segments": 64,
        "dtype": "bfloat16",
        "score": ScoreConfig(),
        "settings": KernelSettings(),
        "strategy": combine(1),
    }
    kernel = KERNELS[kernel] if isinstance(kernel, str) else oracle.FunctionKernel(kernel)
    return selfcheck.check_attention(kernel, **arguments | changes)


def differences(kernel, **changes):
    return make_check(kernel, **changes).measure_errors(jax.devices()[0])


def whole_row(q, k, v, starts, lengths, **_):
    """Segments attend to earlier segments."""
    L = q.shape[1]
    length = jnp.where(segments.segment_mask(starts, lengths, L).any(-1, keepdims=True), L, 0)
    return oracle.attention(q, k, v, jnp.zeros_like(length), length)


def one_token_further(q, k, v, starts, lengths, **_):
    """The first token of a segment attends to the token before it, as if lengths were off by
    one."""
    expected = oracle.attention(q, k, v, starts, lengths)
    before = jnp.roll(v, 1, axis=1)
    segment = segments.segment_ids(starts, lengths, q.shape[1])
    first = (segment >= 0) & (segment != jnp.roll(segment, 1, axis=1))
    before = jnp.repeat(before, q.shape[2] // v.shape[2], 2)
    return jnp.where(first[..., None, None], (expected + before) / 2, expected)


def no_dk(q, k, v, starts, lengths, **_):
    return oracle.attention(q, jax.lax.stop_gradient(k), v, starts, lengths)


def one_nan(q, k, v, starts, lengths, **_):
    return oracle.attention(q, k, v, starts, lengths).at[0, 2, 0, 0].set(jnp.nan)


@pytest.mark.parametrize(
    ("kernel", "results"),
    [
        (whole_row, {"out", "dq", "dk", "dv"}),
        pytest.param(one_token_further, {"out", "dv"}, marks=pytest.mark.slow),
        (no_dk, {"dk"}),
        (one_nan, {"out"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_refused(kernel, results):
    """At least these results of it are wrong."""
    actual = differences(kernel)
    wrong = {name for name, error in actual.items() if not error <= TOLERANCE}
    assert results <= wrong, actual


@pytest.mark.parametrize(("max_segments", "window"), [(64, 4096), (3, None)])
def test_a_correct_kernel_has_at_most_half_the_tolerated_error(max_segments, window):
    changes = {"score": ScoreConfig(window=window), "heads": (8, 8)}
    actual = differences("blockwise", max_segments=max_segments, **changes)
    assert max(actual.values()) < TOLERANCE / 2


def test_a_kernel_without_the_window_is_refused():
    actual = differences(make_attend(kernel="blockwise"), score=ScoreConfig(window=4096))
    assert min(actual.values()) > TOLERANCE


@pytest.mark.e2e
def test_cudnn_passes_with_its_contract_and_fails_with_the_offsets_of_old_releases(monkeypatch):
    cudnn_contract.on_cpu()
    passed = differences("cudnn")
    assert max(passed.values()) < TOLERANCE / 2
    expected = cudnn_calls.CallMask._find_offsets

    def as_in_0_11_0(self, starts, x):
        """jax PR 39521: offsets of K and V were computed with the heads of q."""
        return expected(self, starts, jnp.repeat(x, 2, axis=2) if x.shape[2] == 2 else x)

    monkeypatch.setattr(cudnn_calls.CallMask, "_find_offsets", as_in_0_11_0)
    message = messages.containing("attention.kernel = cudnn", jax.__version__)
    with pytest.raises(UserError, match=message):
        make_check("cudnn").run(jax.devices()[0])


def test_at_most_half_of_the_free_memory_is_filled_with_nan_and_freed(monkeypatch):
    filled = []
    wait = jax.block_until_ready

    def watch(array):
        filled.append((wait(array), bool(jnp.isnan(array).all())))
        return array

    monkeypatch.setattr(jax, "block_until_ready", watch)
    device = jax.devices()[0]
    selfcheck.fill_free_memory(device, {"bytes_limit": 3 * 2**20, "bytes_in_use": 2**20})
    ((array, is_nan),) = filled
    assert (array.nbytes, is_nan) == (2**20, True)
    assert array.is_deleted()
    selfcheck.fill_free_memory(device, device.memory_stats())
    assert len(filled) == 1, "CPUs have no statistics"


@pytest.mark.parametrize(
    ("result", "part"),
    [
        ({"out": 1e-3, "dk": 0.03}, "(relative error of dk 0.03; must be at most 0.01)"),
        ({"out": float("nan")}, "(relative error of out nan;"),
        (jax.errors.JaxRuntimeError("no ptxas\nmore"), "does not run on this device: no ptxas."),
    ],
)
def test_a_kernel_that_is_wrong_or_does_not_run_ends_the_run(monkeypatch, result, part):
    def measure_errors(check, device):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(KernelCheck, "measure_errors", measure_errors)
    parts = ("attention.kernel = cudnn", part, jax.__version__, "attention.kernel=blockwise")
    with pytest.raises(UserError, match="^" + messages.containing(*parts)):
        make_check("cudnn").run(jax.devices()[0])


def test_a_run_checks_the_kernels_that_it_uses(monkeypatch):
    """On an absent H100."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    (gpu,) = absent.make_devices("h100-80gb", 1)
    spec = test_memory_options.make_program(gpu, {"remat": "full"})
    sizes = DeltaNetConfig(num_key_heads=16, num_heads=48, key_size=16, value_size=8, filter_size=4)
    experts = dataclasses.replace(batches.expert_model().experts, kernel="mosaic")
    changes = {"delta_net": sizes, "experts": experts, "linear_dtype": "float8"}
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, **changes))
    tried = []
    monkeypatch.setattr(
        KernelCheck,
        "measure_errors",
        lambda check, device: tried.append((check, device)) or {"out": 0.0},
    )
    (line,), problem = selfcheck.check_device(spec)
    assert not problem
    assert {device for _, device in tried} == {gpu}
    cudnn, delta_net, experts, products = (check for check, _ in tried)
    shapes = [{name: x.shape for name, x in check.inputs.items()} for check in (cudnn, delta_net)]
    queries = (2, 1024, 8, 64)
    keys = (2, 1024, 2, 64)
    assert shapes[0] == {"q": queries, "k": keys, "v": keys, "out": queries}
    assert cudnn.constants[0].shape == (2, 5)
    assert shapes[1]["q"] == (1, 1100, 2, 16)
    assert shapes[1]["v"] == (1, 1100, 6, 8)
    assert experts.inputs["up"].shape[1:] == (spec.model.experts.size, spec.model.hidden_size)
    assert products.inputs["weight"].shape == (spec.model.intermediate_size, spec.model.hidden_size)
    messages.assert_names(line, *(check.field for check, _ in tried))
    is_delta_net = lambda check: check.field.startswith(selfcheck.DELTA_NET_FIELD)
    monkeypatch.setattr(
        KernelCheck, "measure_errors", lambda check, device: {"out": float(is_delta_net(check))}
    )
    lines, problem = selfcheck.check_device(spec, may_replace=True)
    assert lines == []
    messages.assert_names(problem, selfcheck.DELTA_NET_FIELD, "wrong results")
    with pytest.raises(UserError, match=selfcheck.DELTA_NET_FIELD):
        selfcheck.check_device(spec)


def test_cpus_are_not_checked():
    spec = test_memory_options.make_program(jax.devices()[0], {"remat": "full"})
    assert selfcheck.check_device(spec) == ([], "")


DELTA_NET = DeltaNetConfig(num_key_heads=4, num_heads=8, key_size=16, value_size=8, filter_size=4)


@pytest.mark.parametrize("strength_scale", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_correct_delta_rule_has_at_most_half_the_tolerated_error(dtype, strength_scale):
    sizes = dataclasses.replace(DELTA_NET, strength_scale=strength_scale)
    (check,) = selfcheck.check_delta_rule(sizes, dtype)
    assert max(check.measure_errors(jax.devices()[0]).values()) < check.tolerance / 2


def carry_states_over(monkeypatch):
    """The first token of a segment finds the state of the segment before."""
    expected = chunk.compute_decays
    monkeypatch.setattr(
        chunk,
        "compute_decays",
        lambda tokens: expected(tokens._replace(is_first=jnp.zeros_like(tokens.is_first))),
    )


def lose_states_between_sections(monkeypatch):
    monkeypatch.setattr(
        delta_rule, "stitch", lambda maps, spans, is_reversed=False: jnp.zeros_like(maps.u)
    )


def drop_gradients_of_decays(monkeypatch):
    expected = delta_rule.compute
    monkeypatch.setattr(
        delta_rule,
        "compute",
        lambda q, k, v, g, *x, **spans: expected(q, k, v, jax.lax.stop_gradient(g), *x, **spans),
    )


ALL = {"out", "dq", "dk", "dv", "dg", "dbeta"}


@pytest.mark.parametrize(
    ("wrong", "results"),
    [
        (carry_states_over, ALL),
        pytest.param(lose_states_between_sections, ALL, marks=pytest.mark.slow),
        (drop_gradients_of_decays, {"dg"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_delta_rule_is_refused(monkeypatch, wrong, results):
    wrong(monkeypatch)
    (check,) = selfcheck.check_delta_rule(DELTA_NET, "bfloat16")
    errors = check.measure_errors(jax.devices()[0])
    assert all(not errors[name] <= 5 * check.tolerance for name in results), errors
