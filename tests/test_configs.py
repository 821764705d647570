"""Every config in configs/ is valid, and its header has the command that starts it."""

import pathlib

import pytest

from jaxsp.run import config_file

FOLDER = pathlib.Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_valid_and_its_header_has_its_command(path):
    config = config_file.load(path, [])
    assert config.run.directory.startswith("runs/")
    header = [
        line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    assert any(f"configs/{path.name}" in line and line.startswith("#   jaxsp ") for line in header)


def test_no_two_configs_write_to_the_same_directory():
    directories = [config_file.load(path, []).run.directory for path in FOLDER.glob("*.yaml")]
    assert len(directories) > 1
    assert len(set(directories)) == len(directories)
