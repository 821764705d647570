"""What a measurement depends on: python -m scripts.bench.machine prints it, or what keeps JAX from an NVIDIA GPU (exit 2)."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parents[2]


def main() -> int:
    """The command."""
    problem = missing()
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
        **versions(),
        "cudnn_loaded": loaded and ".".join(map(str, loaded)),
        **{name: _installed(name) for name in ("torch", "transformers", "pytest")},
        "commit": commit(),
    }
    for name, value in facts.items():
        print(f"{name:<12} {value or 'unknown'}")
    return 0


def missing() -> str | None:
    """What this process lacks to run JAX on an NVIDIA GPU; None if it does."""
    try:
        import jax

        from jaxsp.runtime import hardware
    except ModuleNotFoundError as error:
        return f"Python has no {error.name}. Install what jaxsp needs: pip install -e '.[cuda13,test]'."
    if not hardware.count_gpus({}):
        return "There is no NVIDIA GPU here: /dev/nvidia0 is missing. Use a machine with one."
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        return f"JAX cannot use the GPU here: {' '.join(str(error).split())}. Install jax[cuda13], or jax[cuda12]."
    if not device.device_kind.startswith("NVIDIA"):
        platforms = jax.config.jax_platforms
        return f"JAX uses {device.device_kind}, not the NVIDIA GPU here: JAX_PLATFORMS = {platforms}. Use JAX_PLATFORMS=cuda."
    return None


def versions() -> dict[str, str | None]:
    """Versions of driver and libraries; None for what is not here."""
    driver = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "driver": driver and driver.splitlines()[0],
        "cuda": _installed("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
        "cudnn": _installed("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "jax": _installed("jax"),
        "jaxlib": _installed("jaxlib"),
        "cuda_plugin": _installed("jax-cuda13-plugin", "jax-cuda12-plugin"),
        "python": sys.version.split()[0],
    }


def cpu() -> str:
    """The processor's name, as far as the system tells, and how many cores this process may use."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str | None:
    """The commit that is checked out, with a word if files differ from it; None where this is no git repository."""
    head = _printed("git", "rev-parse", "--short=12", "HEAD")
    # results of earlier checks are changes, but not of what is measured
    differing = _printed(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!scripts/bench/*.md"
    )
    return head and head + "-changed" * bool(differing)


def write(
    path: pathlib.Path, module: str, arguments: Sequence[str], packages: Sequence[str], **found: Any
) -> None:
    """Writes what a benchmark of this processor found, with all that it depends on."""
    head = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *arguments]),
        "cpu": cpu(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | found, indent=1) + "\n", encoding="utf-8")


def _installed(*names: str) -> str | None:
    """Version of the first of these packages that is here."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _printed(*command: str) -> str | None:
    """What a command prints; None where there is no such command, or it fails, or prints nothing."""
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
