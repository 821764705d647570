"""What every test runs under: eight virtual CPU devices, no network, no cache of the user's, and warnings as errors.

`JAX_PLATFORMS=cuda python -m pytest` runs the same tests on an accelerator, and `python -m pytest tests/gpu` takes the NVIDIA
GPU where there is one. Imports nothing from jaxsp, so that pytest's jaxtyping hook (pyproject.toml) is there first and checks
the shapes and dtypes of every annotated function.
"""

import importlib.metadata
import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator

import pytest

_caches = tempfile.TemporaryDirectory(prefix="jaxsp-tests-", ignore_cleanup_errors=True)

# Read when jax, datasets, transformers and huggingface_hub are imported, here and in the processes that tests start
os.environ["HF_HOME"] = _caches.name
os.environ["HF_HUB_CACHE"] = f"{_caches.name}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{_caches.name}/datasets"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402 - the environment is set before

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    gpu_tests = pathlib.Path(__file__).parent / "gpu"
    asked = [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]
    choose_platform(gpu_if_there=all(path.is_relative_to(gpu_tests) for path in asked))


def choose_platform(*, gpu_if_there: bool) -> None:
    """Settles where JAX runs, here and in the processes that tests start, before it looks for devices."""
    from jaxsp.core import jobs

    os.environ.setdefault("JAX_PLATFORMS", "cuda" if gpu_if_there and jobs.num_gpus(os.environ) else "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if os.environ["JAX_PLATFORMS"] != "cpu":
        # tests start processes on the same GPU, of which the first would take three quarters
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    # Compiling is most of what the tests do: a step takes 1.4 s of CPU with these instead of 6.2 (jax 0.10.1, 2 cores)
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # later versions know no such flag, and end the process over it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@pytest.fixture
def hearing() -> Iterator[None]:
    """Commands in the background of a shell, and of nohup, are begun deaf to these; processes begun here shall not be."""
    deaf = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in deaf:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)
