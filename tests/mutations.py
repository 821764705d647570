"""Applies the mutations of tests/mutations.yaml, one after another, and prints which are noticed.

python -m tests.mutations            # all 40, about half an hour on 2 cores
python -m tests.mutations ring.py    # those in files whose path has this text
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import yaml

from tests.golden import __main__ as golden
from tests.golden import test_golden

TABLE = pathlib.Path(__file__).parent / "mutations.yaml"


def find_file(repo: pathlib.Path, text: str) -> pathlib.Path:
    """The only file of jaxsp that has a text, once. Raises: ValueError if there is another."""
    counts = {path: path.read_text().count(text) for path in (repo / "jaxsp").rglob("*.py")}
    found = [path for path, count in counts.items() for _ in range(count)]
    if len(found) != 1:
        raise ValueError(f"{text!r} occurs {len(found)} times")
    return found[0]


def is_noticed(repo: pathlib.Path, test: str) -> bool:
    """True if a golden case, `case: NAME`, or the tests of a file fail in a changed copy."""
    kind, _, name = test.partition(": ")
    if kind == "case":
        try:
            numbers = golden.run_checkout(repo, ["cases.py", name])[name]
        except SystemExit:
            return True
        recorded = test_golden.read_recorded()[name]
        return not all(
            golden.max_difference(_list(recorded[key]), _list(numbers[key]))
            <= test_golden.choose_tolerance(name)
            for key in recorded
        )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", test]
    run = subprocess.run(
        [*command, "-m", "not slow and not gpu"],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo)},
        capture_output=True,
    )
    return run.returncode == 1


def _list(values: Any) -> list[float]:
    return [*values.values()] if isinstance(values, dict) else values


def main() -> int:
    """Applies the mutations to a copy of the repository; exits with 1 if one is not noticed."""
    mutations = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=golden.REPO, check=True, capture_output=True, text=True)
    num_missed = 0
    with tempfile.TemporaryDirectory() as folder:
        repo = pathlib.Path(folder)
        for name in files.stdout.splitlines():
            if (golden.REPO / name).is_file():
                (repo / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(golden.REPO / name, repo / name)
        for mutation in mutations:
            file = find_file(repo, mutation["old"])
            place = file.relative_to(repo).as_posix()
            if not all(word in place for word in sys.argv[1:]):
                continue
            text = file.read_text()
            file.write_text(text.replace(mutation["old"], mutation["new"]))
            began = time.monotonic()
            noticed = next((test for test in mutation["by"] if is_noticed(repo, test)), None)
            file.write_text(text)
            num_missed += noticed is None
            seconds = time.monotonic() - began
            result = f"noticed by {noticed}" if noticed else "NOT NOTICED"
            print(f"{result} ({seconds:.0f} s)  {place}: {mutation['new']}", flush=True)
    print(f"{num_missed} are not noticed")
    return num_missed > 0


if __name__ == "__main__":
    sys.exit(main())
