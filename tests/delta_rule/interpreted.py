"""Context in which JAX's interpreter of GPU kernels runs those of jax-linear-attention.

The interpreter has no products from registers or inside `run_state`, and no inline code. Here
products are `jnp.dot` of bfloat16 numbers, summed in float32, and the inverses of diagonal blocks
are computed by JAX. Copies, barriers, slots, masks, decays and roundings are the kernels' own.
"""

import contextlib
import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

KERNELS = "jla.ops.mosaic_gpu"
MODULES = ("_common", "gated_delta_rule_kernels", "gated_delta_rule_bwd", "scalar_gate_fused")


class Accumulator:
    """Sum of products that stay in registers."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, index):
        return self.value


class AccumulatorType:
    """Shape of an accumulator."""

    def __init__(self, shape, dtype=jnp.float32):
        self.shape = shape

    @staticmethod
    def init(value):
        return value


class Patched:
    """A module with other attributes."""

    def __init__(self, module, **attributes):
        self.__dict__.update(attributes, module=module)

    def __getattr__(self, name):
        return getattr(self.module, name)


def read(x):
    """Values of registers or of a reference to shared memory."""
    is_reference = isinstance(x, plgpu.RefType | pl.MemoryRef) or "Ref" in str(
        getattr(x, "aval", "Ref")
    )
    x = plgpu.load(x, layout=plgpu.Layout.WGMMA) if is_reference else x
    return x.astype(jnp.float32)


def multiply(accumulator, a, b):
    accumulator.value += jnp.dot(read(a), read(b), precision="highest")


def run_state(body):
    def run(initial):
        accumulators = jax.tree.map(Accumulator, initial)
        body(accumulators)
        return jax.tree.map(lambda x: x.value, accumulators)

    return run


def run_scoped(body, *types, **named):
    if types and all(isinstance(each, AccumulatorType) for each in types):
        return body(*(Accumulator(jnp.zeros(each.shape)) for each in types))
    return pl.run_scoped(body, *types, **named)


def invert_diagonal_blocks(neg_a_t, *_):
    """(I + A)^-1 for the diagonal blocks of 16 x 16; zero elsewhere."""
    block = jnp.arange(len(neg_a_t)) // 16
    a = jnp.where(block[:, None] == block[None], -neg_a_t.T, 0)
    eye = jnp.eye(len(a))
    inverse = eye - a
    for _ in range(3):  # powers of A above the 15th are 0
        a = jnp.dot(a, a, precision="highest")
        inverse = jnp.dot(inverse, eye + a, precision="highest")
    return inverse


@contextlib.contextmanager
def interpret_kernels():
    load = lambda name: importlib.import_module(f"{KERNELS}.{name}")
    patched_plgpu = Patched(plgpu, wgmma=multiply, ACC=AccumulatorType)
    patched_pl = Patched(pl, run_state=run_state, run_scoped=run_scoped)
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.setattr(load(name), "plgpu", patched_plgpu)
            patch.setattr(load(name), "pl", patched_pl)
        kernels = load("gated_delta_rule_kernels")
        patch.setattr(kernels, "_diag_block_inverse", invert_diagonal_blocks)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
