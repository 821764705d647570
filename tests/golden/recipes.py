"""Lowers the steps of the recipes in configs/ for absent GPUs, as `jaxsp plan` does.

This file needs only the command line of jaxsp, so that it also runs other commits:

    PYTHONPATH=CHECKOUT python tests/golden/recipes.py RESULTS.json lower|compile [RECIPE ...]

`lower` stops before XLA compiles, and writes the text of the first candidate of each step.
`compile` plans the step, and writes memory, collectives and estimated time.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import jax

import jaxsp

PLANNED = ("device_gib", "host_gib", "sent_bytes", "collectives", "step_s_estimate")


class _LoweredError(BaseException):
    """Ends a plan before its step is compiled."""


def list_recipes() -> list[pathlib.Path]:
    """Configs of the checkout with a published model."""
    return sorted(pathlib.Path(jaxsp.__file__).parents[1].glob("configs/*xh100.yaml"))


def plan(recipe: pathlib.Path, *, is_compiled: bool) -> dict[str, Any]:
    """Text of the step of a recipe, or facts of its plan."""
    from jaxsp.__main__ import main

    texts: list[str] = []
    compile_lowered = jax.stages.Lowered.compile

    def stop(lowered: jax.stages.Lowered, **options: Any) -> Any:
        chosen = options.get("compiler_options") or {}
        kept = sorted(item for item in chosen.items() if tempfile.gettempdir() not in str(item[1]))
        texts.append(f"{kept}\n{lowered.as_text()}")
        if is_compiled:
            return compile_lowered(lowered, **options)
        raise _LoweredError

    with tempfile.TemporaryDirectory() as folder:
        plan_file = pathlib.Path(folder, "plan.json")
        arguments = sys.argv
        sys.argv = ["jaxsp", "plan", str(recipe), "--json", str(plan_file)]
        jax.stages.Lowered.compile = stop
        try:
            main()
        except _LoweredError:
            return {"text": texts[0]}
        except SystemExit as exit_:
            if exit_.code:  # such as a recipe that needs a later release of JAX
                return {"exit code": exit_.code}
        finally:
            sys.argv = arguments
            jax.stages.Lowered.compile = compile_lowered
        facts = json.loads(plan_file.read_text(encoding="utf-8"))
    facts = facts[0] if isinstance(facts, list) else facts
    return {name: facts[name] for name in PLANNED}


if __name__ == "__main__":
    results, mode, *names = sys.argv[1:]
    recipes = [path for path in list_recipes() if not names or path.stem in names]
    plans = {path.stem: plan(path, is_compiled=mode == "compile") for path in recipes}
    pathlib.Path(results).write_text(json.dumps(plans), encoding="utf-8")
