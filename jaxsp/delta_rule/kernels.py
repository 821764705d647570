"""Kernels of the gated delta rule, and the choice of one.

A kernel is a module with a function `compute`, as in `delta_rule`, and a line here.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxsp.core.errors import UserError

_MODULES = {"jla": "jaxsp.delta_rule.hopper", "xla": "jaxsp.delta_rule.delta_rule"}

_PACKAGE = "jax-linear-attention"

_TESTED_PACKAGE = "0.1.0"

_TESTED_JAX = ((0, 11, 2), (0, 12))
"""First tested release of jax, and the last tested series."""

_SIZES = (64, 128)
"""Sizes of keys and values that the kernels of jax-linear-attention support."""


def find(name: str) -> Callable[..., Array]:
    """Function of a kernel, by its name: see `delta_rule.compute`."""
    return importlib.import_module(_MODULES[name]).compute


def choose(requested: str, *, sizes: Sequence[int], dtype: str, devices: Sequence[Any]) -> str:
    """Name of the kernel of a run.

    Args:
        requested: see `hf.model_source.ModelSourceConfig.delta_net_kernel`.
        sizes: those of keys and values.
        dtype: compute dtype.
        devices: present or absent ones.
    Raises: UserError if the requested kernel cannot run.
    """
    if requested == "xla":
        return requested
    problems = list(_find_problems(sizes, dtype, devices))
    if requested == "jla" and problems:
        raise UserError(
            f"model.delta_net_kernel = jla: needs {problem}. Use model.delta_net_kernel=auto."
            for problem in problems
        )
    return "xla" if problems else "jla"


def _find_problems(sizes: Sequence[int], dtype: str, devices: Sequence[Any]) -> Iterator[str]:
    """Yields what the kernels of jax-linear-attention need and do not have here."""
    if any(getattr(device, "compute_capability", "") != "9.0" for device in devices):
        yield "Hopper GPUs (H100, H200, GH200)"
    if dtype != "bfloat16":
        yield "model.compute_dtype=bfloat16"
    if any(size not in _SIZES for size in sizes):
        yield f"keys and values of 64 or 128, and the model has {' and '.join(map(str, sizes))}"
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if version != _TESTED_PACKAGE:
        yield f"{_PACKAGE} {_TESTED_PACKAGE}, which is {version} (pip install jaxsp[hopper])"
    first, last = _TESTED_JAX
    if not first <= jax.__version_info__ or jax.__version_info__[:2] > last:
        first_text, last_text = (".".join(map(str, release)) for release in _TESTED_JAX)
        yield f"jax from {first_text} to {last_text}, and this is {jax.__version__}"
