"""URLs of object stores in the config: `s3://bucket/path` and `gs://bucket/path`."""

import re

from jaxsp.core.errors import UserError


def is_url(text: str) -> bool:
    """True if a text begins like a URL, of an object store or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def check(url: str) -> None:
    """Checks the form of a URL. Raises: UserError with the rule and an example."""
    scheme, _, path = url.partition("://")
    if scheme not in ("s3", "gs"):  # each has an extra in pyproject.toml
        raise UserError("must be a path or begin with s3:// or gs://. Use s3://bucket/path.")
    example = f"{scheme}://bucket/path"
    if re.search(r"[@?#]", path):
        raise UserError(
            "must have only a bucket and a path, without credentials or options, which come from "
            f"the environment. Use {example}."
        )
    parts = path.rstrip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise UserError(f"must name a bucket and a path in it. Use {example}.")
