"""Tests that need an NVIDIA GPU; where JAX has none, each is skipped with a reason that names what is missing.

`python -m pytest tests/gpu` runs on the GPU where there is one (tests/conftest.py chooses it), `JAX_PLATFORMS=cuda python -m
pytest tests/gpu` always asks for it. In a run of the whole suite, which uses the CPU, these tests are skipped.
"""

import functools

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> jax.Device:
    """The GPU that JAX uses in this process; every test of this folder asks for it."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)
    return jax.devices()[0]


@functools.cache
def _missing() -> str | None:
    from scripts.bench import machine

    return machine.missing()
