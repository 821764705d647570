"""Exit codes and last messages of a command."""

import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

from jaxsp import cli
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.system import distributed, output
from jaxsp.system.cluster import Process
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


def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch):
    with tempfile.TemporaryFile() as file:
        like = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", output.open_output(file.fileno(), like))
        with pytest.raises(SystemExit) as ended:
            cli.run_command(lambda _: print("\u27e6"))
        file.seek(0)
        assert (ended.value.code, file.read()) == (0, b"\\u27e6\n")


def test_other_errors_cannot_control_the_terminal(capsys):
    with pytest.raises(SystemExit):
        cli.run_command(fails(NeedsAttentionError("step 3\nfile \x1b[2J")))
    assert capsys.readouterr().err == "step 3\nfile \\x1b[2J\n"


def test_an_internal_error_prints_its_traceback(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(ZeroDivisionError("ours")))
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("ZeroDivisionError: ours\n")


CLOSED = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:4500"


@pytest.mark.parametrize(
    ("num_processes", "flags", "is_short"),
    [(2, [], True), (2, ["--verbose"], False), (1, [], False)],
)
def test_a_lost_connection_to_another_process_is_one_line(
    monkeypatch, capsys, num_processes, flags, is_short
):
    monkeypatch.setattr(distributed, "this_process", Process(index=0, num_processes=num_processes))
    monkeypatch.setattr(distributed, "abort_job", sys.exit)
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(ValueError(CLOSED)))
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert CLOSED in printed
    assert ("Traceback" in printed, len(printed.splitlines()) == 1) == (not is_short, is_short)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["lambda _: print('a')", "lambda _: 1 / 0"])
def test_output_that_cannot_be_written_does_not_change_the_exit_code(command):
    """Python would end with 120."""
    program = (
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
        f"from jaxsp import cli; cli.run_command({command})"
    )
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=buffered, check=False, capture_output=True, text=True
    )
    assert ended.returncode == int("/" in command)
    assert ended.stderr.count("No space left") == int("print" in command)


def test_a_message_that_cannot_be_written_does_not_change_the_exit_code():
    program = (
        "import os; os.close(2); os.open('/dev/full', os.O_WRONLY); "
        "from jaxsp import cli; cli.run_command(lambda _: 1 / 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1


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


def test_files_that_users_name_may_be_links_and_devices(tmp_path):
    target = tmp_path / "folder" / "target.json"
    target.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    cli.write_output(link, "a", flag="--out")
    assert (link.is_symlink(), target.read_text()) == (True, "a")
    reader, writer = os.pipe()
    cli.write_output(pathlib.Path(f"/dev/fd/{writer}"), "b", flag="--out")
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert file.read() == "b"
