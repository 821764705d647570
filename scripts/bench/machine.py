"""Facts about the machine that a measurement depends on: processor, GPU, driver and versions.

`python -m scripts.bench.machine` prints them, or why JAX cannot use an NVIDIA GPU here (exit 2).
"""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

REPO = pathlib.Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the command."""
    problem = find_gpu_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    import jax

    from jaxsp.attention.kernels import cudnn_calls

    device = jax.devices()[0]
    loaded = cudnn_calls.installed_version()
    facts = {
        "device": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
        **read_gpu_versions(),
        "cudnn_loaded": loaded and ".".join(map(str, loaded)),
        **{name: find_version(name) for name in ("torch", "transformers", "pytest")},
        "commit": read_commit(),
    }
    for name, value in facts.items():
        print(f"{name:<12} {value or 'unknown'}")
    return 0


def find_gpu_problem() -> str | None:
    """Returns the reason that this process cannot run JAX on an NVIDIA GPU; None if it can."""
    try:
        import jax

        from jaxsp.system import hardware
    except ModuleNotFoundError as error:
        return f"Python has no {error.name}. Install jaxsp: pip install -e '.[cuda13,test]'."
    if not hardware.count_gpus({}):
        return "There is no NVIDIA GPU here: /dev/nvidia0 is missing. Use a machine with one."
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        return f"JAX cannot use the GPU here: {reason}. Install jax[cuda13], or jax[cuda12]."
    if not device.device_kind.startswith("NVIDIA"):
        return (
            f"JAX uses {device.device_kind}, not the NVIDIA GPU here: "
            f"JAX_PLATFORMS = {jax.config.jax_platforms}. Use JAX_PLATFORMS=cuda."
        )
    return None


def read_gpu_versions() -> dict[str, str | None]:
    """Versions of the driver and of libraries; None for those that are not installed."""
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "driver": driver and driver.splitlines()[0],
        "cuda": find_version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
        "cudnn": find_version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "jax": find_version("jax"),
        "jaxlib": find_version("jaxlib"),
        "cuda_plugin": find_version("jax-cuda13-plugin", "jax-cuda12-plugin"),
        "python": platform.python_version(),
    }


def read_cpu_versions(*packages: str) -> dict[str, str | None]:
    """Processor, number of usable cores, and versions of Python and packages."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return {
        "cpu": f"{name}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        **{package: find_version(package) for package in packages},
    }


def read_commit() -> str | None:
    """Returns the commit, with `-changed` if files differ from it; None outside of a checkout."""
    head = _run("git", "rev-parse", "--short=12", "HEAD")
    # lines that earlier checks added to LOG.md do not change what is measured
    changes = _run(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!scripts/bench/*.md"
    )
    return f"{head}-changed" if head and changes else head


def find_version(*packages: str) -> str | None:
    """Version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _run(*command: str) -> str | None:
    """Output of a command; None if it does not exist, fails, or prints nothing."""
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
