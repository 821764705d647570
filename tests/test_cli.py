"""How a command ends: its exit code, and its last words."""

import os
import runpy
import subprocess
import sys

import pytest

from jaxsp import cli
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import families
from jaxsp.runtime import distributed
from jaxsp.runtime.cluster import Process


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
def test_what_somebody_has_to_look_at_has_a_code_of_its_own(error, code, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(error))
    assert (ended.value.code, capsys.readouterr().err) == (code, words)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--lr", "1e-5"], "optimizer.learning_rate="),
        (["--seq-len=5"], "data.row_tokens="),
        (["--seed", "3"], "run.seed="),
    ],
)
def test_an_option_of_another_system_is_answered_with_a_field(words, field, capsys):
    parser = cli.make_parser("train", "about")
    parser.add_argument("changes", nargs="*")
    with pytest.raises(SystemExit) as ended:
        parser.parse_intermixed_args(words)
    assert ended.value.code == 2
    assert field in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args(["--nonsense"])
    assert "=" not in capsys.readouterr().err.partition("error: ")[2]


def test_an_error_of_ours_is_said_in_full(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(ZeroDivisionError("ours")))
    assert ended.value.code == 1
    assert "Traceback" in (said := capsys.readouterr().err)
    assert said.endswith("ZeroDivisionError: ours\n")


CLOSED = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:4500"


@pytest.mark.parametrize(
    ("num_processes", "flags", "is_short"),
    [(2, [], True), (2, ["--verbose"], False), (1, [], False)],
)
def test_a_lost_connection_to_another_process_is_one_line(
    monkeypatch, capsys, num_processes, flags, is_short
):
    monkeypatch.setattr(distributed, "_this_process", Process(index=0, num_processes=num_processes))
    monkeypatch.setattr(distributed, "abort_job", sys.exit)
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.run_command(fails(ValueError(CLOSED)))
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert CLOSED in printed
    assert ("Traceback" in printed, len(printed.splitlines()) == 1) == (not is_short, is_short)


@pytest.mark.parametrize("module", [families, tokenizers])
def test_modules_that_import_transformers_silence_its_advice_to_install_torch(monkeypatch, module):
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    runpy.run_path(module.__file__)
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"


@pytest.mark.parametrize("command", ["lambda _: print('a')", "lambda _: 1 / 0"])
def test_what_cannot_be_printed_at_the_end_does_not_change_the_code(command):
    """Python would end with 120."""
    program = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from jaxsp import cli; cli.run_command({command})"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    assert subprocess.run(
        [sys.executable, "-c", program], env=buffered, check=False
    ).returncode == int("/" in command)


def test_the_code_is_right_though_nobody_hears_the_words():
    program = "import os; os.close(2); os.open('/dev/full', os.O_WRONLY); from jaxsp import cli; cli.run_command(lambda _: 1 / 0)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
