"""Paths in the config: home folders, and names that no file can have."""

import pathlib

from jaxsp.core import paths


def test_a_tilde_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.expand_user("~/x.txt") == pathlib.Path("/home/me/x.txt")
    assert paths.expand_user("./~nosuchuser/x") == pathlib.Path("~nosuchuser/x")
