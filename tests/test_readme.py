"""Links, commands, examples and generated pages of the READMEs and guides are valid.

test_quickstart.py and test_train.py run the commands of README.md, test_api.py the example.
"""

import importlib.util
import re

import pytest

from jaxsp import __main__, plan_cli
from jaxsp.config import yaml_io
from jaxsp.hf import model_config
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.run import config_file
from scripts import config_reference
from tests import markdown
from tests.markdown import REPO

MAX_LINES = {"README.md": 125, "configs/README.md": 80}

MAX_GUIDE_LINES = 150

each_page = pytest.mark.parametrize(
    "path", markdown.pages(), ids=lambda path: str(path.relative_to(REPO))
)


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


@each_page
def test_relative_links_and_anchors_exist(path):
    assert list(markdown.broken_links(path)) == []


@each_page
def test_named_source_files_exist(path):
    assert list(markdown.missing_files(path)) == []


@each_page
def test_modules_that_are_run_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"python -m ([\w.]+\w)", text):
        is_placeholder = name.endswith(".NAME")
        if name.startswith(("jaxsp.", "scripts.", "tests.")) and not is_placeholder:
            assert importlib.util.find_spec(name) is not None, name


@each_page
def test_commands_of_jaxsp_exist(path):
    for command in markdown.commands(path.read_text(encoding="utf-8")):
        for name in re.findall(r"(?:^|&& )jaxsp (\S+)", command):
            assert name in __main__._COMMANDS, command


def test_pages_are_short():
    lengths = {
        str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines())
        for path in markdown.pages()
    }
    limits = MAX_LINES | {name: MAX_GUIDE_LINES for name in lengths if "guide" in name}
    assert [name for name, limit in limits.items() if lengths[name] > limit] == []


def test_the_index_lists_every_page():
    index = read("configs/README.md")
    assert [path.name for path in markdown.guides() if f"/{path.name})" not in index] == []


@pytest.mark.parametrize(
    "name",
    ["README.md", "configs/guide/chats_on_eight_gpus.md", "configs/guide/preferences.md"],
)
def test_whole_configs_are_valid(name):
    (text,) = markdown.code_blocks(read(name), "yaml")
    config = config_file.parse(yaml_io.load(text))
    assert config.mesh.seq == 8


def test_the_examples_of_sections_of_a_config_are_valid():
    fields = config_file.read(REPO / "configs/quickstart.yaml")
    for name in ("data", "optimizers"):
        for text in markdown.code_blocks(read(f"configs/guide/{name}.md"), "yaml"):
            fields |= yaml_io.load(text)
    config = config_file.parse(fields)
    assert len(config.data.train) == 3
    assert len(config.optimizer.groups) == 2
    model = model_config.parse_model_config(config.model.config)
    assert param_groups.find_problems(config.optimizer, decoder.param_table(model)) == []


def test_plan_commands_have_valid_arguments():
    """test_plan.py makes plans."""
    commands = [
        command.removeprefix("jaxsp plan ")
        for name in ("configs/guide/planning.md", "scripts/README.md")
        for command in markdown.commands(read(name))
        if command.startswith("jaxsp plan ")
    ]
    assert len(commands) == 5
    for command in commands:
        arguments = plan_cli.parse_arguments(command.replace("'", "").split())
        config_file.load(REPO / arguments["config"], arguments["changes"])


@pytest.mark.parametrize("name", config_reference.render_pages())
def test_the_reference_is_up_to_date(name):
    text = config_reference.render_pages()[name]
    assert read(f"configs/{name}") == text, "run python -m scripts.config_reference"


def test_the_reference_has_every_field_of_the_config():
    text = config_reference.render_config(config_file.SCHEMA.describe_fields())
    for section, (kinds, _, _) in config_file.SCHEMA.sections.items():
        assert f"## {section}\n" in text
        for field in kinds[0].model_fields:
            assert f"- `{section}.{field}` (" in text
    assert "- `data.train[].source` (text; required): " in text
