"""The check before the first step finds right what is right, and each of several kernels wrong that releases have shipped."""

import functools
import re
import shlex

import jax
import jax.numpy as jnp
import pytest

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.kernels import blockwise, cudnn_calls, segments
from jaxsp.attention.kernels.segments import OffDiagonalBlock
from jaxsp.attention.ring import Ring
from jaxsp.core.errors import UserError
from jaxsp.model import remat
from jaxsp.model.remat import RematPolicy
from jaxsp.planner.compile import compiled
from jaxsp.training import selfcheck
from tests import messages
from tests.attention import cudnn_contract, oracle
from tests.gpu import test_memory_options
from tests.planner import programs


def differences(kernel, **changes):
    asked = {
        "heads_per_kv_head": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_segments": 64,
        "window": None,
        "dtype": jnp.dtype("bfloat16"),
    }
    return selfcheck.measure_attention_error(kernel, **asked | changes, device=jax.devices()[0])


def whole_row(q, k, v, starts, lengths, **_):
    """Pieces see those before them."""
    L = q.shape[1]
    one = jnp.where(segments.segment_mask(starts, lengths, L).any(-1, keepdims=True), L, 0)
    return oracle.attention(q, k, v, jnp.zeros_like(one), one)


def one_token_further(q, k, v, starts, lengths, **_):
    """The first token of a piece sees the last one before it, as if lengths were one off."""
    right = oracle.attention(q, k, v, starts, lengths)
    before = jnp.roll(v, 1, axis=1)
    piece = segments.segment_ids(starts, lengths, q.shape[1])
    first = (piece >= 0) & (piece != jnp.roll(piece, 1, axis=1))
    return jnp.where(
        first[..., None, None], (right + jnp.repeat(before, q.shape[2] // v.shape[2], 2)) / 2, right
    )


def other_heads(q, k, v, starts, lengths, **_):
    """Each query head has the next one's K/V head."""
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
"""Kernels, and what of theirs is at least wrong."""


DEFAULT = (whole_row, no_dk, one_nan)


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=[pytest.mark.slow] * (kernel not in DEFAULT)) for kernel in WRONG],
    ids=lambda kernel: kernel.__name__,
)
def test_a_wrong_kernel_is_refused(kernel):
    found = differences(kernel)
    assert WRONG[kernel] <= {
        name for name, value in found.items() if not value <= selfcheck.ATTENTION_TOLERANCE
    }, found
    says = ("attention.kernel = cudnn", selfcheck.ATTENTION_TOLERANCE, "attention.kernel=blockwise")
    with pytest.raises(UserError, match="^" + messages.holding(*says)):
        selfcheck.raise_on_attention_error(found, jax.devices()[0])


@pytest.mark.parametrize(
    ("max_pieces", "window"),
    [
        pytest.param(64, None, marks=pytest.mark.slow),
        (64, 4096),
        (3, None),
        pytest.param(1, 4096, marks=pytest.mark.slow),
    ],
)
def test_a_right_kernel_passes_with_room(max_pieces, window):
    kernel = functools.partial(blockwise.attention, window=window and 100)
    found = differences(kernel, max_segments=max_pieces, window=window, heads_per_kv_head=1)
    selfcheck.raise_on_attention_error(found, jax.devices()[0])
    assert max(found.values()) < selfcheck.ATTENTION_TOLERANCE / 2


def test_a_kernel_without_the_window_is_refused():
    found = differences(blockwise.attention, window=4096)
    assert min(found.values()) > selfcheck.ATTENTION_TOLERANCE


@pytest.mark.e2e
def test_cudnn_passes_by_its_contract_and_not_with_the_places_of_old_releases(monkeypatch):
    cudnn_contract.on_cpu()
    passed = differences("cudnn")
    assert max(passed.values()) < selfcheck.ATTENTION_TOLERANCE / 2
    right = cudnn_calls._slot_offsets

    def as_in_0_11_0(taken, x):
        """jax PR 39521: K and V counted in what a token takes of q."""
        return right(taken, jnp.repeat(x, 2, axis=2) if x.shape[2] == 2 else x)

    monkeypatch.setattr(cudnn_calls, "_slot_offsets", as_in_0_11_0)
    says = messages.holding("attention.kernel = cudnn", jax.__version__)
    with pytest.raises(UserError, match=says):
        selfcheck.raise_on_attention_error(differences("cudnn"), jax.devices()[0])


def test_free_memory_holds_nan_when_a_kernel_begins(monkeypatch):
    """Seen from inside the kernel: the memory was filled, and is free again."""
    fills, seen = [], []
    wait = jax.block_until_ready

    def watch(array):
        assert jnp.isnan(array).all()
        fills.append(wait(array))
        return array

    def kernel(q, k, v, starts, lengths):
        jax.debug.callback(
            lambda: seen.append([(fill.nbytes, fill.is_deleted()) for fill in fills])
        )
        return blockwise.attention(q, k, v, starts, lengths)

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


@pytest.mark.slow  # attention/test_cudnn.py has its parts
@pytest.mark.parametrize("strategy", [Ring(seq=1), AllGather(seq=1)])
def test_halves_of_rows_pass_by_its_contract_in_parts_of_the_heads_too(monkeypatch, strategy):
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


def offloaded(what, **changes):
    how = RematPolicy(offload_activations=what)
    return selfcheck.measure_offload_error(
        how, device=jax.devices()[0], tokens=64, width=32, **changes
    )


@pytest.mark.parametrize("what", ["layer_inputs", "layer_inputs_and_attention"])
def test_offload_passes_where_it_is_right(what):
    assert offloaded(what) <= selfcheck.OFFLOAD_TOLERANCE / 10


def test_layers_that_read_another_layers_input_back_are_refused():
    def layer(function, how):
        """With offload, weights are multiplied with wrong inputs in the backward pass."""
        right = remat.checkpoint_layer(function, how)

        @jax.custom_vjp
        def wrong(x, weight):
            return right(x, weight)

        def backward(saved, dx):
            x, weight = saved
            return jax.vjp(right, jnp.roll(x, 1, axis=0), weight)[1](dx)

        wrong.defvjp(lambda x, weight: (wrong(x, weight), (x, weight)), backward)
        return right if how.offload_activations == "none" else wrong

    says = messages.holding("memory.offload_activations", "memory.offload_activations=none")
    with pytest.raises(UserError, match=f"^{says}"):
        selfcheck.raise_on_offload_error(
            offloaded("layer_inputs", checkpoint_layer=layer), jax.devices()[0]
        )


@pytest.fixture
def gpu():
    """An H100 that is absent."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    return compiled.make_devices("h100-80gb", 1)[0]


PREFETCH = {"xla_gpu_enable_pipelined_host_offloading": True}
NO_PREFETCH = {"xla_gpu_enable_pipelined_host_offloading": False}


def test_a_run_tries_what_it_will_use_and_says_so(monkeypatch, gpu):
    tried = []
    monkeypatch.setattr(
        selfcheck,
        "measure_attention_error",
        lambda kernel, **of: tried.append((kernel, of)) or {"out": 0.0},
    )
    monkeypatch.setattr(
        selfcheck,
        "measure_offload_error",
        lambda how, *, device, options: tried.append((how, device, options)) or 0.0,
    )
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 28, 0))
    program, choice = test_memory_options.program(
        gpu, {"remat": "save_attention", "offload_activations": "layer_inputs"}
    )
    said = selfcheck.check_device(program, choice)
    of = {
        "heads_per_kv_head": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_segments": 5,
        "head_chunks": 1,
        "window": None,
        "dtype": program.dtype,
        "device": gpu,
    }
    assert tried == [(choice.kernel, of), (program.remat_policy, gpu, PREFETCH)]
    found = [("9.28.0" in line, "offload" in line) for line in said]
    assert found == [(True, False), (False, True)]


def check_offload(monkeypatch, gpu, differences, xla_options=None):
    """The check on a device with these differences with and without prefetch; returns what was tried."""
    tried = []

    def difference(how, *, device, options):
        tried.append(options)
        return differences[any(options.values())]

    monkeypatch.setattr(selfcheck, "measure_attention_error", lambda kernel, **of: {"out": 0.0})
    monkeypatch.setattr(selfcheck, "measure_offload_error", difference)
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 28, 0))
    memory = {"remat": "save_attention", "offload_activations": "layer_inputs"}
    selfcheck.check_device(*test_memory_options.program(gpu, memory, xla_options=xla_options))
    return tried


@pytest.mark.parametrize("wrong", [0.3, float("nan"), float("inf")])
def test_wrong_gradients_only_with_prefetch_are_answered_with_the_option_that_turns_it_off(
    monkeypatch, gpu, wrong
):
    with pytest.raises(UserError, match=r"^memory.offload_activations: ") as found:
        check_offload(monkeypatch, gpu, {True: wrong, False: 0.0})
    (said,) = found.value.problems
    (word,) = shlex.split(re.search(r"run\.xla_options='[^']+'", said)[0])
    asked = programs.settings("memory.offload_activations=layer_inputs", word)
    assert asked.run.xla_options == NO_PREFETCH
    assert check_offload(monkeypatch, gpu, {True: wrong, False: 0.0}, asked.run.xla_options) == [
        NO_PREFETCH
    ]


@pytest.mark.parametrize("without", [0.3, float("nan")])
def test_gradients_that_are_wrong_without_prefetch_too_are_answered_with_no_offload(
    monkeypatch, gpu, without
):
    says = messages.holding("memory.offload_activations=none")
    with pytest.raises(UserError, match=says) as found:
        check_offload(monkeypatch, gpu, {True: 0.2, False: without})
    assert "xla_options" not in str(found.value)
    with pytest.raises(UserError, match=says):
        check_offload(monkeypatch, gpu, {True: 0.0, False: without}, NO_PREFETCH)


def test_the_check_without_prefetch_is_made_only_if_that_with_it_fails(monkeypatch, gpu):
    assert check_offload(monkeypatch, gpu, {True: 0.0, False: 0.0}) == [PREFETCH]
    with pytest.raises(UserError):
        check_offload(
            monkeypatch, gpu, {True: 0.3, False: 0.3}, PREFETCH | {"xla_gpu_autotune_level": 0}
        )


def test_on_cpus_nothing_is_tried():
    assert (
        selfcheck.check_device(*test_memory_options.program(jax.devices()[0], {"remat": "full"}))
        == []
    )
