"""README's Python code is the example that test_library.py runs; test_quickstart.py and test_train.py run its commands."""

import pathlib
import re
import textwrap

from jaxsp import library, plan
from jaxsp.config import schema
from jaxsp.planner import plots

REPO = pathlib.Path(__file__).parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")


def test_its_code_is_the_example_of_the_library():
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert code.strip() == textwrap.dedent(library.__doc__.partition("Example:\n")[2]).strip()


def test_its_plans_can_be_asked_for(monkeypatch):
    """The words of each command, without compiling: that a plan comes of them is tested in test_plan.py."""
    commands = re.findall(r"^python -m jaxsp\.plan (.*)$", README, re.MULTILINE)
    assert len(commands) == 4
    monkeypatch.setattr(plots, "check_output", lambda file: None)  # matplotlib is in the plan extra
    for command in commands:
        given = plan.parse_arguments(command.split())
        schema.load(REPO / given.config, given.changes)
