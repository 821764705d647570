"""Explains errors of XLA's allocator, which uses CUDA's virtual memory management from jax 0.11 on.

Not on all machines: WSL2 fails with arrays of 4 GiB and more, such as the memory that JAX allocates
at start (openxla/xla issue 48979), and fractional vGPUs do not have it (issue 49252).
"""

from jaxsp.processes import hardware

_NO_DEVICE = "no supported devices found for platform CUDA"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")


def explain(error: BaseException) -> str | None:
    """Message for an error that another allocator may avoid; None for other errors."""
    import jax

    text = str(error)
    if jax.__version_info__ < (0, 11):
        return None
    if _NO_DEVICE in text:
        cause = "a fractional vGPU does not have. Install jax 0.10.1 (Python 3.11)"
        if jax.__version_info__ >= (0, 12):
            cause += ", or set XLA_FLAGS=--xla_gpu_experimental_vmm_disabled=true"
    elif hardware.is_wsl() and any(name in text for name in _OUT_OF_MEMORY):
        cause = (
            "WSL2 limits to allocations of less than 4 GiB. Set "
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, or install jax 0.10.1 (Python 3.11)"
        )
    else:
        return None
    return (
        f"{text.splitlines()[0]} A possible cause: jax {jax.__version__} allocates memory of GPUs "
        f"with CUDA's virtual memory management, which {cause}."
    )
