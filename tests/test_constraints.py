"""The versions that CI installs: nothing but names and versions, all that pyproject asks for, and within what it allows."""

import pathlib
import re
import tomllib

import pytest
from packaging import requirements

REPO = pathlib.Path(__file__).parent.parent
FILES = sorted((REPO / "scripts/constraints").glob("*.txt"))


def asked(version):
    """What pyproject asks for directly, of this Python, with extras that stand for others resolved."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["plan"]]
    found = [requirements.Requirement(line) for line in lines]
    return [
        one
        for one in found
        if one.marker is None or one.marker.evaluate({"python_version": version})
    ]


def test_there_is_a_file_for_each_python_that_ci_tries():
    tried = re.search(r"for version in ([\d. ]+);", (REPO / ".ci/run").read_text())[1].split()
    assert [path.name for path in FILES] == [f"python{version}.txt" for version in tried]
    assert '-c "scripts/constraints/python$1.txt"' in (REPO / ".ci/run").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_holds_all_that_is_asked_for_within_its_range(path):
    lines = path.read_text().splitlines()
    pattern = r"([a-z0-9]+(?:-[a-z0-9]+)*)==(\d+(?:\.\d+)*(?:(?:rc|a|b|\.post|\.dev)\d+)*)"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == [], "only name==version"
    assert lines == sorted(set(lines))
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    for one in asked(path.stem.removeprefix("python")):
        name = re.sub("[-_.]+", "-", one.name).lower()
        assert name in versions, f"{one} is asked for"
        assert one.specifier.contains(versions[name], prereleases=True), (
            f"{one}, and {versions[name]}"
        )
