"""Files that commands write."""

import os
import pathlib

from jaxsp.core import files


def test_files_that_users_name_may_be_links_and_devices(tmp_path):
    target = tmp_path / "folder" / "target.json"
    target.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    files.write_output(link, "a")
    assert (link.is_symlink(), target.read_text()) == (True, "a")
    reader, writer = os.pipe()
    files.write_output(pathlib.Path(f"/dev/fd/{writer}"), "b")
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert file.read() == "b"
