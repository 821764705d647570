"""Settings of all tests: virtual CPU devices, no network, private caches, strict warnings, tiers.

Tiers, by marker (pyproject.toml): default, `e2e`, `slow`, `gpu`.

- `python -m pytest` runs the default tier, in one process per core (at most 4).
- Files and tests named on the command line run in this process, whatever their tier, except that
  `slow` tests of a file must be named or selected with `-m`.
- `scripts/check.sh` runs default and `e2e`, `scripts/check.sh --all` everything.
- A test without a marker should take at most 10 s on an idle machine. It fails after `LIMIT_S`.

`JAX_PLATFORMS=cuda python -m pytest` runs the same tests on an accelerator, and `python -m pytest
tests/gpu` uses the NVIDIA GPU if there is one. Shapes and dtypes are checked in every call of an
annotated function; the hook for it is installed before jaxsp is imported.
"""

import gc
import importlib.metadata
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

_caches = tempfile.TemporaryDirectory(prefix="jaxsp-tests-", ignore_cleanup_errors=True)

# jax, datasets, transformers and huggingface_hub read these when they are imported, here and in the
# processes that tests start
os.environ["HF_HOME"] = _caches.name
os.environ["HF_HUB_CACHE"] = f"{_caches.name}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{_caches.name}/datasets"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = f"{_caches.name}/cache"  # of compiled programs
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Without it, each process compiles 250 files of jaxsp
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax  # noqa: E402 - reads the environment that is set above
import jaxtyping  # noqa: E402 - after jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


REPO = pathlib.Path(__file__).parent.parent

# Not in all modules: it would cost 10 s in each process, and a third of the time of many tests
jaxtyping.install_import_hook(
    [
        ".".join(path.relative_to(REPO).with_suffix("").parts)
        for path in sorted(REPO.glob("jaxsp/**/*.py"))
        if "from jaxtyping import" in path.read_text(encoding="utf-8")
    ],
    "beartype.beartype",
)

GPU_TESTS = REPO / "tests" / "gpu"

TIERS = ("e2e", "slow", "gpu")
"""Markers of the tests that `python -m pytest` leaves out."""

LIMIT_S = 40
"""Seconds of wall and CPU time that a test without a marker may take, with its fixtures.

Keep tests below 20 s on an idle machine: others have taken 1.4 times as long.
"""

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
    choose_platform(prefers_gpu=all(path.is_relative_to(GPU_TESTS) for path in _paths(config)))


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
    """Elapsed time, and CPU time of this process and its children.

    On a busy machine only the first grows.
    """
    times = os.times()
    return times.elapsed, times.user + times.system + times.children_user + times.children_system


def choose_platform(*, prefers_gpu: bool) -> None:
    """Selects the platform of JAX, here and in the processes that tests start.

    Must run before JAX looks for devices.
    """
    from jaxsp.system import hardware

    has_gpu = prefers_gpu and hardware.count_gpus(os.environ) > 0
    os.environ.setdefault("JAX_PLATFORMS", "cuda" if has_gpu else "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if os.environ["JAX_PLATFORMS"] != "cpu":
        # tests start several processes on a GPU; the first would take three quarters of its memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    # Tests spend most time compiling: with these flags, a step takes 1.4 s of CPU time
    # instead of 6.2 (jax 0.10.1, 2 cores)
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # later versions do not have this flag, and end a process that uses it
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@pytest.fixture(scope="session", autouse=True)
def hidden_torch() -> None:
    """Processes that tests start do not find torch: transformers would import it, which takes 3 s.

    Users need no torch.
    """
    paths = [str(REPO / "tests/without_torch"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.fixture(scope="module", autouse=True)
def cleared_caches() -> Iterator[None]:
    """Frees the compiled programs of a file at its end, which would fill 2 GB in each process.

    What is left, such as imported modules, is not searched for garbage again: that took 1 s a file.
    """
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Restores the default actions of SIGINT and SIGHUP, also for processes that tests start.

    nohup, and shells for commands in the background, set them to be ignored.
    """
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test in its own folder, with a cache of data sets in it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Has blocks of 8 tokens in the blockwise kernel, so that short rows have several."""
    from jaxsp.attention.kernels import blockwise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "BLOCK_TOKENS", 8)
        yield


@pytest.fixture(scope="module")
def small_waits(small_shards: None) -> Iterator[None]:
    """Offloads weights of 100 elements and more, instead of 65,536."""
    from jaxsp.sharding import host_offload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
        yield


@pytest.fixture(scope="module")
def small_shards() -> Iterator[None]:
    """Shards all weights of at least 100 elements, as large models do, instead of 65,536."""
    from jaxsp.sharding import sharding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARDED_SIZE", 100)
        yield
