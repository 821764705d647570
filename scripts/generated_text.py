"""Generated parts of Markdown files, each between two marker comments."""

import pathlib


def read_part(path: pathlib.Path, name: str) -> str:
    """Returns the text between the markers of a part. Raises: ValueError if there are none."""
    _, text, _ = _split(path, name)
    return text


def write_part(path: pathlib.Path, name: str, text: str) -> None:
    """Replaces the text between the markers of a part. Raises: ValueError if there are none."""
    before, _, after = _split(path, name)
    path.write_text(f"{before}{text}{after}", encoding="utf-8")


def _split(path: pathlib.Path, name: str) -> tuple[str, str, str]:
    """Text up to and including the first marker, between the markers, and from the second on."""
    text = path.read_text(encoding="utf-8")
    begin = f"<!-- begin {name} -->\n"
    end = f"<!-- end {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path}: must have one line {begin.strip()} and one line {end.strip()}")
    head, rest = text.split(begin)
    if end not in rest:
        raise ValueError(f"{path}: {end.strip()} must come after {begin.strip()}")
    part, tail = rest.split(end)
    return head + begin, part, end + tail
