"""Exit codes and last messages of a command."""

import io
import os
import pathlib
import re
import sys
import tempfile

import pytest

from jaxsp import cli
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.system import distributed, output
from jaxsp.system.cluster import Process
from tests import commands


def end(main) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.run_command(main)
    return ended.value.code


def fails(error):
    def main(_):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError(["a = 1: no.", "b = 2: no."]), 2, "a = 1: no.\nb = 2: no.\n"),
        (NeedsAttentionError("step 3: not finite"), 3, "step 3: not finite\n"),
        (NeedsAttentionError("step 3\nfile \x1b[2J"), 3, "step 3\nfile \\x1b[2J\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ZeroDivisionError("ours"), 1, "Traceback .*ZeroDivisionError: ours\n"),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_message(error, code, text, capsys):
    assert end(fails(error)) == code
    printed = capsys.readouterr().err
    assert printed == text or (code == 1 and re.fullmatch(text, printed, re.DOTALL))


def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch):
    with tempfile.TemporaryFile() as file:
        like = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", output.open_output(file.fileno(), like))
        assert end(lambda _: print("\u27e6")) == 0
        file.seek(0)
        assert file.read() == b"\\u27e6\n"


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
    assert end(fails(ValueError(CLOSED))) == 1
    printed = capsys.readouterr().err
    assert CLOSED in printed
    assert ("Traceback" in printed, len(printed.splitlines()) == 1) == (not is_short, is_short)


@pytest.mark.parametrize(
    ("fd", "command", "code"), [(1, "print('a')", 0), (1, "1 / 0", 1), (2, "1 / 0", 1)]
)
def test_output_that_cannot_be_written_does_not_change_the_exit_code(fd, command, code):
    """Python would end with 120."""
    program = (
        f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), {fd}); "
        f"from jaxsp import cli; cli.run_command(lambda _: {command})"
    )
    ended = commands.run_python("-c", program, env={"PYTHONUNBUFFERED": ""})
    assert ended.returncode == code
    assert ended.stderr.count("No space left") == int("print" in command)


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
