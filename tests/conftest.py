"""What every test runs under: eight virtual CPU devices, no network, no cache of the user's, and warnings as errors.

`JAX_PLATFORMS=cuda python -m pytest` runs the same tests on an accelerator. Imports nothing from jaxsp, so that pytest's
jaxtyping hook (pyproject.toml) is there first and checks the shapes and dtypes of every annotated function.
"""

import importlib.metadata
import os
import tempfile

import pytest

_caches = tempfile.TemporaryDirectory(prefix="jaxsp-tests-", ignore_cleanup_errors=True)

# Read when jax, datasets, transformers and huggingface_hub are imported, here and in the processes that tests start
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HOME"] = _caches.name
os.environ["HF_HUB_CACHE"] = f"{_caches.name}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{_caches.name}/datasets"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Compiling is most of what the tests do: a step takes 1.4 s of CPU with these instead of 6.2 (jax 0.10.1, 2 cores)
_flags = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _flags.append("--xla_cpu_use_fusion_emitters=false")  # later versions know no such flag, and end the process over it
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags])

import jax  # noqa: E402

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
