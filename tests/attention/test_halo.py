"""Sliding windows with strategies whose devices keep two chunks of each row."""

import functools

import jax
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.chunks.halo_exchange import Halo
from jaxsp.attention.kernels.kernel import ScoreConfig
from jaxsp.attention.strategies.all_gather import AllGather
from jaxsp.attention.strategies.ring import Ring
from jaxsp.attention.strategies.strategy import combine
from tests import batches, tolerances
from tests.attention import cudnn_contract, oracle, test_cudnn, test_strategies
from tests.attention.strategies import make_strategy

L = test_strategies.L

STRATEGIES = [
    *(combine(1, Ring(degree=seq)) for seq in (1, 2, 3, 4, 6, 8)),
    *(combine(1, Ring(degree=seq, chunks_per_device=4)) for seq in (1, 2, 4)),
    *(combine(1, AllGather(degree=seq)) for seq in (1, 4)),
    combine(1, AllGather(degree=3, chunks_per_device=8)),
    *(
        make_strategy(seq=seq, ulysses_degree=degree, tokens=tokens)
        for seq, degree in ((8, 2), (4, 2), (6, 3))
        for tokens in ("ring", "all_gather")
    ),
]

WINDOWS = {
    "only itself": lambda chunk: 1,
    "shorter than a chunk": lambda chunk: chunk // 2,
    "a chunk": lambda chunk: chunk,
    "longer than a chunk": lambda chunk: chunk + 1,
    "several chunks": lambda chunk: 3 * chunk - 1,
    "nearly the row": lambda chunk: L - 1,
    "longer than the row": lambda chunk: L + 1,
}
"""Tokens of a window, by the tokens of a chunk."""

QUICK = {
    ("ring of 4 (4 chunks each)", "several chunks"),
    ("Ulysses of 3 x ring of 2", "longer than a chunk"),
    ("all_gather of 1 by 1", "a chunk"),
}
"""Those in the default tier."""


pytestmark = pytest.mark.usefixtures("small_blocks")


def attend_with_window(strategy, kernel, window):
    attend = make_attend(
        strategy=strategy, kernel=kernel, layer_scores=[ScoreConfig(window=window)]
    )
    return attend if strategy.seq == 1 else batches.attend_on_shards(attend)


@functools.cache
def expected(window):
    attend = functools.partial(oracle.attention, score=ScoreConfig(window=window))
    return test_strategies.results(make_attend(kernel=attend), test_strategies.inputs(6, 2))


CASES = [
    pytest.param(
        strategy,
        name,
        marks=[] if (strategy.description, name) in QUICK else [pytest.mark.slow],
        id=f"{strategy.description}, {name}",
    )
    for strategy in STRATEGIES
    for name in WINDOWS
]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_windows_equal_one_device(strategy, name, record_property):
    window = WINDOWS[name](strategy.layout.chunk_tokens(L))
    actual = test_strategies.results(
        attend_with_window(strategy, "blockwise", window), test_strategies.inputs(6, 2)
    )
    right = dict(expected(window))
    if window == 1:  # the only weight of a softmax is 1: scores have no gradient
        for key in ("dq", "dk"):
            assert not right.pop(key).any()
            assert np.abs(actual.pop(key)).max() < tolerances.STRATEGIES
    differences = {key: batches.relative_error(actual[key], right[key]) for key in right}
    record_property("largest relative difference", max(differences.values()))
    assert max(differences.values()) < tolerances.STRATEGIES, differences


def test_tokens_depend_exactly_on_the_tokens_of_their_segment_in_the_window():
    """Gradients of single tokens, at edges of chunks of 12 tokens, of segments and of the row."""
    window = 17
    q, k, v, dout, starts, lengths = test_strategies.inputs(2, 1)
    attend = attend_with_window(combine(1, Ring(degree=4)), "blockwise", window)
    segment = np.full((len(q), L), -1)
    for row, places in enumerate(test_strategies.ROWS):
        for number, (start, length) in enumerate(places):
            segment[row, start : start + length] = number

    @jax.jit
    def find_dependence(token):
        def compute_token(q, k, v):
            return attend(q, k, v, starts, lengths)[:, token]

        _, pull = jax.vjp(compute_token, q, k, v)
        return [(x != 0).any((2, 3)) for x in pull(dout[:, 0])]

    position = np.arange(L)
    for token in (0, 1, 11, 12, 13, 24, 28, 47, 48, 53, 59, 60, 61, 84, 95):
        distance = token - position
        is_near = (distance >= 0) & (distance < window)
        token_segment = segment[:, token : token + 1]
        is_seen = (segment == token_segment) & (token_segment >= 0) & is_near
        dq, _, dv = find_dependence(token)
        np.testing.assert_array_equal(dv, is_seen)
        assert not dq[:, position != token].any()


CUDNN_CASES = [
    ("many", combine(1, Ring(degree=2)), 100),
    # a halo of more tokens than are before the second chunk
    ("one", combine(1, Ring(degree=2)), 200),
    ("two", combine(1, Ring(degree=1)), 300),
    ("many", make_strategy(seq=4, ulysses_degree=2, tokens="all_gather"), 129),
    ("one", combine(1, AllGather(degree=1)), 511),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "window"),
    [
        pytest.param(*case, marks=[] if case[0] == "one" else [pytest.mark.slow])
        for case in CUDNN_CASES
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_windows_go_through_cudnn(kind, strategy, window):
    """All that cuDNN leaves undefined is NaN here, and no result has NaN."""
    cudnn_contract.on_cpu()
    inputs = [*test_cudnn.arrays(4, 4, 2), *test_cudnn.rows(kind, [0, 1, 2, 3])]
    actual = test_cudnn.results(attend_with_window(strategy, "cudnn", window), *inputs)
    score = ScoreConfig(window=window)
    right = test_cudnn.run(functools.partial(oracle.attention, score=score), *inputs)
    for name in right:
        assert batches.relative_error(actual[name], right[name]) < tolerances.STRATEGIES, name


def test_halos_end_at_the_beginning_of_the_row():
    halo = Halo(window=96, chunk_tokens=12, num_chunks=8)
    assert halo.hop_tokens == [12] * 7
    assert Halo(window=30, chunk_tokens=12, num_chunks=8).hop_tokens == [12, 12, 5]
    assert Halo(window=1, chunk_tokens=12, num_chunks=8).hop_tokens == []
