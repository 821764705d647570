"""The self-check passes correct kernels and gradients, and refuses errors that releases have
had."""

import dataclasses
import re
import shlex

import jax
import jax.numpy as jnp
import pytest

from jaxsp import attention
from jaxsp.attention import ScoreConfig
from jaxsp.attention.chunks import halo_exchange
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.cudnn import cudnn_calls
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.strategies.all_gather import AllGather
from jaxsp.attention.strategies.ring import Ring
from jaxsp.blocks.block_config import DeltaNetConfig
from jaxsp.blocks.config import DELTA_NET, LayerConfig
from jaxsp.core.errors import UserError
from jaxsp.model import remat
from jaxsp.model.remat import RematPolicy
from jaxsp.planner.compile import compiled
from jaxsp.planner.cost import comms
from jaxsp.run import selfcheck
from jaxsp.run.delta_rule_check import DeltaRuleCheck
from jaxsp.training import compile_options
from tests import messages
from tests.attention import cudnn_contract, oracle
from tests.gpu import test_memory_options
from tests.planner import programs


def differences(kernel, **changes):
    arguments = {
        "kernel": attention.as_kernel(kernel),
        "heads_per_kv_head": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_segments": 64,
        "dtype": jnp.dtype("bfloat16"),
    }
    check = selfcheck.AttentionCheck(**arguments | changes)
    return check.measure_errors(jax.devices()[0])


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


def other_heads(q, k, v, starts, lengths, **_):
    """Query heads use the next K/V head."""
    return oracle.attention(q, jnp.roll(k, 1, axis=2), jnp.roll(v, 1, axis=2), starts, lengths)


def no_dk(q, k, v, starts, lengths, **_):
    return oracle.attention(q, jax.lax.stop_gradient(k), v, starts, lengths)


def one_nan(q, k, v, starts, lengths, **_):
    return oracle.attention(q, k, v, starts, lengths).at[0, 2, 0, 0].set(jnp.nan)


def without_scale(q, k, v, starts, lengths, **_):
    return oracle.attention(q * 1.05, k, v, starts, lengths)


WRONG = {
    whole_row: {"out", "dq", "dk", "dv"},
    one_token_further: {"out", "dv"},
    other_heads: {"out", "dq", "dk", "dv"},
    no_dk: {"dk"},
    one_nan: {"out"},
    without_scale: {"out", "dq", "dk", "dv"},
}
"""Wrong kernels, and the results that are wrong at least."""


DEFAULT = (whole_row, no_dk, one_nan)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel in DEFAULT else [pytest.mark.slow])
        for kernel in WRONG
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_a_wrong_kernel_is_refused(kernel):
    actual = differences(kernel)
    limit = selfcheck.ATTENTION_TOLERANCE
    assert WRONG[kernel] <= {name for name, error in actual.items() if not error <= limit}, actual
    parts = (
        "attention.kernel = cudnn",
        selfcheck.ATTENTION_TOLERANCE,
        "attention.kernel=blockwise",
    )
    with pytest.raises(UserError, match="^" + messages.containing(*parts)):
        selfcheck.raise_on_attention_error(actual, jax.devices()[0])


@pytest.mark.parametrize(
    ("max_segments", "window"),
    [
        pytest.param(64, None, marks=pytest.mark.slow),
        (64, 4096),
        (3, None),
        pytest.param(1, 4096, marks=pytest.mark.slow),
    ],
)
def test_a_correct_kernel_has_at_most_half_the_tolerated_error(max_segments, window):
    changes = {"score": ScoreConfig(window=window), "heads_per_kv_head": 1}
    actual = differences("blockwise", max_segments=max_segments, **changes)
    selfcheck.raise_on_attention_error(actual, jax.devices()[0])
    assert max(actual.values()) < selfcheck.ATTENTION_TOLERANCE / 2


def test_a_kernel_without_the_window_is_refused():
    actual = differences(attention.make_attend(kernel="blockwise"), score=ScoreConfig(window=4096))
    assert min(actual.values()) > selfcheck.ATTENTION_TOLERANCE


@pytest.mark.e2e
def test_windows_over_chunks_are_checked(monkeypatch):
    changes = {
        "score": ScoreConfig(window=4096),
        "strategy": attention.combine(1, AllGather(degree=1)),
    }
    actual = differences("blockwise", **changes)
    assert max(actual.values()) < selfcheck.ATTENTION_TOLERANCE / 2

    def receive_nothing(group, halo, kv):
        first, last = (jnp.zeros_like(x[:, :, -halo.num_tokens :]) for x in kv)
        return first, last

    monkeypatch.setattr(halo_exchange, "receive_halos", receive_nothing)
    assert max(differences("blockwise", **changes).values()) > selfcheck.ATTENTION_TOLERANCE


@pytest.mark.e2e
def test_cudnn_passes_with_its_contract_and_fails_with_the_offsets_of_old_releases(monkeypatch):
    cudnn_contract.on_cpu()
    passed = differences("cudnn")
    assert max(passed.values()) < selfcheck.ATTENTION_TOLERANCE / 2
    expected = cudnn_calls._bin_offsets

    def as_in_0_11_0(slots, x):
        """jax PR 39521: offsets of K and V were computed with the heads of q."""
        return expected(slots, jnp.repeat(x, 2, axis=2) if x.shape[2] == 2 else x)

    monkeypatch.setattr(cudnn_calls, "_bin_offsets", as_in_0_11_0)
    message = messages.containing("attention.kernel = cudnn", jax.__version__)
    with pytest.raises(UserError, match=message):
        selfcheck.raise_on_attention_error(differences("cudnn"), jax.devices()[0])


def test_free_memory_is_filled_with_nan_before_a_kernel_runs(monkeypatch):
    """When the kernel runs, the memory has been filled and freed."""
    fills = []
    seen = []
    wait = jax.block_until_ready

    def watch(array):
        assert jnp.isnan(array).all()
        fills.append(wait(array))
        return array

    attend = attention.make_attend(kernel="blockwise")

    def kernel(q, k, v, starts, lengths):
        jax.debug.callback(
            lambda: seen.append([(fill.nbytes, fill.is_deleted()) for fill in fills])
        )
        return attend(q, k, v, starts, lengths)

    monkeypatch.setattr(selfcheck, "choose_fill_bytes", lambda stats: 2**20)
    monkeypatch.setattr(jax, "block_until_ready", watch)
    differences(kernel)
    jax.effects_barrier()
    assert seen[0] == [(2**20, True)]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (None, 0),
        ({"bytes_limit": 3 * 2**30, "bytes_in_use": 2**30}, 2**30),
        ({"bytes_limit": 80 * 2**30, "bytes_in_use": 2**30}, selfcheck.MAX_FILL_BYTES),
        ({"bytes_limit": 2**30, "bytes_in_use": 2**31}, 0),
    ],
)
def test_at_most_half_of_the_free_memory_is_filled(stats, expected):
    assert selfcheck.choose_fill_bytes(stats) == expected


@pytest.mark.slow  # attention/test_cudnn.py tests each strategy
@pytest.mark.parametrize(
    "strategy", [attention.combine(1, Ring(degree=1)), attention.combine(1, AllGather(degree=1))]
)
def test_two_chunks_of_rows_pass_with_the_contract_in_head_chunks_too(monkeypatch, strategy):
    cudnn_contract.on_cpu()
    assert (
        max(differences("cudnn", strategy=strategy, head_chunks=2).values())
        < selfcheck.ATTENTION_TOLERANCE / 2
    )
    monkeypatch.setattr(
        OffDiagonalBlock,
        "query_mask",
        lambda self, num_tokens: (self.num_keys_B > 0)[:, None] & jnp.ones((1, num_tokens), bool),
    )
    assert not max(differences("cudnn", strategy=strategy).values()) < selfcheck.ATTENTION_TOLERANCE


def offload_error(offload_activations, *, num_devices=1):
    policy = RematPolicy(offload_activations=offload_activations)
    devices = jax.devices()[:num_devices]
    return selfcheck.measure_offload_error(policy, devices=devices, tokens=64, width=256)


@pytest.mark.parametrize(
    ("activations", "num_devices"),
    [("layer_inputs", 1), ("layer_inputs", 3), ("layer_inputs_and_attention", 2)],
)
def test_correct_offloading_passes(activations, num_devices):
    error = offload_error(activations, num_devices=num_devices)
    assert error <= selfcheck.OFFLOAD_TOLERANCE / 10


def test_layers_of_the_offloading_check_gather_their_weights_inside_the_loop():
    """Over all devices of the process; the gather is what has made prefetched activations wrong."""
    policy = RematPolicy(offload_activations="layer_inputs")
    text = selfcheck.compile_offload_gradients(
        policy, devices=jax.devices()[:4], tokens=64, width=270
    ).as_text()
    gathers = [sent for sent in comms.parse_collectives(text) if sent.operation == "all-gather"]
    assert {sent.num_runs for sent in gathers} == {6}, "once for each layer and pass"
    assert {sent.device_ids for sent in gathers} == {(0, 1, 2, 3)}


@pytest.mark.parametrize("wrong", [jnp.sqrt, jnp.ones])
def test_operations_outside_of_jit_that_are_wrong_are_refused(monkeypatch, wrong):
    selfcheck.check_arithmetic(jax.devices()[0])
    monkeypatch.setattr(selfcheck.jnp, wrong.__name__, lambda x: wrong(x) * 1.01)
    with pytest.raises(UserError, match=messages.containing(f"jax = {jax.__version__}")):
        selfcheck.check_arithmetic(jax.devices()[0])


def test_layers_that_read_back_the_input_of_another_layer_are_refused(monkeypatch):
    apply_policy = remat.checkpoint_layer

    def checkpoint_layer(function, policy, kind):
        """With offloading, the backward pass multiplies weights by wrong inputs."""
        expected = apply_policy(function, policy, kind)

        @jax.custom_vjp
        def wrong(x, weight):
            return expected(x, weight)

        def backward(saved, dx):
            x, weight = saved
            return jax.vjp(expected, jnp.roll(x, 1, axis=0), weight)[1](dx)

        wrong.defvjp(lambda x, weight: (wrong(x, weight), (x, weight)), backward)
        return expected if policy.offload_activations == "none" else wrong

    message = messages.containing("memory.offload_activations", "memory.offload_activations=none")
    monkeypatch.setattr(remat, "checkpoint_layer", checkpoint_layer)
    error = offload_error("layer_inputs")
    with pytest.raises(UserError, match=f"^{message}"):
        selfcheck.raise_on_offload_error(error, jax.devices()[0])


@pytest.fixture
def gpu(monkeypatch):
    """An absent H100, on which this release prefetches."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    monkeypatch.setattr(compile_options, "MIN_PREFETCH_RELEASE", (0, 10))
    monkeypatch.setattr(selfcheck, "check_arithmetic", lambda device: None)
    return compiled.make_devices("h100-80gb", 1)[0]


PREFETCH = {"xla_gpu_enable_pipelined_host_offloading": True}
NO_PREFETCH = {"xla_gpu_enable_pipelined_host_offloading": False}


def test_a_run_checks_what_it_uses_and_reports_it(monkeypatch, gpu):
    tried = []
    monkeypatch.setattr(
        selfcheck.AttentionCheck,
        "measure_errors",
        lambda check, device: tried.append((check, device)) or {"out": 0.0},
    )
    monkeypatch.setattr(
        selfcheck,
        "measure_offload_error",
        lambda policy, *, devices, options: tried.append((policy, devices, options)) or 0.0,
    )
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 28, 0))
    spec = test_memory_options.make_program(
        gpu, {"remat": "save_attention", "offload_activations": "layer_inputs"}
    )
    lines = selfcheck.check_device(spec)
    check = selfcheck.AttentionCheck(
        kernel=spec.attention.kernel,
        heads_per_kv_head=4,
        num_kv_heads=2,
        head_dim=64,
        max_segments=5,
        dtype=spec.dtype,
    )
    assert tried == [(check, gpu), (spec.remat_policy, [gpu], PREFETCH)]
    attention_line, offload_line = lines
    assert "9.28.0" in attention_line
    assert "offload" in offload_line


def test_delta_nets_are_checked_in_models_that_have_them(monkeypatch, gpu):
    tried = []
    monkeypatch.setattr(
        DeltaRuleCheck,
        "measure_errors",
        lambda check, device, options: tried.append((check, device)) or {"out": 0.0},
    )
    spec = test_memory_options.make_program(gpu, {"remat": "full"})
    spec = dataclasses.replace(
        spec,
        model=dataclasses.replace(
            spec.model,
            layers=(LayerConfig(rope=None, mixer=DELTA_NET),),
            delta_net=DeltaNetConfig(
                num_key_heads=16,
                num_heads=48,
                key_size=128,
                value_size=64,
                filter_size=4,
                strength_scale=2.0,
            ),
        ),
    )
    spec = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, layer_scores=()))
    (line,) = selfcheck.check_device(spec)
    check = DeltaRuleCheck(
        strength_scale=2.0,
        num_key_heads=2,
        heads_per_key_head=3,
        key_size=128,
        value_size=64,
        dtype=spec.dtype,
    )
    assert tried == [(check, gpu)]
    messages.assert_names(line, "self-check", "delta net")


def check_offload(monkeypatch, gpu, differences, xla_options=None):
    """Runs the check with these errors, by prefetch, and returns the compile options it tried."""
    tried = []

    def measure(policy, *, devices, options):
        tried.append(options)
        return differences[any(options.values())]

    monkeypatch.setattr(
        selfcheck.AttentionCheck, "measure_errors", lambda check, device: {"out": 0.0}
    )
    monkeypatch.setattr(selfcheck, "measure_offload_error", measure)
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 28, 0))
    memory = {"remat": "save_attention", "offload_activations": "layer_inputs"}
    spec = test_memory_options.make_program(gpu, memory, xla_options=xla_options)
    selfcheck.check_device(spec)
    return tried


@pytest.mark.parametrize("wrong", [0.3, float("nan"), float("inf")])
def test_if_only_prefetch_gives_wrong_gradients_the_error_suggests_turning_it_off(
    monkeypatch, gpu, wrong
):
    with pytest.raises(UserError, match=r"^memory.offload_activations: ") as actual:
        check_offload(monkeypatch, gpu, {True: wrong, False: 0.0})
    (problem,) = actual.value.problems
    (word,) = shlex.split(re.search(r"run\.xla_options='[^']+'", problem)[0])
    config = programs.settings("memory.offload_activations=layer_inputs", word)
    assert config.run.xla_options == NO_PREFETCH
    assert check_offload(monkeypatch, gpu, {True: wrong, False: 0.0}, config.run.xla_options) == [
        NO_PREFETCH
    ]


@pytest.mark.parametrize("without", [0.3, float("nan")])
def test_if_gradients_are_wrong_without_prefetch_too_the_error_suggests_no_offloading(
    monkeypatch, gpu, without
):
    message = messages.containing("memory.offload_activations=none")
    with pytest.raises(UserError, match=message) as actual:
        check_offload(monkeypatch, gpu, {True: 0.2, False: without})
    assert "xla_options" not in str(actual.value)
    with pytest.raises(UserError, match=message):
        check_offload(monkeypatch, gpu, {True: 0.0, False: without}, NO_PREFETCH)


def test_the_check_runs_without_prefetch_only_if_it_fails_with_prefetch(monkeypatch, gpu):
    assert check_offload(monkeypatch, gpu, {True: 0.0, False: 0.0}) == [PREFETCH]
    with pytest.raises(UserError):
        check_offload(
            monkeypatch, gpu, {True: 0.3, False: 0.3}, PREFETCH | {"xla_gpu_autotune_level": 0}
        )


def test_cpus_are_not_checked():
    spec = test_memory_options.make_program(jax.devices()[0], {"remat": "full"})
    assert selfcheck.check_device(spec) == []
