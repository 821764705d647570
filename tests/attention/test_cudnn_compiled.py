"""The cuDNN kernel, compiled for an absent H100: head sizes, windows and memory of its calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import cudnn_bins, cudnn_calls, cudnn_limits
from jaxsp.attention.kernels.cudnn_limits import CallSplit
from jaxsp.attention.kernels.kernel import AttentionWorkload, KernelSettings, ScoreConfig
from jaxsp.planning import absent

pytestmark = pytest.mark.e2e

pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")

L = 8192
H = 4
G = 2


@pytest.fixture(scope="module")
def h100():
    return absent.make_devices("h100-80gb", 1)[0]


def program(device, *, slots, K, window, settings=None):
    """Text of the compiled forward and backward pass in bfloat16."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((1, L, heads, K), jnp.bfloat16, sharding=sharding) for heads in (H, G)
    )
    slot_shape = jax.ShapeDtypeStruct((1, slots), jnp.int32, sharding=sharding)

    attend = make_attend(
        kernel="cudnn", settings=settings, layer_scores=[ScoreConfig(window=window)]
    )

    def gradients(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return out, pull(dout)

    return jax.jit(gradients).lower(q, k, k, q, slot_shape, slot_shape).compile().as_text()


def windows(text, suffix):
    """Window of each call, 0 for none."""
    lines = [
        line
        for line in text.splitlines()
        if f'custom_call_target="__cudnn$fmhaSoftmax{suffix}"' in line
    ]
    return sorted(int(re.search(r'"sliding_window_length": ?"?(\d+)', line)[1]) for line in lines)


@pytest.mark.parametrize(
    ("slots", "K", "window", "expected"),
    [
        (1, 64, None, [0]),
        (1, 192, 4096, [4096]),
        (64, 96, 1000, [0, 1000, 1000]),  # slots of 512, 2048 and 8192 tokens
        (64, 256, None, [0, 0, 0]),
    ],
)
def test_xla_supports_head_sizes_to_256_and_windows(slots, K, window, expected, h100):
    workload = AttentionWorkload(
        num_heads=H,
        num_kv_heads=G,
        head_dim=K,
        row_tokens=L,
        num_rows=1,
        max_segments=slots,
        window=window,
        dtype="bfloat16",
    )
    assert cudnn_limits.unsupported_reasons(workload, devices=[h100]) == []
    text = program(h100, slots=slots, K=K, window=window)
    assert windows(text, "") == windows(text, "Backward") == expected
    assert cudnn_calls.read_workspace_bytes(text) is None, "sizes are known only with a GPU"
    calls = cudnn_bins.plan_calls(num_rows=1, row_tokens=L, max_segments=slots) if slots > 1 else ()
    shapes = [(call.num_bins, H, call.bin_tokens) for call in calls] or [(1, H, L)]
    results = [
        line.partition("=")[2].partition("(%")[0] for line in text.splitlines() if " = " in line
    ]
    lse_shapes = [
        {shape for shape in shapes if f"f32[{shape[0]},{shape[1]},{shape[2]}]" in result}
        for result in results
    ]
    # One operation that expands the log-sum-exps for all calls would keep all of them until the
    # last.
    assert max(map(len, lse_shapes)) == 1
    assert set.union(*lse_shapes) == set(shapes)
    assert max(4 * int(np.prod(shape)) for shape in shapes) == cudnn_limits.lse_bytes(
        workload, CallSplit(1, cudnn_bins.CAPACITY_FACTOR)
    )


def test_an_a100_computes_copies_of_the_segments_in_calls_that_are_not_packed():
    """64 slots of 512, 16 of 2,048 and 4 of 8,192 tokens."""
    (a100,) = absent.make_devices("a100-80gb", 1)
    settings = KernelSettings(copies_segments=True)
    text = program(a100, slots=64, K=128, window=None, settings=settings)
    calls = [line for line in text.splitlines() if "custom_call_target" in line and "fmha" in line]
    first_shapes = [re.search(r"bf16\[(\d+),(\d+),(\d+)", call).groups() for call in calls]
    assert len(calls) == 6, "forward and backward"
    sizes = {tuple(sorted(map(int, shape))) for shape in first_shapes}
    assert sizes == {(H, 64, 512), (H, 16, 2048), (H, 4, 8192)}
    assert all('"mask_type":"PADDING_CAUSAL"' in call.replace(" ", "") for call in calls)
