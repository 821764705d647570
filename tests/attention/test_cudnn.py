"""The cuDNN kernel without a GPU; `cudnn_contract` computes the library's calls."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels.cudnn import cudnn_bins, cudnn_calls
from jaxsp.attention.kernels.cudnn.cudnn_bins import CallBins, PackedCall
from jaxsp.attention.kernels.cudnn.cudnn_kernel import CudnnKernel
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.kernels.residuals import CHECKPOINT_NAMES as ATTENTION_NAMES
from jaxsp.attention.kernels.segments import Segments
from jaxsp.core import axes
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle
from tests.attention.strategies import make_strategy
from tests.messages import assert_names

pytestmark = pytest.mark.usefixtures("calls_on_cpu")


@pytest.fixture(scope="module")
def calls_on_cpu():
    cudnn_contract.on_cpu()


L = 512
K = 16

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


def rows(kind, which):
    """Starts and lengths of some of these rows."""
    arrays = np.zeros((2, len(which), SLOTS[kind]), np.int32)
    for row, index in enumerate(which):
        for slot, (start, length) in enumerate(SEGMENTS[kind][index]):
            arrays[:, row, slot] = start, length
    return arrays


def arrays(B, h, g, K=K):
    """q, k, v and a cotangent of the output."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, L, heads, K), np.float32) for heads in (h, g, g, h)]


def run(kernel, *inputs):
    """Output, dq, dk and dv of a kernel."""
    return results(make_attend(seq=1, kernel=kernel), *inputs)


def results(attend, *inputs):
    """Output, dq, dk and dv of an Attend."""

    @jax.jit
    def compute(q, k, v, dout, starts, lengths):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return jax.tree.map(np.asarray, compute(*inputs))


CASES = [
    ("many", [0, 1], 4, 2, 16, 1, None),
    ("many", [2, 3], 4, 4, 16, 2, None),  # a K/V head for each query head
    ("many", [3, 0], 4, 1, 16, 4, None),  # chunks share a K/V head
    ("two", [2, 3], 4, 2, 16, 4, None),
    ("one", [2, 3], 6, 2, 16, 6, None),
    ("many", [0, 3], 4, 2, 96, 2, 100),  # shorter than a bin of either call
    ("many", [2, 3], 2, 1, 64, 1, 200),  # longer than a bin of the second call
    ("many", [0, 3], 2, 1, 256, 1, None),
    ("two", [0, 3], 2, 1, 192, 1, 77),
    ("one", [0, 1], 2, 1, 128, 1, 77),
]
"""Segments, rows, query heads, K/V heads, head size, head chunks, window."""

QUICK = (2, 3, 4, 5)
"""Indices of the cases in the default tier."""

COPIED_CASES = [CASES[index] for index in (3, 5)]
"""Cases for GPUs without packed calls."""


@pytest.mark.parametrize(
    ("kind", "which", "h", "g", "K", "head_chunks", "window", "copies_segments"),
    [
        *(
            pytest.param(*case, False, marks=[] if index in QUICK else [pytest.mark.slow])
            for index, case in enumerate(CASES)
        ),
        *((*case, True) for case in COPIED_CASES),
    ],
)
def test_cudnn_equals_the_oracle(kind, which, h, g, K, head_chunks, window, copies_segments):
    inputs = [*arrays(len(which), h, g, K), *rows(kind, which)]
    actual = run(
        make_attend(
            kernel="cudnn",
            settings=KernelSettings(head_chunks=head_chunks, copies_segments=copies_segments),
            layer_scores=[ScoreConfig(window=window)],
        ),
        *inputs,
    )
    expected = run_oracle(kind, tuple(which), h, g, K, window)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.KERNEL, name


@functools.cache
def run_oracle(kind, which, h, g, K, window):
    inputs = [*arrays(len(which), h, g, K), *rows(kind, which)]
    return run(functools.partial(oracle.attention, score=ScoreConfig(window=window)), *inputs)


def test_whole_rows_of_a_group_go_through_cudnn():
    """Four devices, 8 query heads and 2 K/V heads, each repeated twice, and a window."""
    inputs = [*arrays(2, 8, 2), *rows("many", [0, 3])]
    shard = PartitionSpec(None, axes.SEQ)
    whole = PartitionSpec()
    specs = {"in_specs": (shard, shard, shard, whole, whole), "out_specs": shard}
    attend = make_attend(
        seq=4,
        kernel="cudnn",
        settings=KernelSettings(head_chunks=2),
        layer_scores=[ScoreConfig(window=90)],
    )
    sharded = jax.shard_map(attend, mesh=batches.mesh(1, 1, 4), **specs, check_vma=False)
    q, k, v, _, starts, lengths = inputs
    actual = jax.jit(sharded)(q, k, v, starts, lengths)
    expected = run(functools.partial(oracle.attention, score=ScoreConfig(window=90)), *inputs)[
        "out"
    ]
    assert batches.relative_error(actual, expected) < tolerances.ULYSSES


STRATEGIES = [
    pytest.param("many", make_strategy(seq=2, ulysses_degree=1), 4, 2, 2, marks=pytest.mark.slow),
    ("two", make_strategy(seq=2, ulysses_degree=1), 4, 1, 1),
    pytest.param("one", make_strategy(seq=2, ulysses_degree=1), 3, 3, 1, marks=pytest.mark.slow),
    pytest.param(
        "many",
        make_strategy(seq=2, ulysses_degree=1, tokens="all_gather"),
        4,
        2,
        1,
        marks=pytest.mark.slow,
    ),
    (
        "one",
        make_strategy(seq=2, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=2),
        4,
        2,
        2,
    ),
    pytest.param("many", make_strategy(seq=4, ulysses_degree=2), 4, 2, 1, marks=pytest.mark.e2e),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "h", "g", "head_chunks"),
    STRATEGIES,
    ids=lambda value: getattr(value, "description", None),
)
def test_chunks_of_rows_go_through_cudnn(kind, strategy, h, g, head_chunks):
    """All that cuDNN leaves undefined is NaN here, and no result has NaN."""
    inputs = [*arrays(4, h, g), *rows(kind, [0, 1, 2, 3])]
    attend = batches.attend_on_shards(
        make_attend(
            strategy=strategy, kernel="cudnn", settings=KernelSettings(head_chunks=head_chunks)
        )
    )
    actual = results(attend, *inputs)
    expected = run(oracle.attention, *inputs)
    for name in expected:
        assert batches.relative_error(actual[name], expected[name]) < tolerances.STRATEGIES, name


def test_the_output_is_nan_if_a_row_in_one_slot_does_not_begin_with_its_segment():
    actual = run("cudnn", *arrays(2, 2, 1), np.int32([[0], [4]]), np.int32([[300], [300]]))
    assert np.isfinite(actual["out"][0]).all()
    assert np.isnan(actual["out"][1, 4:304]).all()


def num_calls(head_chunks, policy):
    """Number of forward and backward calls of cuDNN in a checkpointed layer and its gradient."""
    q, k, v, _ = map(jnp.asarray, arrays(1, 4, 2))
    starts, lengths = map(jnp.asarray, rows("many", [0]))
    attend = make_attend(kernel="cudnn", settings=KernelSettings(head_chunks=head_chunks))

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q):
        return attend(2 * q, k, v, starts, lengths) ** 2

    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda q: layer(q).sum()))(q)
    names = [equation.primitive.name for equation in batches.equations(jaxpr)]
    return names.count("dot_product_attention_fwd"), names.count("dot_product_attention_bwd")


def test_attention_is_not_recomputed_if_its_named_residuals_are_kept():
    policies = jax.checkpoint_policies
    assert num_calls(1, policies.save_only_these_names(*ATTENTION_NAMES)) == (2, 2)
    # In a loop over head chunks:
    assert num_calls(2, policies.save_only_these_names(*ATTENTION_NAMES)) == (2, 2)
    assert num_calls(1, policies.save_only_these_names(ATTENTION_NAMES[0])) == (4, 2)
    assert num_calls(1, policies.nothing_saveable) == (4, 2)


def test_the_residuals_do_not_grow_with_the_bins():
    q, k, v, _ = map(jnp.asarray, arrays(1, 4, 2))
    for kind in ("one", "two", "many"):
        starts, lengths = map(jnp.asarray, rows(kind, [0]))
        functions = CudnnKernel().make_row_functions(KernelSettings(), ScoreConfig())
        _, lse = jax.eval_shape(functions.forward, q, k, v, Segments(starts, lengths))
        assert lse.shape == (1, 4, L), kind
        assert lse.dtype == jnp.float32


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
        assert (
            max(call.num_bins * call.bin_tokens for call in calls)
            <= cudnn_bins.CAPACITY_FACTOR * num_rows * 2**20
        )
        assert calls[-1].num_bins >= num_rows * max_segments
    few = cudnn_bins.plan_calls(num_rows=2, row_tokens=2**20, max_segments=2)
    assert few == (PackedCall(longer_than=0, bin_tokens=2**20, num_bins=4, num_tokens=2**21),)


@pytest.mark.parametrize(
    ("row_tokens", "max_segments"), [(128, 17), (384, 5), (512, 2), (6144, 17), (6144, 300)]
)
@pytest.mark.parametrize("capacity_factor", cudnn_bins.CAPACITY_FACTORS)
def test_every_segment_of_random_rows_has_one_bin(max_segments, row_tokens, capacity_factor):
    rng = np.random.default_rng(max_segments)
    starts, lengths = np.zeros((2, 2, max_segments), np.int32)
    for row in range(2):
        cuts = np.unique(
            rng.integers(0, row_tokens, max_segments) ** (1 + row) // row_tokens**row
        )  # row 1: short segments first
        ends = np.append(cuts[1:], row_tokens)
        gaps = rng.integers(0, 3, len(cuts))
        starts[row, : len(cuts)] = cuts
        lengths[row, : len(cuts)] = np.maximum(ends - cuts - gaps, 1)
    in_bins = []
    calls = cudnn_bins.plan_calls(
        num_rows=2,
        row_tokens=row_tokens,
        max_segments=max_segments,
        capacity_factor=capacity_factor,
    )
    tables = cudnn_bins.make_tables(
        jnp.asarray(starts),
        jnp.asarray(lengths),
        row_tokens=row_tokens,
        capacity_factor=capacity_factor,
    )
    for index, call in enumerate(calls):
        bins = tables.get_bins(index)
        used = [(int(a), int(n)) for a, n in zip(bins.starts_S, bins.lengths_S, strict=True) if n]
        assert used == sorted(used)
        assert all(call.longer_than < n <= call.bin_tokens for _, n in used)
        in_bins += used
    assert sorted(in_bins) == [
        (row * row_tokens + int(a), int(n))
        for row in range(2)
        for a, n in zip(starts[row], lengths[row], strict=True)
        if n
    ]


def test_expanding_a_compressed_log_sum_exp_restores_it():
    bins = cudnn_bins.make_tables(
        jnp.int32([[0, 3], [1, 0]]), jnp.int32([[3, 5], [6, 0]]), row_tokens=8
    ).get_bins(0)
    assert bins.starts_S.tolist() == [0, 3, 9, 0]
    assert bins.lengths_S.tolist() == [3, 5, 6, 0]
    assert bins.bin_N.tolist() == [0] * 3 + [1] * 5 + [-1] + [2] * 6 + [-1]
    lse = np.random.default_rng(0).standard_normal((4, 2, 8), np.float32)
    is_used = np.arange(8) < np.array([3, 5, 6, 0])[:, None]
    actual = cudnn_bins.expand_lse(
        cudnn_bins.compress_lse(jnp.asarray(lse), bins), bins, bin_tokens=8
    )
    assert (
        np.asarray(actual) == np.where(is_used[:, None], lse, np.float32(cudnn_bins.MASKED_LSE))
    ).all()


def test_bin_offsets_are_counted_in_elements_of_each_array():
    """Two rows of 8 tokens, 4 query heads and 2 K/V heads of size 16.

    Unused offsets are at the end of the memory.
    """
    bins = CallBins(jnp.int32([0, 3, 9, 0]), jnp.int32([3, 5, 6, 0]), jnp.zeros(16, jnp.int32))
    assert cudnn_calls._bin_offsets(bins, jnp.zeros((2, 8, 4, 16))).reshape(-1).tolist() == [
        0,
        192,
        576,
        1024,
        1024,
        1024,
    ]
    assert cudnn_calls._bin_offsets(bins, jnp.zeros((2, 8, 2, 16))).reshape(-1).tolist() == [
        0,
        96,
        288,
        512,
        512,
        512,
    ]


def changed_library(**changes):
    return types.SimpleNamespace(**{**vars(cudnn_calls._library()), **changes})


@pytest.mark.parametrize(
    "change", ["no module", "no primitive", "no function", "another parameter", "another order"]
)
def test_a_jax_with_other_private_functions_is_refused_and_supported_versions_are_named(
    change, monkeypatch
):
    fwd = "_dot_product_attention_fwd_cuda_lowering"
    original = inspect.signature(getattr(cudnn_calls._library(), fwd))
    known = list(original.parameters.values())
    more = inspect.Parameter("sinks", inspect.Parameter.KEYWORD_ONLY)
    other = {
        "another parameter": [*known, more],
        "another order": [known[0], known[2], known[1], *known[3:]],
    }
    function = types.FunctionType((lambda: None).__code__, {})
    if change in other:
        function.__signature__ = original.replace(parameters=other[change])
    library = {
        "no module": None,
        "no primitive": types.SimpleNamespace(),
        "no function": changed_library(**{fwd: None}),
    }.get(change, changed_library(**{fwd: function}))
    assert cudnn_calls.describe_unsupported_jax() is None
    cudnn_calls._extra_params.cache_clear()
    monkeypatch.setattr(cudnn_calls, "_library", lambda: library)
    try:
        assert_names(cudnn_calls.describe_unsupported_jax(), "0.10.1", "0.12.0")
    finally:
        cudnn_calls._extra_params.cache_clear()
