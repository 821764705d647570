"""Kernels for experts compute what the loop over tiles does, in JAX's interpreter of GPU kernels.

The interpreter checks for races, and fills memory that nothing was written to with NaN. Nothing
here shows that a GPU computes the same: a run compares them there before the first step.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsp.core.errors import UserError
from jaxsp.experts import kernels, mosaic
from jaxsp.experts.mosaic import Groups
from jaxsp.planning import hlo
from jaxsp.run import selfcheck
from jaxsp.training.specs import make_spec
from tests import batches, messages

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax is older than 0.11.2"
)

HOPPER = types.SimpleNamespace(compute_capability="9.0")
BLACKWELL = types.SimpleNamespace(compute_capability="10.0")


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(mosaic, "_NUM_BLOCKS", 2)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


@needs_interpreter
def test_outputs_and_gradients_are_those_of_the_loop(interpreter):
    check = selfcheck.check_experts("mosaic", width=64, size=64)
    errors = check.measure_errors(jax.devices()[0])
    weights = {"dup", "dup_bias", "ddown", "ddown_a", "ddown_b"}
    assert errors.keys() == {"out", "dx", "dshares", *weights}
    assert max(errors.values()) < check.tolerance / 3, errors


@needs_interpreter
def test_products_are_summed_in_float32(interpreter):
    """With half a tile of columns, and one and a half."""
    groups = Groups(jnp.array([0, 2, 3], jnp.int32), jnp.array([1, 1, 2, 2], jnp.int32))
    draw = lambda seed, *shape: jnp.asarray(
        np.random.default_rng(seed).normal(size=shape), jnp.bfloat16
    )
    x = draw(0, 3 * 128, 64)
    matrix = draw(1, 4, 192, 64)
    dy = draw(2, 3 * 128, 192)
    dy = dy.at[2 * 128 :].set(jnp.nan)  # after the last expert's tiles
    sums = mosaic.add_products(dy, x, groups)
    y = mosaic.multiply(x, matrix, groups, is_transposed=False)
    dx = mosaic.multiply(dy, matrix, groups, is_transposed=True)
    for expert, own in ((0, slice(0, 128)), (2, slice(128, 256))):
        expected = np.float64(dy[own]).T @ np.float64(x[own])
        assert np.abs(sums[expert] - expected).max() <= 1e-6 * np.abs(expected).max()
        for actual, inputs, factor in (
            (y, x, np.float64(matrix[expert]).T),
            (dx, dy, np.float64(matrix[expert])),
        ):
            expected = np.float64(inputs[own]) @ factor
            error = np.abs(np.float64(actual[own]) - expected).max()
            assert error <= 2**-8 * np.abs(expected).max()  # one rounding to bfloat16
    assert not np.any(sums[jnp.array([1, 3])])


def test_the_kernel_is_chosen_by_device_dims_dtype_and_release(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    fitting = {"dims": (2048, 768), "dtype": "bfloat16", "devices": [HOPPER]}
    assert kernels.choose("auto", **fitting) == kernels.choose("mosaic", **fitting) == "mosaic"
    assert kernels.choose("xla", **fitting) == "xla"
    for change, part in (
        ({"dims": (2048, 100)}, "multiples of 64, and experts have 2048 x 100"),
        ({"dtype": "float32"}, "model.compute_dtype=bfloat16"),
        ({"devices": [HOPPER, BLACKWELL]}, "Hopper GPUs"),
        ({"devices": jax.devices()[:1]}, "Hopper GPUs"),
    ):
        assert kernels.choose("auto", **fitting | change) == "xla"
        with pytest.raises(UserError, match=messages.containing(part, "experts_kernel=auto")):
            kernels.choose("mosaic", **fitting | change)
    config = batches.make_config(compute_dtype="bfloat16").step.change(experts_kernel="mosaic")
    with pytest.raises(UserError, match="Hopper GPUs"):
        make_spec(config, batches.expert_model(), devices=jax.devices()[:1])
    with pytest.raises(UserError, match="experts_kernel = mosaic: the model has no experts"):
        make_spec(config, batches.model(), devices=jax.devices()[:1])
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    with pytest.raises(UserError, match=r"jax 0\.11\.1 or later"):
        kernels.choose("mosaic", **fitting)


def test_products_of_the_kernels_are_counted():
    """Those of places with matrices, and of places with places: 2 * P * i * o."""
    text = """HloModule test

ENTRY %main (e: s32[8], x: bf16[1024,64], w: bf16[4,192,64]) -> f32[4,192,64] {
  %e = s32[8]{0} parameter(0)
  %x = bf16[1024,64]{1,0} parameter(1)
  %w = bf16[4,192,64]{2,1,0} parameter(2)
  %y = bf16[1024,192]{1,0} custom-call(%e, %e, %x, %w), custom_call_target="mosaic_gpu_v2"
  ROOT %s = f32[4,192,64]{2,1,0} custom-call(%e, %e, %y, %x), custom_call_target="mosaic_gpu_v2"
}
"""
    first, second = hlo.read_kernel_costs(text)
    assert first.flops == second.flops == 2 * 1024 * 64 * 192
    assert first.efficiency < 1
