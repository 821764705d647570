"""Loss, gradients and counts of each model family on several meshes, and of a model with the
features that no family has, equal those of a plain program with the attention oracle. Those of
models with delta nets equal transformers' in float64."""

import functools
from typing import Any, NamedTuple

import pytest

from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, tolerances
from tests.attention.strategies import make_strategy
from tests.hf import oracle
from tests.training import runs
from tests.training.mixed import MIXED

ROW_TOKENS = 480
SEGMENTS = [
    [(0, 400), (400, 2), (402, 71)],
    [(0, 2), (2, 3), (5, 57), (70, 211), (290, 190)],
    [(0, 7), (7, 473)],
    [(16, 130), (146, 30), (176, 2), (178, 300)],
]
"""Start and length of each document: 2 to 473 tokens, with padding between some of them."""

MESHES = {
    "2x4 Ulysses": (2, make_strategy(seq=4, ulysses_degree=4)),
    "2x4 Ulysses of 2 x ring of 2": (2, make_strategy(seq=4, ulysses_degree=2)),
    "1x3 ring": (1, make_strategy(seq=3, ulysses_degree=1)),
    "1x5 all-gather": (
        1,
        make_strategy(seq=5, ulysses_degree=1, tokens="all_gather", kv_heads_per_gather=1),
    ),
}
"""Size of the data axis, and strategy."""

HYBRIDS = [name for name, fields in oracle.MODELS.items() if "linear_num_key_heads" in fields]
"""Models with delta nets."""

E2E = {
    ("mixed", "2x4 Ulysses of 2 x ring of 2"),
}
"""Has layers of several kinds. The others are slow: each compiles for about 15 s."""

CASES = [
    pytest.param(
        name,
        mesh,
        id=f"{name}, {mesh}",
        marks=pytest.mark.e2e if (name, mesh) in E2E else pytest.mark.slow,
    )
    for name in [*oracle.MODELS, "mixed"]
    if name not in HYBRIDS
    for mesh in MESHES
]


def make_model(name):
    if name == "mixed":
        return MIXED
    return model_config.parse_model_config(oracle.MODELS[name], row_tokens=ROW_TOKENS)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_family_gives_the_same_gradients_on_every_mesh(name, mesh, record_property):
    data, strategy = MESHES[mesh]
    model = make_model(name)
    rows = batches.make_rows(SEGMENTS, num_tokens=ROW_TOKENS, vocab_size=model.vocab_size, seed=3)
    run = runs.compile_in_thread(
        (1, data, strategy.seq),
        rows_per_microbatch=1,
        model=model,
        functions=("gradients",),
        arrays=rows,
        strategy=strategy,
    ).result()
    runs.check_gradients(run, runs.draw_weights(model), rows, record_property)


HYBRID_SEGMENTS = [
    [(0, 400), (400, 1), (401, 71)],
    [(0, 2), (2, 3), (5, 57), (70, 211), (290, 190)],
    [(0, 7), (7, 393), (400, 1), (401, 1)],
    [(16, 130), (146, 30), (176, 2), (178, 300)],
]
"""Start and length of each document: 1 to 400 tokens, and padding."""

HYBRID_MESHES = {
    "1x1": (1, make_strategy(seq=1)),
    "2x4 Ulysses": MESHES["2x4 Ulysses"],
    "1x8 ring": (1, make_strategy(seq=8, ulysses_degree=1)),
    "1x3 ring": MESHES["1x3 ring"],
}

DECAYS = {"slow": (0.01, 0.05), "fast": (0.01, 16.0)}
"""Range of exp(A_log): with the first, a state lasts for documents; the second is that of new
models."""


class Expected(NamedTuple):
    """Weights in jaxsp's structure, rows, and transformers' results of them in float64."""

    weights: Any
    rows: batches.Arrays
    loss: float
    gradients: dict[str, Any]
    """By path in the parameter table."""
    largest_error: float
    """Largest error of a gradient of transformers in float32."""


@functools.cache
def expect_hybrid(name, decay):
    torch = oracle.torch
    table = decoder.param_table(make_model(name))
    model = oracle.torch_model(oracle.MODELS[name])
    generator = torch.Generator().manual_seed(5)
    low, high = DECAYS[decay]
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("A_log"):
                weight.uniform_(low, high, generator=generator).log_()
            elif weight.ndim == 2 and "norm" not in path:
                weight.mul_(0.3)  # with large matrices, gradients are small sums of large terms
    rows = batches.make_rows(
        HYBRID_SEGMENTS,
        num_tokens=ROW_TOKENS,
        vocab_size=oracle.MODELS[name]["vocab_size"],
        seed=3,
    )
    documents = [
        rows["tokens_BL"][row, start : start + length]
        for row, segments in enumerate(HYBRID_SEGMENTS)
        for start, length in segments
    ]
    exact = oracle.float64_gradients(model, documents)
    named = (exact.gradients, oracle.gradients(model, documents).gradients)
    gradients, rounded = (batches.name_leaves(oracle.stacked(x, table)) for x in named)
    weights = oracle.stacked(dict(model.named_parameters()), table)
    return Expected(
        weights, rows, exact.loss, gradients, max(find_errors(rounded, gradients).values())
    )


def find_errors(actual, expected):
    """Error of each gradient, by path."""
    assert actual.keys() == expected.keys()
    return {path: batches.relative_error(actual[path], expected[path]) for path in expected}


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mesh", HYBRID_MESHES)
@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_of_delta_nets_are_transformers_in_float64(name, mesh, decay, record_property):
    """With fast decays, transformers' own gradients in float32 are off by 1e-4 of those in
    float64."""
    expected = expect_hybrid(name, decay)
    loss, gradients = run_hybrid(name, mesh, decay)
    errors = find_errors(gradients, expected.gradients)
    to_one_device = find_errors(gradients, run_hybrid(name, "1x1", decay)[1])
    worst = max(errors, key=lambda path: errors[path])
    record_property("worst gradient", f"{worst} {errors[worst]:.1e}")
    record_property("to one device", f"{max(to_one_device.values()):.1e}")
    assert batches.relative_error(loss, expected.loss) < tolerances.FLOAT64
    assert errors[worst] < max(tolerances.FLOAT64, 2 * expected.largest_error), worst
    assert max(to_one_device.values()) < tolerances.MESH


@functools.cache
def compile_hybrid(name, mesh):
    data, strategy = HYBRID_MESHES[mesh]
    return runs.compile_in_thread(
        (1, data, strategy.seq),
        rows_per_microbatch=1,
        model=make_model(name),
        functions=("gradients",),
        arrays=expect_hybrid(name, "slow").rows,
        strategy=strategy,
    ).result()


@functools.cache
def run_hybrid(name, mesh, decay):
    """Loss, and gradients by path."""
    expected = expect_hybrid(name, decay)
    run = compile_hybrid(name, mesh)
    stored = run.state(expected.weights).master
    gradients, sums = run.gradients(stored, run.rows(expected.rows))
    return sums["loss"], run.unpad(gradients)
