"""Settings of all tests: eight virtual CPU devices, no network, private caches, warnings as errors, four tiers.

Tiers, by marker (pyproject.toml): default, `e2e`, `slow`, `gpu`.

- `python -m pytest` runs the default tier, in one process per core (at most 4).
- Files and tests named on the command line run in this process, whatever their tier, except that
  `slow` tests of a file must be named or selected with `-m`.
- `scripts/check.sh` runs default and `e2e`, `scripts/check.sh --all` everything.
- A test without a marker must take at most 10 s (`LIMIT_S`); otherwise it fails.

`JAX_PLATFORMS=cuda python -m pytest` runs the same tests on an accelerator, and `python -m pytest
tests/gpu` takes the NVIDIA GPU where there is one. Imports nothing from jaxsp, so that pytest's
jaxtyping hook (pyproject.toml) is there first and checks the shapes and dtypes of every annotated
function.
"""

import gc
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


GPU_TESTS = pathlib.Path(__file__).parent / "gpu"

TIERS = ("e2e", "slow", "gpu")
"""Markers of the tests that `python -m pytest` leaves out."""

LIMIT_S = 10
"""Seconds that a test without a marker may take, with its fixtures."""

MAX_WORKERS = 4
"""Test processes that are started without `-n`. Each needs 1 GB."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Chooses tests and the number of processes where the command line does not."""
    if hasattr(config, "workerinput"):
        return
    paths = _paths(config)
    is_named = all(path.is_file() or path.is_relative_to(GPU_TESTS) for path in paths)
    is_selected = any(word.startswith("-m") for word in map(str, config.invocation_params.args))
    if is_named and not is_selected:
        has_ids = all("::" in word for word in config.args)
        in_gpu = all(path.is_relative_to(GPU_TESTS) for path in paths)
        config.option.markexpr = "" if has_ids or in_gpu else "not slow"
    is_parallel = config.pluginmanager.hasplugin("xdist") and not config.getoption("usepdb")
    if is_parallel and not is_named and config.option.numprocesses is None:
        config.option.numprocesses = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        config.option.dist = "loadfile"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    choose_platform(gpu_if_there=all(path.is_relative_to(GPU_TESTS) for path in _paths(config)))


def _paths(config: pytest.Config) -> list[pathlib.Path]:
    """Files and folders that tests are collected from."""
    return [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = _clocks()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    elapsed = [now - started for now, started in zip(_clocks(), item.stash[_STARTED], strict=True)]
    if min(elapsed) > LIMIT_S and not any(item.get_closest_marker(tier) for tier in TIERS):
        pytest.fail(
            f"took {min(elapsed):.0f} s. Make it faster, or mark it e2e or slow.", pytrace=False
        )
    return result


_STARTED = pytest.StashKey[tuple[float, float]]()


def _clocks() -> tuple[float, float]:
    """Elapsed time, and processor time of this process and its children; a busy machine adds to the first only."""
    times = os.times()
    return times.elapsed, times.user + times.system + times.children_user + times.children_system


def choose_platform(*, gpu_if_there: bool) -> None:
    """Settles where JAX runs, here and in the processes that tests start, before it looks for devices."""
    from jaxsp.runtime import hardware

    os.environ.setdefault(
        "JAX_PLATFORMS", "cuda" if gpu_if_there and hardware.count_gpus(os.environ) else "cpu"
    )
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if os.environ["JAX_PLATFORMS"] != "cpu":
        # tests start processes on the same GPU, of which the first would take three quarters
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    # Compiling is most of what the tests do: a step takes 1.4 s of CPU with these instead of 6.2 (jax 0.10.1, 2 cores)
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append(
            "--xla_cpu_use_fusion_emitters=false"
        )  # later versions know no such flag, and end the process over it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@pytest.fixture(scope="module", autouse=True)
def cleared_caches() -> Iterator[None]:
    """Compiled programs of a file are freed at its end: 2 GB of memory in each process otherwise."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def hearing() -> Iterator[None]:
    """Commands in the background of a shell, and of nohup, are begun deaf to these; processes begun here shall not be."""
    deaf = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in deaf:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module")
def small_shards() -> Iterator[None]:
    """Shards all weights of at least 100 elements, as large models do, instead of 65,536."""
    from jaxsp.training import sharding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARDED_SIZE", 100)
        yield
