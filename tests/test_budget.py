"""Lines of Python that each package, the tests and the scripts may have.

A change that needs more room removes something. One that removes lines lowers the limit.
"""

import pathlib
from collections.abc import Iterator, Mapping

REPO = pathlib.Path(__file__).parent.parent

LIMITS = {
    "commands": 1816,
    "attention": 4686,
    "blocks": 2641,
    "checkpoint": 1201,
    "config": 1166,
    "core": 664,
    "data": 5705,
    "delta_rule": 1042,
    "evaluation": 1070,
    "experts": 724,
    "generation": 573,
    "hf": 3623,
    "model": 2079,
    "objectives": 887,
    "optimizers": 1038,
    "planning": 4260,
    "run": 6298,
    "sharding": 733,
    "system": 2069,
    "tasks": 564,
    "training": 2700,
    "tests": 36630,
    "scripts": 2751,
}
"""Lines of each package of jaxsp (`commands` are the modules directly in jaxsp/), of the tests and
of the scripts."""

SLACK = 0.02
SLACK_LINES = 40
"""The larger of the two, as a fraction of the limit and in lines, may be unused."""


def count_lines(repo: pathlib.Path) -> dict[str, int]:
    folders = {folder.name: folder.rglob("*.py") for folder in repo.glob("jaxsp/[a-z]*/")}
    folders["commands"] = repo.glob("jaxsp/*.py")
    for name in ("tests", "scripts"):
        folders[name] = repo.glob(f"{name}/**/*.py")
    counts = {}
    for name, files in folders.items():
        counts[name] = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return counts


def problems(counts: Mapping[str, int], limits: Mapping[str, int]) -> Iterator[str]:
    for name in sorted(counts.keys() | limits.keys()):
        count = counts.get(name, 0)
        if count and name not in limits:
            yield f"{name}: {count} lines and no limit in LIMITS"
            continue
        limit = limits.get(name, 0)
        if count > limit:
            yield f"{name}: {count} lines, at most {limit}: remove some"
        elif limit - count > max(SLACK * limit, SLACK_LINES):
            yield f"{name}: {count} lines and a limit of {limit}: lower it to {count}"


def test_every_package_keeps_its_budget():
    assert list(problems(count_lines(REPO), LIMITS)) == []


def test_budget_finds_growth_unused_room_and_unknown_packages():
    limits = {"small": 100, "large": 5000, "gone": 50}
    assert list(problems({"small": 60, "large": 4900, "gone": 10}, limits)) == []
    counts = {"small": 101, "large": 4899, "new": 1}
    found = [problem.split(":")[0] for problem in problems(counts, limits)]
    assert found == ["gone", "large", "new", "small"]
