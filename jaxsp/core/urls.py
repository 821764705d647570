"""URLs of object stores in the config: `s3://bucket/path` and `gs://bucket/path`."""

import hashlib
import os
import pathlib
import re

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Package for each scheme. The extra of pyproject.toml has the scheme's name."""


def is_url(text: str) -> bool:
    """True if a text begins like a URL, of an object store or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def check(url: str) -> None:
    """Checks the form of a URL. Raises: ValueError with the rule and an example."""
    scheme, _, path = url.partition("://")
    if scheme not in PACKAGES:
        raise ValueError("must be a path or begin with s3:// or gs://. Use s3://bucket/path")
    example = f"{scheme}://bucket/path"
    if re.search(r"[@?#]", path):
        raise ValueError(
            "must have only a bucket and a path, without credentials or options, which come from "
            f"the environment. Use {example}"
        )
    parts = path.rstrip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise ValueError(f"must name a bucket and a path in it. Use {example}")


def name_local(url: str) -> str:
    """Returns a name for the local copy of a URL, readable and unique: `first-1f0c83a2`."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    return f"{url.rpartition('/')[2][:100]}-{digest}"


def cache_dir() -> pathlib.Path:
    """Folder of the local copies: `$XDG_CACHE_HOME/jaxsp`, or `~/.cache/jaxsp`."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "jaxsp"
