"""The cuDNN kernel without a GPU; `cudnn_contract` computes the library's calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.attend import CHECKPOINT_NAMES, make_attend
from jaxsp.attention.kernels import cudnn_bins, cudnn_calls
from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.cudnn_bins import PackedCall
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle
from tests.attention.strategies import make_strategy

pytestmark = pytest.mark.usefixtures("calls_on_cpu")


@pytest.fixture(scope="module")
def calls_on_cpu():
    cudnn_contract.on_cpu()


L = 512

SEGMENTS = {
    "many": [
        [(0, 200), (200, 1), (201, 128), (329, 129), (458, 20), (478, 5), (483, 2), (485, 3)],
        [],
        [(0, 512)],
        [(3, 5), (10, 120), (140, 130), (300, 180), (490, 1)],
    ],
    "two": [[(0, 256), (256, 256)], [(0, 512)], [], [(7, 100)]],
    "one": [[(0, 512)], [(0, 300)], [], [(0, 2)]],
}
"""Segments of four rows, by maximum number of segments, with gaps, an empty row and a full one."""

SLOTS = {"many": 30, "two": 2, "one": 1}


def make_inputs(kind, which, h, g, K=16):
    """Inputs with the segments of some of the rows."""
    slots = oracle.make_slots([SEGMENTS[kind][index] for index in which], SLOTS[kind])
    return [*oracle.draw(len(which), L, h, g, K), *slots]


@functools.cache
def run_oracle(kind, which, h, g, K, score, *, has_sinks=False):
    options = {"sinks_H": make_sinks(h)} if has_sinks else {}
    run = oracle.differentiate(oracle.make_attend(score))
    return run(*make_inputs(kind, which, h, g, K), **options)


def make_sinks(num_heads):
    return np.linspace(-2, 3, num_heads, dtype=np.float32)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)

CASES = [
    slow("many", (0, 1), 4, 2, 16, 1, None, False),
    slow("many", (2, 3), 4, 4, 16, 2, None, False),  # a K/V head for each query head
    ("many", (3, 0), 4, 1, 16, 4, None, False),  # chunks share a K/V head
    ("two", (2, 3), 4, 2, 16, 4, None, False),
    ("one", (2, 3), 6, 2, 16, 6, None, False),
    ("many", (0, 3), 4, 2, 96, 2, 100, False),  # shorter than a bin of either call
    ("many", (0, 3), 4, 2, 96, 2, 100, True),
    ("two", (2, 3), 4, 2, 16, 4, None, True),
    slow("many", (2, 3), 2, 1, 64, 1, 200, False),  # longer than a bin of the second call
    slow("many", (0, 3), 2, 1, 256, 1, None, False),
    slow("two", (0, 3), 2, 1, 192, 1, 77, False),
    slow("one", (0, 1), 2, 1, 128, 1, 77, False),
]
"""Segments, rows, query heads, K/V heads, head size, head chunks, window; whether segments are
copied, as for GPUs without packed calls."""


@pytest.mark.parametrize(
    ("kind", "which", "h", "g", "K", "head_chunks", "window", "copies_segments"), CASES
)
def test_cudnn_equals_the_oracle(kind, which, h, g, K, head_chunks, window, copies_segments):
    score = ScoreConfig(window=window)
    settings = KernelSettings(head_chunks=head_chunks, copies_segments=copies_segments)
    attend = make_attend(kernel="cudnn", settings=settings, layer_scores=[score])
    actual = oracle.differentiate(attend)(*make_inputs(kind, which, h, g, K))
    expected = run_oracle(kind, which, h, g, K, score)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.KERNEL, name


RING = make_strategy(seq=2, ulysses_degree=1)

STRATEGIES = [
    # 8 query heads and 2 K/V heads, each repeated twice, and a window
    ("many", combine(4), 8, 2, 2, 90),
    slow("many", RING, 4, 2, 2, None),
    ("two", RING, 4, 1, 1, None),
    slow("one", RING, 3, 3, 1, None),
    slow("many", combine(1, AllGather(degree=2)), 4, 2, 1, None),
    ("one", combine(1, AllGather(degree=2, kv_heads_per_gather=2)), 4, 2, 2, None),
    pytest.param(
        "many", make_strategy(seq=4, ulysses_degree=2), 4, 2, 1, None, marks=pytest.mark.e2e
    ),
    slow("many", RING, 4, 2, 1, 100),
    ("one", RING, 4, 2, 1, 200),  # a halo of more tokens than are before the second chunk
    slow("two", combine(1, Ring(degree=1)), 4, 2, 1, 300),
    slow("many", make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 4, 2, 1, 129),
    ("one", combine(1, AllGather(degree=1)), 4, 2, 1, 511),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "h", "g", "head_chunks", "window"),
    STRATEGIES,
    ids=lambda value: getattr(value, "description", None),
)
def test_strategies_go_through_cudnn(kind, strategy, h, g, head_chunks, window):
    """All that cuDNN leaves undefined is NaN here, and no result has NaN."""
    score = ScoreConfig(window=window)
    settings = KernelSettings(head_chunks=head_chunks)
    attend = batches.attend_on_shards(
        make_attend(strategy=strategy, kernel="cudnn", settings=settings, layer_scores=[score])
    )
    rows = (0, 1, 2, 3)
    actual = oracle.differentiate(attend)(*make_inputs(kind, rows, h, g))
    expected = run_oracle(kind, rows, h, g, 16, score)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.STRATEGIES, name


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (combine(2), "many"),
        (combine(1), "one"),
        slow(RING, "many"),
        slow(make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), "one"),
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_cudnn_scales_scores_and_has_kinds_and_sinks(strategy, kind):
    """Log-sum-exps at padding are NaN here, and so are outputs and gradients of tokens in no
    slot."""
    scores = [ScoreConfig(scale=0.1), ScoreConfig(scale=0.4, window=31)]
    settings = KernelSettings(head_chunks=2)
    attend = batches.attend_on_shards(
        make_attend(strategy=strategy, kernel="cudnn", settings=settings, layer_scores=scores)
    )
    run = oracle.differentiate(attend)
    for number, score in enumerate(scores):
        inputs = make_inputs(kind, (0, 3), 4, 2)
        actual = run(*inputs, kind=np.int32(number), sinks_H=make_sinks(4))
        right = run_oracle(kind, (0, 3), 4, 2, 16, score, has_sinks=True)
        for name in right:
            difference = batches.relative_error(actual[name], right[name])
            assert difference < tolerances.STRATEGIES, (name, number)


def test_the_output_is_nan_if_a_row_in_one_slot_does_not_begin_with_its_segment():
    slots = oracle.make_slots([[(0, 300)], [(4, 300)]], 1)
    q, k, v, _ = oracle.draw(2, L, 2, 1, 16)
    out = np.asarray(jax.jit(make_attend(kernel="cudnn"))(q, k, v, *slots))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 4:304]).all()


def num_calls(head_chunks, policy):
    """Number of forward and backward calls of cuDNN in a checkpointed layer and its gradient."""
    q, k, v, _, starts, lengths = map(jnp.asarray, make_inputs("many", (0,), 4, 2))
    attend = make_attend(kernel="cudnn", settings=KernelSettings(head_chunks=head_chunks))

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q):
        return attend(2 * q, k, v, starts, lengths) ** 2

    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda q: layer(q).sum()))(q)
    names = [equation.primitive.name for equation in batches.equations(jaxpr)]
    return names.count("dot_product_attention_fwd"), names.count("dot_product_attention_bwd")


def test_attention_is_not_recomputed_if_its_named_residuals_are_kept():
    policies = jax.checkpoint_policies
    assert num_calls(1, policies.save_only_these_names(*CHECKPOINT_NAMES)) == (2, 2)
    # In a loop over head chunks:
    assert num_calls(2, policies.save_only_these_names(*CHECKPOINT_NAMES)) == (2, 2)
    assert num_calls(1, policies.save_only_these_names(CHECKPOINT_NAMES[0])) == (4, 2)
    assert num_calls(1, policies.nothing_saveable) == (4, 2)


def test_the_residuals_do_not_grow_with_the_bins():
    for kind in SEGMENTS:
        q, k, v, _, *slots = map(jnp.asarray, make_inputs(kind, (0,), 4, 2))
        functions = CudnnKernel().make_row_functions(KernelSettings(), ScoreConfig())
        _, lse = jax.eval_shape(functions.forward, q, k, v, Segments(*slots))
        assert (lse.shape, lse.dtype) == ((1, 4, L), jnp.float32), kind


def test_calls_have_capacity_for_four_times_the_rows_with_any_number_of_segments():
    actual = cudnn_bins.plan_calls(num_rows=1, row_tokens=131072, max_segments=64)
    assert [(call.longer_than, call.bin_tokens, call.num_bins) for call in actual] == [
        (32768, 131072, 4),
        (8192, 32768, 16),
        (0, 8192, 64),
    ]
    for num_rows, max_segments in ((1, 5), (2, 64), (3, 1000)):
        calls = cudnn_bins.plan_calls(
            num_rows=num_rows, row_tokens=2**20, max_segments=max_segments
        )
        capacity = max(call.num_bins * call.bin_tokens for call in calls)
        assert capacity <= cudnn_bins.CAPACITY_FACTOR * num_rows * 2**20
        assert calls[-1].num_bins >= num_rows * max_segments
    few = cudnn_bins.plan_calls(num_rows=2, row_tokens=2**20, max_segments=2)
    assert few == (PackedCall(longer_than=0, bin_tokens=2**20, num_bins=4, num_tokens=2**21),)


@pytest.mark.parametrize(
    ("row_tokens", "max_segments"), [(128, 17), (384, 5), (512, 2), (6144, 17), (6144, 300)]
)
@pytest.mark.parametrize("capacity_factor", cudnn_bins.CAPACITY_FACTORS)
def test_every_segment_of_random_rows_has_one_bin(max_segments, row_tokens, capacity_factor):
    rng = np.random.default_rng(max_segments)
    rows = []
    for row in range(2):
        cuts = np.unique(
            rng.integers(0, row_tokens, max_segments) ** (1 + row) // row_tokens**row
        )  # row 1: short segments first
        ends = np.append(cuts[1:], row_tokens)
        lengths = np.maximum(ends - cuts - rng.integers(0, 3, len(cuts)), 1)
        rows.append(list(zip(cuts.tolist(), lengths.tolist(), strict=True)))
    sizes = {"row_tokens": row_tokens, "capacity_factor": capacity_factor}
    calls = cudnn_bins.plan_calls(num_rows=2, max_segments=max_segments, **sizes)
    slots = map(jnp.asarray, oracle.make_slots(rows, max_segments))
    tables = cudnn_bins.make_tables(*slots, **sizes)
    in_bins = []
    for index, call in enumerate(calls):
        bins = tables.get_bins(index)
        used = [(int(a), int(n)) for a, n in zip(bins.starts_S, bins.lengths_S, strict=True) if n]
        assert used == sorted(used)
        assert all(call.longer_than < n <= call.bin_tokens for _, n in used)
        in_bins += used
    assert sorted(in_bins) == [
        (row * row_tokens + start, length)
        for row, places in enumerate(rows)
        for start, length in places
    ]


PROGRAM = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(u8[77777777]{0})->bf16[1,2]{1,0}}

%wrapped (param: bf16[1,8192,32,128]) -> (bf16[1,32,8192,128], u8[64]) {
  %fwd.5 = (bf16[1,32,8192,128]{3,1,2,0}, f32[1,32,8192]{2,1,0}, u8[FORWARD]{0}) custom-call(%q, \
%k, %v), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"workspace_size": "0"}
  %gemm.1 = (bf16[4096,4096]{1,0}, u8[33554432]{0}) custom-call(%fwd.6, %w), \
custom_call_target="__cublas$gemm"
  ROOT %bwd.8 = (bf16[1,32,8192,128]{3,1,2,0:S(1)}, bf16[1,8,8192,128]{3,1,2,0}, u8[BACKWARD]{0}) \
custom-call(u8[99999999]{0} %q, %k, %v), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
"""
"""Lines as XLA writes them, written by hand; FORWARD and BACKWARD are sizes."""


@pytest.mark.parametrize(
    ("forward", "backward", "size"), [(16, 4563402752, 4563402752), (4096, 0, 4096), (0, 0, None)]
)
def test_the_largest_workspace_of_the_attention_calls_counts(forward, backward, size):
    text = PROGRAM.replace("FORWARD", str(forward)).replace("BACKWARD", str(backward))
    assert cudnn_calls.read_workspace_bytes(text) == size
