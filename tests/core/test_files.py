"""Paths in the config: home folders, and names that no file can have."""

import pathlib

import pytest

from jaxsp.core import files
from jaxsp.core.errors import UserError


def test_a_tilde_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert files.expand_user("~/x.txt") == pathlib.Path("/home/me/x.txt")
    assert files.expand_user("./~nosuchuser/x") == pathlib.Path("~nosuchuser/x")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("loop", "loop/x", "file", "x" * 300, "x/" * 2500):
        with pytest.raises(UserError):
            files.check_folder(tmp_path / name)
    for name in ("folder", "new/folder"):
        files.check_folder(tmp_path / name)


@pytest.mark.parametrize("text", ["~nosuchuser/x.txt", "a/" + "b" * 256, "é" * 128])
def test_a_path_that_cannot_exist_is_refused(text):
    with pytest.raises(UserError):
        files.expand_user(text)
