"""Paths in the config: home folders, and names that no file can have."""

import pathlib

import pytest

from jaxsp.core import errors, paths


def test_a_tilde_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.expand_user("~/x.txt", field="f") == pathlib.Path("/home/me/x.txt")
    assert paths.expand_user("./~nosuchuser/x", field="f") == pathlib.Path("~nosuchuser/x")


@pytest.mark.parametrize("text", ["~nosuchuser/x.txt", "a/" + "b" * 256, "é" * 128])
def test_a_path_that_cannot_exist_is_refused(text):
    with pytest.raises(errors.UserError) as caught:
        paths.expand_user(text, field="model.source")
    assert caught.value.problems[0].startswith(f"model.source = {text}: ")
