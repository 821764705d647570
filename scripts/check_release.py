"""Checks the installed release of JAX without a GPU: a plan, and the programs of the self-check.

    python -m scripts.check_release 0.11.2

Plans a packed step of Llama-3.1-8B on 8 H100s with `jaxsp plan`, and compiles, for an
H100, the programs that training runs before its first step. Prints one line with the release,
the time and memory of the plan, and a verdict. `scripts/check.sh --releases` calls this for each
supported release.

Exit code: 0 if the release passes, 1 if not.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.ring import Ring
from jaxsp.attention.selection import KERNELS
from jaxsp.attention.strategy import combine
from jaxsp.planning import absent
from jaxsp.run import selfcheck
from scripts.bench import configs, machine

RECIPE = "configs/llama31_8b_128k_8xh100.yaml"

DEFAULTS = {
    "kernel": "cudnn",
    "heads": (8, 2),
    "head_dim": 128,
    "score": ScoreConfig(),
    "settings": KernelSettings(),
    "strategy": combine(1),
}

CHUNKS = KernelSettings(head_chunks=2)
RING = combine(1, Ring(degree=1))
ALL_GATHER = combine(1, AllGather(degree=1))

ATTENTION: dict[str, dict[str, Any]] = {
    "packed": {"max_segments": 64, "settings": CHUNKS},
    "packed, window": {"max_segments": 64, "score": ScoreConfig(window=4096)},
    "packed, window, blockwise": {
        "max_segments": 64,
        "score": ScoreConfig(window=4096),
        "kernel": "blockwise",
    },
    "packed, ring": {
        "max_segments": 64,
        "settings": CHUNKS,
        "strategy": RING,
    },
    "packed, all-gather": {
        "max_segments": 64,
        "strategy": ALL_GATHER,
    },
    "one document": {"max_segments": 1, "settings": CHUNKS},
    "one document, blockwise": {"max_segments": 1, "kernel": "blockwise"},
    "one document, window": {"max_segments": 1, "score": ScoreConfig(window=4096)},
    "one document, ring": {"max_segments": 1, "strategy": RING},
    "one document, all-gather": {
        "max_segments": 1,
        "strategy": ALL_GATHER,
    },
}
"""Arguments of the self-check's programs, other than DEFAULTS."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check_release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", help="release of JAX; must be the installed one")
    release = parser.parse_args(arguments).release
    jax.config.update("jax_platforms", "cpu")
    began = time.perf_counter()
    try:
        plan = plan_recipe()
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        print(f"jax {jax.__version__}: FAILED: jaxsp plan ended with exit code {error.returncode}")
        return 1
    plan_s = time.perf_counter() - began
    problems = find_problems(plan, release=release)
    began = time.perf_counter()
    for name in ATTENTION:
        try:
            compile_selfcheck(name)
        except jax.errors.JaxRuntimeError as error:
            problems.append(f"self-check, {name}: {str(error).splitlines()[0][:300]}")
    compile_s = time.perf_counter() - began
    verdict = f"FAILED: {'; '.join(problems)}" if problems else "ok"
    print(
        f"jax {jax.__version__}: plan {plan_s:.0f} s, "
        f"{plan['device_gib']:.2f} of {plan['device_limit_gib']:.1f} GiB; "
        f"self-check {compile_s:.0f} s, {len(ATTENTION)} programs: {verdict}"
    )
    return 1 if problems else 0


def plan_recipe() -> dict[str, Any]:
    """Returns what `jaxsp plan` writes for RECIPE.

    Raises: CalledProcessError if it fails.
    """
    model = [
        "model.source=null",
        "model.tokenizer=bytes",
        f"model.config={json.dumps(configs.LLAMA_8B)}",
    ]
    with tempfile.TemporaryDirectory(prefix="jaxsp-release-") as folder:
        file = pathlib.Path(folder) / "plan.json"
        command = [sys.executable, "-m", "jaxsp", "plan", RECIPE, *model, "--json", str(file)]
        subprocess.run(command, cwd=machine.REPO, capture_output=True, text=True, check=True)
        return json.loads(file.read_text(encoding="utf-8"))


def find_problems(plan: Mapping[str, Any], *, release: str) -> list[str]:
    """Returns the problems of a plan, which should fit and be made with this release of JAX."""
    problems = []
    if plan["jax_version"] != release:
        problems.append(f"the installed release is not {release}")
    if not plan["fits"]:
        problems.append(f"does not fit: {plan['shortage']}")
    if plan["step_s_estimate"] is None:
        problems.append("no estimate of the time of a step")
    return problems


def compile_selfcheck(name: str) -> jax.stages.Compiled:
    """Compiles a program of ATTENTION for an absent GPU.

    Raises: JaxRuntimeError if XLA cannot.
    """
    (gpu,) = absent.make_devices("h100-80gb", 1)
    options = DEFAULTS | ATTENTION[name]
    kernel = KERNELS[options.pop("kernel")]
    # The self-check compares a kernel in bfloat16 with the blockwise kernel in float32
    dtype = "bfloat16" if kernel.needs_selfcheck else "float32"
    return selfcheck.check_attention(kernel, dtype=dtype, **options).compile(gpu)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
