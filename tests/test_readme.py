"""Links, commands, examples and generated parts of the READMEs are valid.

test_quickstart.py and test_train.py run the commands of README.md, test_library.py the example.
"""

import importlib.util
import re
import textwrap

import pytest

from jaxsp import plan, trainer
from jaxsp.config import config_errors, config_file, schema, yaml_io
from jaxsp.hf import model_config
from jaxsp.model import decoder
from jaxsp.planner import plots
from jaxsp.training.optimizers import param_groups
from scripts import config_reference, generated_text
from tests import markdown
from tests.markdown import REPO

MAX_README_LINES = 170

each_readme = pytest.mark.parametrize(
    "path", markdown.readmes(), ids=lambda path: str(path.relative_to(REPO))
)


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


@each_readme
def test_relative_links_and_anchors_exist(path):
    assert list(markdown.broken_links(path)) == []


def test_broken_links_are_found(tmp_path):
    text = "# A b: `c`\n[1](#a-b-c) [2](#other) [3](no.md) [4](other.md#x-y) [5](https://x.y/z)\n"
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "other.md").write_text("## X Y\n\n```\n# Not a heading\n```\n")
    (first, second) = markdown.broken_links(tmp_path / "README.md")
    assert "#other" in first
    assert "no.md" in second
    (tmp_path / "README.md").write_text("[1](other.md#not-a-heading)")
    assert len(list(markdown.broken_links(tmp_path / "README.md"))) == 1


@each_readme
def test_named_source_files_exist(path):
    assert list(markdown.missing_files(path)) == []


def test_missing_source_files_are_found(tmp_path):
    (tmp_path / "jaxsp").mkdir()
    (tmp_path / "jaxsp/train.py").touch()
    readme = tmp_path / "jaxsp/README.md"
    readme.write_text("`jaxsp/train.py` `core/batch.py` `train.py` `runs/x` `a/b.py c`")
    assert list(markdown.missing_files(readme, tmp_path)) == [
        "README.md: there is no core/batch.py"
    ]


@each_readme
def test_modules_that_are_run_exist(path):
    for name in re.findall(r"python -m ([\w.]+\w)", path.read_text(encoding="utf-8")):
        is_placeholder = name.endswith(".NAME")
        if name.startswith(("jaxsp.", "scripts.", "tests.")) and not is_placeholder:
            assert importlib.util.find_spec(name) is not None, name


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= MAX_README_LINES


def test_the_config_of_the_quickstart_is_valid():
    (text,) = markdown.code_blocks(read("README.md"), "yaml")
    config = config_file.parse(yaml_io.load(text))
    assert config.mesh.seq == 8


def test_the_examples_of_sections_of_a_config_are_valid():
    fields = config_file.read(REPO / "configs/quickstart.yaml")
    for text in markdown.code_blocks(read("configs/README.md"), "yaml"):
        fields |= yaml_io.load(text)
    config = config_file.parse(fields)
    assert len(config.data.train) == 3
    assert len(config.optimizer.groups) == 2
    model = model_config.parse_model_config(config.model.config, field="model.config")
    assert param_groups.find_problems(config.optimizer, decoder.param_table(model)) == []


def test_the_example_of_the_trainer_is_the_one_in_its_docstring():
    (code,) = markdown.code_blocks(read("jaxsp/README.md"), "python")
    example = trainer.__doc__.partition("Example:\n")[2]
    assert code.strip() == textwrap.dedent(example).strip()


def test_plan_commands_have_valid_arguments(monkeypatch):
    """test_plan.py makes plans."""
    commands = [
        command.removeprefix("python -m jaxsp.plan ")
        for name in ("configs/README.md", "scripts/README.md")
        for command in markdown.commands(read(name))
        if command.startswith("python -m jaxsp.plan ")
    ]
    assert len(commands) == 5
    monkeypatch.setattr(plots, "check_output", lambda file: None)  # needs the plan extra
    for command in commands:
        arguments = plan.parse_arguments(command.replace("'", "").split())
        config_file.load(REPO / arguments.config, arguments.changes)


@pytest.mark.parametrize("name", ["config", "metrics", "eval", "nonfinite", "starts"])
def test_the_reference_is_up_to_date(name):
    part = f"{name} reference"
    text = generated_text.read_part(config_reference.FILE, part)
    assert text == config_reference.render_parts()[part], "run python -m scripts.config_reference"


def test_the_reference_has_every_field_of_the_config():
    text = config_reference.render_config(config_errors.describe_fields())
    for section, model in schema.Config.model_fields.items():
        assert f"### {section}\n" in text
        for field in model.annotation.model_fields:
            assert f"- `{section}.{field}` (" in text
    assert "- `data.train[].source` (text; required): " in text


def test_a_generated_part_needs_its_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    generated_text.write_part(path, "x", "new\n")
    assert path.read_text() == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(ValueError, match="must have one line <!-- begin y -->"):
        generated_text.read_part(path, "y")
