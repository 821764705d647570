"""Products of linear layers in 8-bit floats."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks import float8
from jaxsp.blocks.config import Lora
from jaxsp.core.errors import UserError
from jaxsp.run import resume, selfcheck
from jaxsp.training import step_descriptions
from tests import batches, messages
from tests.training import runs

T = 24
I = 64
O = 48


def draw_inputs(weight_dtype="bfloat16"):
    return draw(T, I), draw(O, I, dtype=weight_dtype), draw(T, O)


def draw(*shape, dtype="bfloat16"):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


@functools.partial(jax.jit, static_argnames="is_gradient_float8")
def run(x, weight, dy, is_gradient_float8=False):
    multiply = functools.partial(float8.multiply, is_gradient_float8=is_gradient_float8)
    y, pull = jax.vjp(multiply, x, weight)
    return y, *pull(dy)


def error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def test_products_and_gradients_are_those_of_floats_except_for_rounding():
    """e4m3 has 3 bits of mantissa: both factors are off by up to 6 %, at random."""
    x, weight, dy = draw_inputs("float32")
    y, dx, dweight = run(x, weight, dy)
    x64, weight64, dy64 = (np.asarray(a, np.float64) for a in (x, weight, dy))
    assert 0.01 < error(y, x64 @ weight64.T) < 0.05
    assert 0.01 < error(dx, dy64 @ weight64) < 0.05
    assert error(dweight, dy64.T @ x64) < 1e-6, "not in 8 bits"
    assert (y.dtype, dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("scale", [1e-3, 1, 2**20])
def test_gradients_of_matrices_in_8_bits_have_the_scales_of_tokens(scale):
    """A token's part of the gradient is as exact as others, however large its x and dy are, and
    tokens without a gradient change nothing."""
    x, weight, dy = draw_inputs("float32")
    scales = jnp.exp2(jnp.arange(T) % 7).astype(x.dtype)[:, None]
    x = (x * scales).at[0].multiply(scale)
    dy = (dy / scales).at[0].divide(scale)
    *_, dweight = run(x, weight, dy, is_gradient_float8=True)
    x64, dy64 = (np.asarray(a, np.float64) for a in (x, dy))
    assert 0.01 < error(dweight, dy64.T @ x64) < 0.05
    assert dweight.dtype == jnp.float32
    zeros = jnp.zeros((8, 1), x.dtype)
    padded = [jnp.concatenate([a, a[:8] * factor]) for a, factor in ((x, zeros + 9), (dy, zeros))]
    *_, same = run(padded[0], weight, padded[1], is_gradient_float8=True)
    np.testing.assert_allclose(same, dweight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1, 448, 1e30])
def test_a_token_of_any_size_has_its_own_scale(scale):
    """Results of a token do not depend on other tokens, not even in the last bit."""
    x, weight, dy = draw_inputs()
    y, dx, _ = run(x.at[0].multiply(scale), weight, dy.at[0].multiply(scale))
    plain_y, plain_dx, _ = run(x, weight, dy)
    np.testing.assert_array_equal(y[1:], plain_y[1:])
    np.testing.assert_array_equal(dx[1:], plain_dx[1:])
    assert error(y[0].astype(jnp.float32) / scale, plain_y[0]) < 0.06


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    x, weight, dy = draw_inputs()
    y, *_ = run(x.at[0].set(0).at[1, 3].set(jnp.nan).at[2, 3].set(jnp.inf), weight, dy)
    assert (y[0] == 0).all()
    assert not np.isfinite(np.asarray(y[1:3], np.float32)).any()
    assert np.isfinite(np.asarray(y[3:], np.float32)).all()


def test_gpus_without_such_products_are_refused():
    def device(capability):
        return types.SimpleNamespace(
            platform="gpu", compute_capability=capability, device_kind="NVIDIA A100"
        )

    with pytest.raises(UserError, match=messages.containing("float8", "A100", "Hopper")):
        float8.check_devices([device("8.0")])
    for capability in ("8.9", "9.0", "12.0"):
        float8.check_devices([device(capability)])


def test_the_self_check_passes_correct_products_and_refuses_wrong_ones(monkeypatch):
    for name in ("float8", "float8_all"):
        check = selfcheck.check_float8(64, 96, name=name)
        check.run(jax.devices()[0])

    def share_a_scale(x):
        scale = float8.choose_scale(jnp.max(jnp.abs(x.astype(jnp.float32))))
        return float8.encode(x, scale), scale

    monkeypatch.setattr(float8, "_quantize", share_a_scale)
    with pytest.raises(UserError, match=messages.containing("model.linear_dtype", "out", "dx")):
        check.run(jax.devices()[0])


def test_a_model_without_such_products_is_refused():
    float8.check_model(64)
    with pytest.raises(UserError, match=messages.containing("model.linear_dtype", "60", "16")):
        float8.check_model(60)


def test_the_matrices_with_such_products_are_counted():
    def describe(model):
        spec = runs.make_spec({}, model=dataclasses.replace(model, linear_dtype="float8"))
        return step_descriptions.describe_weights(spec)

    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    assert "(14 matrices multiplied in float8)" in describe(batches.model(**sizes))
    text = describe(batches.model(**sizes | {"intermediate_size": 100}))
    assert "(8 matrices" in text
    assert "6 whose dims are not multiples of 16 in float32" in text
    text = describe(batches.expert_model())  # it has 60 hidden dims
    assert re.search(messages.containing("(0 matrices", 16, "and experts in float32"), text)


def test_runs_may_resume_with_other_products():
    model = batches.model(linear_dtype="float8")
    assert resume.describe_model(model) == resume.describe_model(batches.model())


LORA = Lora(rank=4, scale=2.0, targets=("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))
DORA = dataclasses.replace(LORA, is_dora=True)
TILES = {"mlp_tile_tokens": 5, "loss_tile_tokens": 7, "remat": "full"}
HOST = {"offload_optimizer": "state_and_gradients", "offload_activations": "layer_inputs"}
HOST |= {"offload_every": 2, "offload_during_attention": "always"}
CASES = {
    "all weights": (None, 4, 7, {(1, 1, 1): {}, (1, 2, 4): TILES, (2, 2, 2): {}}),
    "adapters": (LORA, 8, 7, {(1, 1, 1): {}, (1, 8, 1): {}, (1, 2, 4): TILES}),
    "gradients of matrices": (None, 4, 7, {(1, 1, 1): {}, (1, 2, 4): TILES, (1, 8, 1): {}}),
    # The norms of three matrices are needed, not of their codes
    "adapters with magnitudes": (DORA, 8, 4, {(1, 1, 1): {}, (1, 1, 8): {}}),
    "host memory": (None, 4, 7, {(1, 1, 1): {}, (1, 2, 4): TILES | HOST}),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_do_not_depend_on_the_mesh(name, small_shards):
    """In float32; a value that is rounded the other way on another mesh is the largest error. The
    reference has whole matrices, and quantizes them where they are multiplied."""
    lora, num_heads, num_scaled, meshes = CASES[name]
    if not all(map(runs.works_here, meshes.values())):
        pytest.skip("needs host memory")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": num_heads, "head_dim": 16}
    plain = batches.model(lora=lora, **sizes)
    linear_dtype = "float8_all" if name == "gradients of matrices" else "float8"
    model = dataclasses.replace(plain, linear_dtype=linear_dtype)
    weights = runs.draw_weights(model)
    (loss, _), _ = runs.compile_reference(model)(weights, runs.ROWS)
    (plain_loss, _), _ = runs.compile_reference(plain)(weights, runs.ROWS)
    assert 1e-5 < abs(loss / float(plain_loss) - 1) < 0.02, "products are in 8 bits"
    expected = None
    for mesh, memory in meshes.items():
        run = runs.compile_in_thread(
            mesh,
            rows_per_microbatch=4 // mesh[0] if mesh[1] == 1 else 1,
            model=model,
            config=batches.make_config(memory=memory, adapter=lora and {"type": "lora"}),
            functions=("gradients",),
        ).result()
        assert sum(param.is_float8 for param in jax.tree.leaves(run.spec.table)) == num_scaled
        if mesh != (1, 1, 1):
            assert re.search(r" = \(?u8\[\S* all-gather", run.gradients.as_text()), "of codes"
        gradients, sums = run.gradients(run.state(weights).master, run.rows(runs.ROWS))
        assert abs(float(sums["loss"]) / loss - 1) < 1e-5
        gradients = run.unpad(gradients)
        expected = expected or gradients
        for leaf, gradient in gradients.items():
            assert batches.relative_error(gradient, expected[leaf]) < 1e-3, (mesh, leaf)
