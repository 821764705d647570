"""Dtypes of collectives, residuals of the backward pass, and the errors of bfloat16."""

import functools

import jax
import numpy as np
import pytest

from jaxsp.model import decoder
from jaxsp.training import step_gradients, train_state
from tests import batches, tolerances
from tests.training import runs


@functools.cache
def long_rows():
    """Two rows of 4096 tokens, three in ten of them the same.

    Each of 4 devices has 2048, which are 128 tiles of 16.
    """
    segments = [[(0, 1500), (1500, 2596)], [(0, 4000)]]
    arrays = batches.make_rows(segments, num_tokens=4096, vocab_size=runs.MODEL.vocab_size, seed=3)
    often = np.random.default_rng(4).random(arrays["tokens_BL"].shape) < 0.3
    arrays["tokens_BL"][often] = 7
    for row, places in enumerate(segments):
        for start, length in places:
            arrays["labels_BL"][row, start : start + length - 1] = arrays["tokens_BL"][
                row, start + 1 : start + length
            ]
    return arrays


BARE = {
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": "none",
    "initializer_range": 0.02,
}
FAMILIES = {
    "llama": batches.model(**BARE | {"output_bias": True, "mlp_bias": True}),
    "qwen2": batches.model(**BARE | {"qkv_bias": True}),
    "qwen3": batches.model(**BARE | {"qk_norm": "head"}),
}


@pytest.fixture(scope="module", autouse=True)
def compiling(small_shards):
    tiles = {
        "float32": {"loss_tile_tokens": 16},
        "bfloat16": {"loss_tile_tokens": 16, "mlp_tile_tokens": 16},
    }
    compiling = functools.partial(
        runs.compile_in_thread,
        (1, 1, 4),
        rows_per_microbatch=2,
        functions=("gradients",),
        arrays=long_rows(),
    )

    @functools.cache
    def run(family, dtype):
        config = batches.make_config(compute_dtype=dtype, memory=tiles[dtype])
        return compiling(config=config, model=FAMILIES[family]).result()

    return run


@pytest.mark.e2e
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == "llama" else [pytest.mark.slow])
        for family in FAMILIES
    ],
)
def test_bfloat16_gradients_are_near_those_of_float32(family, compiling, record_property):
    """Random weights of the family that bfloat16 can represent, as published ones are.

    Otherwise their rounding, 0.17 % of each matrix, would be most of the difference.
    """
    start = train_state.random_weights(
        decoder.param_table(FAMILIES[family]), seed=0, mesh=batches.mesh(1, 1, 1)
    )
    weights = jax.tree.map(lambda weight: weight.astype("bfloat16").astype("float32"), start)

    def gradients(dtype):
        run = compiling(family, dtype)
        return run.unpad(run.gradients(run.state(weights).master, run.rows(long_rows()))[0])

    actual = gradients("bfloat16")
    right = gradients("float32")
    differences = {name: batches.relative_error(actual[name], right[name]) for name in right}
    record_property("differences", differences)
    cancelling = [
        f"layers.pre_attention.{name}" for name in ("k.bias", "q_norm.weight", "k_norm.weight")
    ]
    for name, difference in differences.items():
        limit = tolerances.BF16_CANCELLING if name in cancelling else tolerances.BF16
        assert difference < limit, (name, differences)


@functools.cache
def traced(grad_reduce_dtype):
    """The gradients of 2 x 4 devices in bfloat16."""
    memory = {"grad_reduce_dtype": grad_reduce_dtype}
    spec = runs.make_spec(memory, sizes=(1, 2, 4), compute_dtype="bfloat16")
    run = runs.Run(spec, rows_per_microbatch=1, gradients=None, step=None)
    state = run.state(runs.draw_weights(runs.MODEL))
    return jax.make_jaxpr(functools.partial(step_gradients.compute_gradients, spec))(
        state.master, run.rows(runs.ROWS)
    )


def dtypes_of(primitive, grad_reduce_dtype):
    """Dtypes that a collective sends, and how often it is called in the text of the program."""
    equations = [
        e for e in batches.equations(traced(grad_reduce_dtype)) if e.primitive.name == primitive
    ]
    return {str(variable.aval.dtype) for e in equations for variable in e.invars}, len(equations)


@pytest.mark.parametrize(
    "grad_reduce_dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def test_weights_are_sent_in_the_compute_dtype_and_gradients_in_the_reduce_dtype(grad_reduce_dtype):
    # 7 matrices and 2 biases of 100 elements or more; embedding and head
    sharded_in_a_layer = 9
    at_the_ends = 2
    # Layers are gathered again in the backward pass, embedding and head are not
    assert dtypes_of("all_gather", grad_reduce_dtype) == (
        {"bfloat16"},
        2 * sharded_in_a_layer + at_the_ends,
    )
    assert dtypes_of("reduce_scatter", grad_reduce_dtype) == (
        {grad_reduce_dtype},
        sharded_in_a_layer + at_the_ends,
    )
    # q, k and v together, and the output. The backward pass repeats both and transposes them
    assert dtypes_of("all_to_all", grad_reduce_dtype) == ({"bfloat16"}, 6)
    assert dtypes_of("psum", grad_reduce_dtype)[0] <= {"float32", "int32"}


def test_the_backward_pass_keeps_of_a_layer_its_input_and_what_attention_gave():
    """Stacked outputs of the scan over layers are kept; no weights are among them."""
    model = runs.MODEL
    l = 16
    L = 64
    scans = [
        equation
        for equation in batches.equations(traced("float32"))
        if equation.primitive.name == "scan" and equation.params["length"] == model.num_layers
    ]
    forward, backward = scans
    kept = [
        variable.aval
        for variable in forward.outvars
        if variable.aval.shape[:1] == (model.num_layers,)
    ]
    heads = model.num_heads // 4
    assert sorted((aval.shape[1:], str(aval.dtype)) for aval in kept) == [
        ((1, heads, L), "float32"),  # log-sum-exp
        ((1, l, model.hidden_size), "bfloat16"),  # the layer's input
        ((1, L, heads, model.head_dim), "bfloat16"),  # attention's output
    ]
    assert not [
        variable for variable in backward.outvars if variable.aval.shape[:1] == (model.num_layers,)
    ]
    # gradients are added into references
    gradients = [
        variable.aval.inner_aval
        for variable in backward.invars
        if hasattr(variable.aval, "inner_aval")
    ]
    assert len(gradients) == len(jax.tree.leaves(decoder.param_table(model)["layers"]))
    assert {(aval.shape[0], str(aval.dtype)) for aval in gradients} == {
        (model.num_layers, "float32")
    }


def test_no_gradient_of_a_weight_is_summed_over_tokens_in_bfloat16():
    """Sums are float32. (Matrix products always accumulate in float32.)"""
    sums = [
        equation
        for equation in batches.equations(traced("float32"))
        if equation.primitive.name == "reduce_sum"
    ]
    over_tokens = [equation.invars[0].aval for equation in sums if 1 in equation.params["axes"]]
    assert {str(aval.dtype) for aval in over_tokens} == {"float32", "int32"}, over_tokens


def test_gradients_of_matrices_are_float32_out_of_their_products():
    """Rounded to bfloat16 first, each would be off by up to 0.4 % before it is summed."""
    rows = jax.tree.leaves(decoder.param_table(runs.MODEL)["layers"])
    shapes = {row.shape for row in rows if row.is_matrix}
    dtypes = [
        str(e.outvars[0].aval.dtype)
        for e in batches.equations(traced("bfloat16"))
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape in shapes
    ]
    assert dtypes == ["float32"] * 7
