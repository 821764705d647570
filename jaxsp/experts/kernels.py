"""Kernels for experts, and the choice of one.

A kernel is a module with a function `apply`, as in `tiled`, and a line here.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsp.core.errors import UserError

_MODULES = {"mosaic": "jaxsp.experts.mosaic", "xla": "jaxsp.experts.tiled"}

_MIN_RELEASE = (0, 11, 1)
"""First release of jax with the arguments that the Mosaic kernels use."""

_DIM_MULTIPLE = 64
"""Divisor of a matrix's dims in the Mosaic kernels."""


def find(name: str) -> Callable[..., Any]:
    """Function of a kernel, by its name: see `tiled.apply`."""
    return importlib.import_module(_MODULES[name]).apply


def choose(requested: str, *, dims: Sequence[int], dtype: str, devices: Sequence[Any]) -> str:
    """Name of the kernel of a run.

    Args:
        requested: see `hf.model_source.ModelSourceConfig.experts_kernel`.
        dims: those of experts' matrices.
        devices: present or absent ones.
    """
    if requested == "xla":
        return requested
    problems = []
    if any(getattr(device, "compute_capability", "") != "9.0" for device in devices):
        problems.append("Hopper GPUs (H100, H200, GH200)")
    if dtype != "bfloat16":
        problems.append("model.compute_dtype=bfloat16")
    if any(dim % _DIM_MULTIPLE for dim in dims):
        problems.append(
            f"matrices whose dims are multiples of {_DIM_MULTIPLE}, and experts have "
            f"{' x '.join(map(str, dims))}"
        )
    if jax.__version_info__ < _MIN_RELEASE:
        release = ".".join(map(str, _MIN_RELEASE))
        problems.append(f"jax {release} or later, and this is {jax.__version__}")
    if requested == "mosaic" and problems:
        raise UserError(
            f"model.experts_kernel = mosaic: needs {problem}. Use model.experts_kernel=auto."
            for problem in problems
        )
    return "xla" if problems else "mosaic"
