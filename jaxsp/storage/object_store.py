"""Objects below a URL of an object store, read and written through fsspec."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxsp.core import files, redaction, urls
from jaxsp.core.errors import UserError
from jaxsp.processes import distributed

START_PATIENCE_S = 60.0
"""Seconds for which a command tries to reach a store before it starts to work."""

MAX_WAIT_S = 5.0
"""Longest wait between two attempts; s3fs and gcsfs also wait before they report a failure."""

_PERMANENT_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Errors of botocore for missing or incomplete credentials."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Size and version of an object."""

    size: int
    version: str
    """Value that changes when the object is written with other content: its ETag."""


def _with_retries(method: Callable[..., _T]) -> Callable[..., _T]:
    """Decorates a method of ObjectStore, which is repeated while the store is unreachable."""

    @functools.wraps(method)
    def call(self: "ObjectStore", *args: Any, **kwargs: Any) -> _T:
        action = functools.partial(method, self, *args, **kwargs)
        return self._retry(action) if self._has_retries else action()

    return call


class ObjectStore:
    """Objects below a URL, by their names relative to it. Several threads may use it.

    Credentials and endpoint come from where s3fs and gcsfs look for them. A request is repeated for
    START_PATIENCE_S while the store is unreachable; then UserError has the reason.
    """

    def __init__(self, url: str, *, label: str):
        """Args:   label: field and value for messages, such as `run.directory = s3://bucket/run`.
        Raises: UserError if the package for this kind of URL is missing.
        """
        self.url = url.rstrip("/")
        self._label = label
        self._root = self.url.partition("://")[2]
        self._fs = _open_filesystem(self.url, label)
        self._has_retries = True

    def without_retries(self) -> "ObjectStore":
        """The same store for a thread that tries again later: its requests are not repeated.

        They raise the library's own errors, which `describe` describes.
        """
        store = copy.copy(self)
        store._has_retries = False
        return store

    @_with_retries
    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Returns all objects whose names begin with a prefix, which ends in / or is empty."""
        folder = f"{self._root}/{prefix}".rstrip("/")
        try:
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            self._check_bucket()
            return {}
        start = len(self._root) + 1
        return {
            path[start:]: _to_info(info)
            for path, info in found.items()
            if info["type"] == "file" and path.startswith(f"{folder}/")
        }

    @_with_retries
    def find(self, pattern: str, *, is_glob: bool) -> dict[str, ObjectInfo]:
        """Returns the objects that match a name or a glob; a folder matches nothing."""
        path = self._path(pattern)
        if is_glob:
            found = self._fs.glob(path, detail=True)
        else:
            found = {path: self._fs.info(path)} if self._fs.exists(path) else {}
        if not found:
            self._check_bucket()
        start = len(self._root) + 1
        return {
            name[start:]: _to_info(info) for name, info in found.items() if info["type"] == "file"
        }

    @_with_retries
    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if it does not exist."""
        try:
            return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    @_with_retries
    def write(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content)

    @_with_retries
    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless it exists; False if it does. At most one writer succeeds.

        Also False if the first request succeeded, its response was lost, and it was repeated.
        """
        try:
            self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    @_with_retries
    def upload(self, file: pathlib.Path, name: str) -> None:
        self._fs.put_file(str(file), self._path(name))

    @_with_retries
    def download(self, name: str, file: pathlib.Path, *, size: int) -> None:
        """Downloads an object; the file gets its name when it is complete.

        Raises: OSError if the size differs, because the object was replaced meanwhile.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}{files.PARTIAL_SUFFIX}")
        try:
            self._fs.get_file(self._path(name), str(partial))
            if partial.stat().st_size != size:
                raise OSError(f"{self.url}/{name} has changed while it was downloaded")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, which need not exist."""
        for name in names:
            self._delete_one(name)

    @_with_retries
    def _delete_one(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _retry(self, action: Callable[[], _T]) -> _T:
        """Calls a function that uses the store; repeats it while the store is unreachable.

        Raises: UserError with the store's reason, after START_PATIENCE_S.
        """
        began = time.monotonic()
        wait_s = 0.5
        is_reported = False
        while True:
            try:
                return action()
            except UserError:
                raise
            except Exception as error:  # the libraries have no common class of errors
                reason = describe(error)
                is_over = time.monotonic() - began + wait_s > START_PATIENCE_S
                if is_over or not is_transient(error):
                    raise UserError(
                        f"{self._label}: cannot be used: {reason}. Check the URL, the "
                        "credentials and the network."
                    ) from None
            if not is_reported:
                distributed.log(f"{self.url}: {reason}. Trying again for {START_PATIENCE_S:g} s")
            is_reported = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _check_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        if not self._fs.exists(bucket):
            raise FileNotFoundError(f"the bucket {bucket} does not exist")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def is_transient(error: BaseException) -> bool:
    """True for an error that may go away: no answer, or an internal error of the store."""
    if isinstance(error, FileNotFoundError | PermissionError | NotImplementedError):
        return False
    return type(error).__name__ not in _PERMANENT_NAMES and _status(error) not in (400, 401, 403)


def describe(error: BaseException) -> str:
    """Returns the first line of a store's error, without secrets."""
    reason = redaction.redact(str(error)).strip().partition("\n")[0][:300].rstrip(" .:")
    return reason or type(error).__name__


def _status(error: BaseException) -> int | None:
    """HTTP status of an error of botocore or gcsfs; None if there was no answer."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None


def _open_filesystem(url: str, label: str) -> Any:
    scheme = url.partition("://")[0]
    package = urls.PACKAGES[scheme]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        raise UserError(
            f"{label}: needs the package {package}. Run: pip install 'jaxsp[{scheme}]'."
        ) from None
    import fsspec

    # without caches, which would hide what other machines write
    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)


def _to_info(info: dict[str, Any]) -> ObjectInfo:
    version = info.get("ETag") or info.get("etag") or info.get("updated") or ""
    return ObjectInfo(size=info["size"], version=str(version).strip('"'))
