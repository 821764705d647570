"""scripts/constraints/ has a version of every requirement of pyproject.toml, in its range."""

import pathlib
import re
import tomllib

import pytest
from packaging import requirements

REPO = pathlib.Path(__file__).parent.parent
FILES = sorted((REPO / "scripts/constraints").glob("*.txt"))


def read_requirements(version):
    """Direct requirements of pyproject.toml for this Python, with the extras test and plan."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["plan"]]
    for line in filter(lambda line: line.startswith("jaxsp["), lines.copy()):
        lines.remove(line)
        for extra in requirements.Requirement(line).extras:
            lines += extras[extra]
    return [
        requirement
        for requirement in map(requirements.Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": version})
    ]


def test_each_python_of_ci_has_a_file():
    versions = re.search(r"for version in ([\d. ]+);", (REPO / ".ci/run").read_text())[1].split()
    assert [path.name for path in FILES] == [f"python{version}.txt" for version in versions]
    assert '-c "scripts/constraints/python$1.txt"' in (REPO / ".ci/run").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_all_requirements_in_their_range(path):
    lines = path.read_text().splitlines()
    pattern = r"([a-z0-9]+(?:-[a-z0-9]+)*)==(\d+(?:\.\d+)*(?:(?:rc|a|b|\.post|\.dev)\d+)*)"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == [], (
        "only lines of name==version"
    )
    assert lines == sorted(set(lines))
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    for requirement in read_requirements(path.stem.removeprefix("python")):
        name = re.sub("[-_.]+", "-", requirement.name).lower()
        assert name in versions, requirement
        version = versions[name]
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)
