"""The README's loop of one's own does what it says. (Its commands are run by test_quickstart.py and test_train.py.)"""

import os
import pathlib
import re
import subprocess
import sys

from jaxsp import plan
from jaxsp.core import config


def test_the_loop_of_one_s_own_learns():
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= 42
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    assert [int(step) for step, _, _ in steps] == list(range(1, 21))
    assert {count for *_, count in steps} == {str(4 * 2 * 31)}, "a document of 32 tokens has 31 loss tokens"
    assert float(steps[0][1]) > 4.5, "ln 100 is 4.6"
    assert float(steps[-1][1]) < 1.5


def test_its_plans_can_be_asked_for():
    """The words of each command, without compiling: that a plan comes of them is tested in test_plan.py."""
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m jaxsp\.plan (.*)$", readme, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        given = plan.asked(command.split())
        config.load(pathlib.Path(__file__).parent.parent / given.config, given.changes)
