"""Compares two commits on this machine: numbers of short runs, or compiled steps of the recipes.

python -m tests.golden COMMIT            # this working tree against a commit, bit for bit
python -m tests.golden COMMIT COMMIT
python -m tests.golden --recipes lower COMMIT      # text of the lowered steps
python -m tests.golden --recipes compile COMMIT    # memory, collectives and time of compiled ones
python -m tests.golden --record          # writes tests/golden/values.json, for the pinned JAX
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

VALUES = pathlib.Path(__file__).parent / "values.json"

REPO = pathlib.Path(__file__).parents[2]

Results = dict[str, dict[str, Any]]
"""Values of each case or recipe, by kind."""

TOLERANCES = {"device_gib": 0.1, "step_s_estimate": 0.01}
"""Differences of compiled recipes that are none: GiB, and a fraction of the seconds."""


def run_checkout(checkout: pathlib.Path, words: list[str]) -> Results:
    """Results of a checkout, computed in a process of its own.

    Args: words: file of this folder that computes them, and its arguments after the results' file.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        paths = [str(checkout), str(REPO / "tests/without_torch")]  # importing torch takes 5 s
        environment = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": folder}
        script = str(pathlib.Path(__file__).with_name(words[0]))
        run = subprocess.run(
            [sys.executable, script, str(results), *words[1:]],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            sys.exit(f"{checkout}: {' '.join(words)} failed:\n{run.stdout}")
        return json.loads(results.read_text(encoding="utf-8"))


def run_commit(commit: str, words: list[str]) -> Results:
    """Results of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder, "checkout")
        git = ["git", "-C", str(REPO), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            return run_checkout(checkout, words)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def compare(before: Results, after: Results) -> Iterator[str]:
    """Differences of results, one line for each case and kind of value."""
    for name in [*before, *(name for name in after if name not in before)]:
        old = before.get(name, {})
        new = after.get(name, {})
        for kind in [*old, *(kind for kind in new if kind not in old)]:
            if kind not in old or kind not in new:
                yield f"{name}: {kind} only {'after' if kind in new else 'before'}"
            elif old[kind] != new[kind] and not _is_close(kind, old[kind], new[kind]):
                yield f"{name}: {kind} {describe_change(old[kind], new[kind])}"


def _is_close(kind: str, before: Any, after: Any) -> bool:
    if kind not in TOLERANCES or before is None or after is None:
        return False
    scale = abs(before) if kind == "step_s_estimate" else 1.0
    return abs(after - before) <= TOLERANCES[kind] * scale


def describe_change(before: Any, after: Any) -> str:
    """The largest relative difference of two values of a kind, or the first line that differs."""
    if isinstance(before, str):
        lines = zip(before.splitlines(), after.splitlines(), strict=False)
        pairs = (pair for pair in lines if pair[0] != pair[1])
        old, new = next(pairs, (f"{len(before)}", f"{len(after)} characters"))
        return f"differs: {old[:200]} -> {new[:200]}"
    if isinstance(before, dict) and before.keys() == after.keys():
        before, after = [*before.values()], [*after.values()]
    if isinstance(before, list) and len(before) == len(after):
        if all(isinstance(number, float) for number in [*before, *after]):
            return f"differs by {max_difference(before, after):.1e}"
    return f"{before} -> {after}"


def max_difference(before: list[float], after: list[float]) -> float:
    """The largest relative difference of numbers in the same order."""
    pairs = zip(before, after, strict=True)
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def describe_processor() -> str:
    """Instructions of this processor for vectors, on which the order of sums depends; empty if they
    are not known."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    flags = text.partition("flags")[2].partition("\n")[0].split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx"))))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m tests.golden",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commits", metavar="COMMIT", nargs="*")
    parser.add_argument("--record", action="store_true", help="writes values.json")
    parser.add_argument("--recipes", choices=("lower", "compile"))
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="cases or recipes")
    args = parser.parse_args()
    words = ["recipes.py", args.recipes] if args.recipes else ["cases.py"]
    words += args.only
    if args.record:
        values = {
            name: {kind: value for kind, value in numbers.items() if kind != "digest"}
            for name, numbers in run_checkout(REPO, words).items()
        }
        recorded = {"processor": describe_processor(), "cases": values}
        VALUES.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        return 0
    if not 1 <= len(args.commits) <= 2:
        parser.error("name one commit or two")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_commit, commit, words) for commit in args.commits]
        if len(runs) == 1:
            runs.append(pool.submit(run_checkout, REPO, words))
        before, after = (run.result() for run in runs)
    differences = [*compare(before, after)]
    print("\n".join(differences or [f"{len(before)} are equal"]))
    return len(differences) > 0


if __name__ == "__main__":
    sys.exit(main())
