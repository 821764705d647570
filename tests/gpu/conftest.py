"""Tests that need an NVIDIA GPU; without one, each is skipped with the reason.

`python -m pytest tests/gpu` uses the GPU if there is one (tests/conftest.py), and
`JAX_PLATFORMS=cuda python -m pytest tests/gpu` requires it. These tests are skipped in a run of the
whole suite, which uses the CPU.
"""

import functools

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> jax.Device:
    """The GPU that JAX uses in this process; every test of this folder needs it."""
    reason = _find_gpu_problem()
    if reason is not None:
        pytest.skip(reason)
    return jax.devices()[0]


@functools.cache
def _find_gpu_problem() -> str | None:
    from scripts.bench import machine

    return machine.find_gpu_problem()
