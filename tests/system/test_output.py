"""Streams that cannot be written, and texts that must not contain a secret."""

import base64
import fcntl
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest
import rich.console

from jaxsp.run.console import Progress
from jaxsp.system import output


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
    with like, output.open_output(fd, like) as stream:
        console = rich.console.Console(file=stream, force_terminal=True)
        with Progress(console, first_step=0, num_steps=9) as progress:
            progress._bar.live.refresh_per_second = 100
            for step in range(3):
                progress.print_line(f"step {step}")
            progress._bar.refresh()
            print("a" * 100_000, file=stream, flush=True)
    os.close(fd)
    assert failures == []


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_files_do_not_get_the_numbers_of_closed_streams(redirection):
    program = (
        "import os, sys; from jaxsp.system import output; output.protect(); "
        "print('a', flush=True); print('b', file=sys.stderr); os.write(1, b'c'); "
        "sys.exit(os.open(os.devnull, 0) - 3)"
    )
    command = f'"$0" -c "$1" {redirection}'
    done = subprocess.run(["sh", "-c", command, sys.executable, program], check=False)
    assert done.returncode == 0


PASSWORDS = "SECRET,SE@CRET,SE/CRET,SE?CRET,SE#CRET,SE:CRET,SE CRET,SE%40C@RET".split(",")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        *((f"http://user:{password}@host:5000/path", "host:5000/path") for password in PASSWORDS),
        *((f"http://{password}@host", "host") for password in PASSWORDS),
        ("http://host/path?token=SECRET#SECRET", "host/path"),
        ("postgresql+psycopg2://user:SECRET@host/db?sslpassword=SECRET", "host/db"),
        ("http://a://user:SECRET@host", "host"),
        ("http:///user:SECRET@host", "host"),
        ("http://user:SECRET@[::1]:5000", "[::1]:5000"),
    ],
)
def test_an_address_is_shown_without_its_credentials(address, shown):
    texts = [output.strip_credentials(address)]
    if " " not in address:  # in a text, an address ends there
        texts.append(output.redact(address, {}))
    for text in texts:
        assert not any(part in text for part in ("SE", "CRET", "token", "user")), text
    assert output.strip_credentials(address).rpartition("://")[2] == shown


@pytest.mark.parametrize(
    "address", ["sqlite:////home/me@corp/mlflow.db", "/data/me@corp", "http://host:5000/a", "a@b"]
)
def test_an_address_without_credentials_is_unchanged(address):
    assert output.strip_credentials(address) == address


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_password_of_a_variable_is_hidden_in_every_form(password):
    uri = f"http://user:{password}@host:5000/?key=QUERY-VALUE"
    environment = {"MLFLOW_TRACKING_URI": uri, "HOME": "/root"}
    quoted = urllib.parse.quote(password, safe="")
    basic = base64.b64encode(f"user:{password}".encode()).decode()
    for form in (
        f"Invalid URL '{uri}'",
        f"http://user:{quoted}@host",
        f"auth=('user', {password!r})",
        f"password={quoted} refused",
        f"Authorization: Basic {basic}",
        "value QUERY-VALUE in ?key=QUERY-VALUE",
    ):
        text = output.redact(f"{form} in /root", environment)
        assert not any(part in text for part in (password, quoted, basic, "QUERY-VALUE")), text
        assert text.endswith("in /root")


SECRETS = (
    "WANDB_API_KEY MLFLOW_TRACKING_PASSWORD HF_TOKEN AWS_SECRET_ACCESS_KEY my_secret_2".split()
)
OTHERS = ["PATH", "PWD", "MONKEY_NAME", "TOKENIZER", "pad_token"]


@pytest.mark.parametrize("name", SECRETS + OTHERS)
def test_values_of_variables_are_hidden_by_their_names(name):
    text = output.redact("error: value-of-it, twice value-of-it", {name: "value-of-it"})
    assert ("value-of-it" in text) == (name in OTHERS)


def test_a_signed_url_keeps_only_its_place():
    text = "GET https://bucket.s3.amazonaws.com/a?X-Amz-Signature=abc&X-Amz-Credential=d failed"
    assert output.redact(text, {}) == "GET https://bucket.s3.amazonaws.com/a?*** failed"
