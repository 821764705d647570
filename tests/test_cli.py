"""How a command ends: its exit code, and its last words."""

import os
import subprocess
import sys

import pytest

from jaxsp import cli
from jaxsp.core import errors


def fails(error):
    def main(_):
        raise error

    return main


ENDS = [
    (errors.UserError(["a = 1: no.", "b = 2: no."]), 2, "a = 1: no.\nb = 2: no.\n"),
    (errors.Stopped("step 3: not finite"), 3, "step 3: not finite\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
def test_what_somebody_has_to_look_at_has_a_code_of_its_own(error, code, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(fails(error))
    assert (ended.value.code, capsys.readouterr().err) == (code, words)


def test_an_error_of_ours_is_said_in_full(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(fails(ZeroDivisionError("ours")))
    assert ended.value.code == 1
    assert "Traceback" in (said := capsys.readouterr().err)
    assert said.endswith("ZeroDivisionError: ours\n")


@pytest.mark.parametrize("command", ["lambda _: print('a')", "lambda _: 1 / 0"])
def test_what_cannot_be_printed_at_the_end_does_not_change_the_code(command):
    """Python would end with 120."""
    program = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from jaxsp import cli; cli.run({command})"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    assert subprocess.run([sys.executable, "-c", program], env=buffered, check=False).returncode == int("/" in command)


def test_the_code_is_right_though_nobody_hears_the_words():
    program = "import os; os.close(2); os.open('/dev/full', os.O_WRONLY); from jaxsp import cli; cli.run(lambda _: 1 / 0)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
