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


MODEL = batches.model(qkv_bias=False, qk_norm="none", initializer_range=0.02)


@pytest.mark.e2e
def test_bfloat16_gradients_are_near_those_of_float32(small_shards):
    """Random weights that bfloat16 can represent, as published ones are.

    Otherwise their rounding, 0.17 % of each matrix, would be most of the difference.
    """
    start = train_state.random_weights(
        decoder.param_table(MODEL), seed=0, mesh=batches.mesh(1, 1, 1)
    )
    weights = jax.tree.map(lambda weight: weight.astype("bfloat16").astype("float32"), start)
    gradients = []
    for dtype, mlp_tile in (("bfloat16", 16), ("float32", "auto")):
        memory = {"loss_tile_tokens": 16, "mlp_tile_tokens": mlp_tile}
        run = runs.compile_in_thread(
            (1, 1, 4),
            rows_per_microbatch=2,
            functions=("gradients",),
            arrays=long_rows(),
            config=batches.make_config(compute_dtype=dtype, memory=memory),
            model=MODEL,
        ).result()
        own = run.gradients(run.state(weights).master, run.rows(long_rows()))[0]
        gradients.append(run.unpad(own))
    actual, right = gradients
    for name in right:
        assert batches.relative_error(actual[name], right[name]) < tolerances.BF16, name


@functools.cache
def traced():
    """The gradients of 2 x 4 devices in bfloat16."""
    memory = {"grad_reduce_dtype": "bfloat16"}
    spec = runs.make_spec(memory, sizes=(1, 2, 4), compute_dtype="bfloat16")
    run = runs.Run(spec, rows_per_microbatch=1, gradients=None, step=None)
    state = run.state(runs.draw_weights(runs.MODEL))
    return jax.make_jaxpr(functools.partial(step_gradients.compute_gradients, spec))(
        state.master, run.rows(runs.ROWS)
    )


def dtypes_of(primitive):
    """Dtypes that a collective sends, and how often it is called in the text of the program."""
    equations = [e for e in batches.equations(traced()) if e.primitive.name == primitive]
    return {str(variable.aval.dtype) for e in equations for variable in e.invars}, len(equations)


def test_weights_are_sent_in_the_compute_dtype_and_gradients_in_the_reduce_dtype():
    # 7 matrices and 2 biases of 100 elements or more; embedding and head
    sharded_in_a_layer = 9
    at_the_ends = 2
    # Layers are gathered again in the backward pass, embedding and head are not
    assert dtypes_of("all_gather") == (
        {"bfloat16"},
        2 * sharded_in_a_layer + at_the_ends,
    )
    assert dtypes_of("reduce_scatter") == (
        {"bfloat16"},
        sharded_in_a_layer + at_the_ends,
    )
    # q, k and v together, and the output. The backward pass repeats both and transposes them
    assert dtypes_of("all_to_all") == ({"bfloat16"}, 6)
    assert dtypes_of("psum")[0] <= {"float32", "int32"}


def test_no_gradient_of_a_weight_is_summed_over_tokens_in_bfloat16():
    """Sums are float32. (Matrix products always accumulate in float32.)"""
    sums = [
        equation
        for equation in batches.equations(traced())
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
        for e in batches.equations(traced())
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape in shapes
    ]
    assert dtypes == ["float32"] * 7
