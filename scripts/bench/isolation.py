"""Runs a case of a benchmark in a process of its own.

Its memory starts empty, a crash does not stop the other cases, and it can be ended after a time.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from scripts.bench import machine, report

CASE_OPTION = "--case"
"""First argument of the process of a case; the case as JSON and a folder follow."""

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""XLA's error code for running out of memory."""

_RESULT_FILE = "result.json"

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


def run_isolated(module: str, case: Any, result_type: type[_Result], *, seconds: float) -> _Result:
    """Measures a case in a new process, which is ended after `seconds`.

    Args: module: its main calls `start`. result_type: has at least the fields status and message.
    """
    with tempfile.TemporaryDirectory(prefix="jaxsp-bench-") as folder:
        file = pathlib.Path(folder) / _RESULT_FILE
        words = [CASE_OPTION, json.dumps(dataclasses.asdict(case)), folder]
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *words],
                cwd=machine.REPO,
                env={**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache"},
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return result_type(status=report.TIMED_OUT, message=f"ended after {seconds:.0f} s")
        if file.exists():
            return result_type(**json.loads(file.read_text(encoding="utf-8")))
    return explain_exit(done.returncode, done.stderr, result_type)


def explain_exit(code: int, stderr: str, result_type: type[_Result]) -> _Result:
    """The result of a process that ended without one."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    exhausted = next((line for line in lines if EXHAUSTED in line), None)
    if exhausted is not None:
        return result_type(status=report.OUT_OF_MEMORY, message=exhausted)
    sys.stderr.write(stderr)
    last = lines[-1] if lines else "no output"
    return result_type(status=report.FAILED, message=f"exit code {code}: {last}")


def start(
    main: Callable[[list[str]], int],
    case_type: type[_Case],
    measure: Callable[[_Case, pathlib.Path], Any],
) -> None:
    """Runs a benchmark's command, or measures a case if this is the process of one."""
    if sys.argv[1:2] != [CASE_OPTION]:
        sys.exit(main(sys.argv[1:]))
    case, folder = sys.argv[2:]
    result = measure(case_type(**json.loads(case)), pathlib.Path(folder))
    text = json.dumps(dataclasses.asdict(result), allow_nan=False)
    pathlib.Path(folder, _RESULT_FILE).write_text(text, encoding="utf-8")
