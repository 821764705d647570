"""Standard streams whose reader is gone, whose disk is full, or that are closed."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest
import rich.console

from jaxsp.run.console import Progress
from jaxsp.system import standard_streams


def reader_is_gone():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def disk_is_full():
    return os.open("/dev/full", os.O_WRONLY)


def terminal_is_closed():
    main, terminal = os.openpty()
    os.close(main)
    return terminal


def pipe_is_full():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
    os.dup(reader)  # stays open
    return writer


@pytest.mark.parametrize("is_unbuffered", [False, True])
@pytest.mark.parametrize("make", [reader_is_gone, disk_is_full, terminal_is_closed, pipe_is_full])
def test_output_that_cannot_be_written_is_lost(make, is_unbuffered, monkeypatch):
    """Also in the thread of rich that draws the bar."""
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    like = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - kept open
    if is_unbuffered:
        like.reconfigure(write_through=True)
    fd = make()
    with like, standard_streams.open_output(fd, like) as stream:
        console = rich.console.Console(file=stream, force_terminal=True)
        with Progress(console, first_step=0, num_steps=9) as progress:
            progress._bar.live.refresh_per_second = 100
            for step in range(3):
                progress.print_line(f"step {step}")
            progress._bar.refresh()
            print("a" * 100_000, file=stream, flush=True)
    os.close(fd)
    assert failures == []


def test_characters_that_the_encoding_lacks_are_escaped():
    reader, writer = os.pipe()
    with (
        open(os.devnull, "w", encoding="ascii") as like,
        standard_streams.open_output(writer, like) as stream,
    ):
        rich.console.Console(file=stream).print("⟦é⟧")
    os.close(writer)
    with open(reader, "rb") as output:
        assert output.read() == rb"\u27e6\xe9\u27e7" + b"\n"


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_files_do_not_get_the_numbers_of_closed_streams(redirection):
    program = (
        "import os, sys; from jaxsp.system import standard_streams; standard_streams.protect(); "
        "print('a', flush=True); print('b', file=sys.stderr); os.write(1, b'c'); "
        "sys.exit(os.open(os.devnull, 0) - 3)"
    )
    command = f'"$0" -c "$1" {redirection}'
    done = subprocess.run(["sh", "-c", command, sys.executable, program], check=False)
    assert done.returncode == 0
