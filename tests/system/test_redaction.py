"""No form of an address or of a variable lets a secret into a printed text."""

import base64
import urllib.parse

import pytest

from jaxsp.system import redaction

PASSWORDS = [
    "SECRET",
    "SE@CRET",
    "SE/CRET",
    "SE?CRET",
    "SE#CRET",
    "SE:CRET",
    "SE CRET",
    "SE%40C@RET",
]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        *((f"http://user:{password}@host:5000/path", "host:5000/path") for password in PASSWORDS),
        *((f"http://{password}@host", "host") for password in PASSWORDS),
        ("http://host/path?token=SECRET#SECRET", "host/path"),
        ("http://user:SECRET@host/path?token=SECRET", "host/path"),
        ("postgresql+psycopg2://user:SECRET@host/db?sslpassword=SECRET", "host/db"),
        ("http://a://user:SECRET@host", "host"),
        ("http:///user:SECRET@host", "host"),
        ("http://user:SECRET@[::1]:5000", "[::1]:5000"),
    ],
)
def test_an_address_is_shown_without_its_credentials(address, shown):
    texts = [redaction.strip_credentials(address)]
    if " " not in address:  # in a text, an address ends there
        texts.append(redaction.redact(address, {}))
    for text in texts:
        assert not any(part in text for part in ("SE", "CRET", "token", "user")), text
    assert redaction.strip_credentials(address).rpartition("://")[2] == shown


@pytest.mark.parametrize(
    "address",
    [
        "sqlite:////home/me@corp/mlflow.db",
        "/data/me@corp",
        "databricks",
        "http://host:5000/a",
        "a@b",
    ],
)
def test_an_address_without_credentials_is_unchanged(address):
    assert redaction.strip_credentials(address) == address


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_password_of_a_variable_is_hidden_in_every_form(password):
    uri = f"http://user:{password}@host:5000/?key=QUERY-VALUE"
    environment = {"MLFLOW_TRACKING_URI": uri, "HOME": "/root"}
    quoted = urllib.parse.quote(password, safe="")
    userinfo = f"user:{password}"
    forms = [
        f"API request to {uri}api failed with exception HTTPConnectionPool(host='host', port=5000)",
        f"Invalid URL '{uri}'",
        f"http://user:{quoted}@host",
        f"auth=('user', {password!r})",
        f"password={quoted} refused",
        f"Authorization: Basic {base64.b64encode(userinfo.encode()).decode()}",
        "?key=QUERY-VALUE",
        "value QUERY-VALUE in /root",
    ]
    for form in forms:
        text = redaction.redact(form, environment)
        assert not any(part in text for part in (password, quoted, "QUERY-VALUE")), text
        assert base64.b64encode(userinfo.encode()).decode() not in text
    assert "/root" in redaction.redact(forms[-1], environment)


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        *((name, True) for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN")),
        *((name, True) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "my_secret_2")),
        *((name, False) for name in ("PATH", "PWD", "MONKEY_NAME", "TOKENIZER", "pad_token")),
    ],
)
def test_values_of_variables_are_hidden_by_their_names(name, is_hidden):
    text = redaction.redact("error: value-of-it, twice value-of-it", {name: "value-of-it"})
    assert ("value-of-it" not in text) == is_hidden


def test_a_signed_url_keeps_only_its_place():
    text = "GET https://bucket.s3.amazonaws.com/a?X-Amz-Signature=abc&X-Amz-Credential=d failed"
    assert redaction.redact(text, {}) == "GET https://bucket.s3.amazonaws.com/a?*** failed"
