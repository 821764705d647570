"""Exit codes and last messages of a command."""

import re

import pytest

from jaxsp import cli
from jaxsp.core.errors import NeedsAttentionError, UserError
from tests import commands


def fails(error):
    def main(_):
        raise error

    return main


ENDS = [
    (UserError(["a = 1: no.", "b = 2: no."]), 2, "a = 1: no.\nb = 2: no.\n"),
    (NeedsAttentionError("step 3: not finite"), 3, "step 3: not finite\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
def test_each_kind_of_error_has_its_exit_code_and_message(error, code, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(error))
    assert (ended.value.code, capsys.readouterr().err) == (code, words)


def test_an_internal_error_prints_its_traceback(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(ZeroDivisionError("ours")))
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("ZeroDivisionError: ours\n")


def test_jaxsp_without_a_command_lists_all_that_exist_without_importing_them():
    program = "import sys; from jaxsp.__main__ import main; main(); sys.exit('jax' in sys.modules)"
    done = commands.run_python("-c", program)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^  (\w+) +\w", done.stdout, re.MULTILINE)
    modules = [
        file.stem
        for file in (commands.REPO / "jaxsp").glob("*.py")
        if "cli.run_command(main)" in file.read_text(encoding="utf-8")
    ]
    assert sorted(listed) == sorted(name.removesuffix("_cli") for name in modules)
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    "words", ["eval --help", "train --help", "plan configs/quickstart.yaml a=1"]
)
def test_help_and_errors_of_a_config_do_not_import_jax(words):
    program = (
        "import sys, atexit; atexit.register(lambda: print('jax' in sys.modules))\n"
        f"sys.argv = ['jaxsp', *{words.split()}]\nfrom jaxsp.__main__ import main\nmain()"
    )
    done = commands.run_python("-c", program)
    assert done.returncode == (0 if "--help" in words else 2), done.stderr
    assert done.stdout.endswith("False\n")
    assert ("\n  mesh: Device mesh" in done.stdout) == (words == "eval --help")
