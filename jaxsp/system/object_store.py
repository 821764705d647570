"""Objects below a URL of an object store, read and written through fsspec."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxsp.core import files, units
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.system import distributed, output

WAIT_S = 5.0  # between two attempts; s3fs and gcsfs also wait before they report a failure
_NUM_TRANSFERS = 4  # files at a time: parts of each are in memory


def _request(method: Callable) -> Callable:
    """Decorates a method of ObjectStore that is repeated while the store is unreachable."""

    @functools.wraps(method)
    def call(self: "ObjectStore", *args: Any, **kwargs: Any) -> Any:
        deadline = None
        while True:
            self._transfers.relative_update(1)
            try:
                return method(self, *args, **kwargs)
            except UserError:
                raise
            except Exception as error:  # the libraries have no common class of errors
                text = output.redact(str(error)).strip().partition("\n")[0][:300].rstrip(" .:")
                reason = f"cannot be used: {text or type(error).__name__}"
                is_permanent = isinstance(error, FileNotFoundError | PermissionError)
            is_permanent = is_permanent and not self.is_in_run  # credentials may be renewed
            is_first = deadline is None
            deadline = deadline or time.monotonic() + self.patience_s
            if is_permanent or time.monotonic() + WAIT_S > deadline:
                if self.is_in_run:
                    raise NeedsAttentionError(f"{self.url}: {reason}. {self.advice}")
                raise UserError(f"{reason}. {self.advice}")
            if is_first:
                limit = units.format_seconds(self.patience_s)
                distributed.log(f"{self.url}: {reason}. Trying again for {limit}")
            time.sleep(WAIT_S)

    return call


class ObjectStore:
    """Objects below a URL, by their names relative to it. Several threads may use it."""

    def __init__(self, url: str):
        import fsspec
        from fsspec.implementations import dirfs

        self.url = url.rstrip("/")
        self.patience_s = 60.0
        self.is_in_run = False
        self.advice = "Check the URL, the credentials and the network."
        scheme, _, root = self.url.partition("://")
        self._bucket = root.partition("/")[0]
        try:  # without caches, which would hide what others write
            fs = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
        except ImportError:
            raise UserError(f"run pip install 'jaxsp[{scheme}]'.") from None
        self._fs = dirfs.DirFileSystem(root, fs)
        self._transfers = fsspec.Callback()
        self._transfers.branched = lambda *_, **__: self._transfers  # one for all files

    @property
    def progress(self) -> int:
        """Number that grows with each attempt of a request and with the bytes of files."""
        return self._transfers.value

    @_request
    def list(self, name: str = "", *, is_glob: bool = False) -> dict[str, dict[str, Any]]:
        """Returns all objects in a folder, the object of this name, or those of a glob."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            search = self._fs.glob if is_glob else self._fs.find
            found = search(name, detail=True)
        if not found and not self._fs.fs.exists(self._bucket):
            raise FileNotFoundError(f"the bucket {self._bucket} does not exist")
        if bad := [name for name in found if ".." in name.split("/")]:
            raise UserError(f"{self.url} has an object named {bad[0]}. Remove it.")
        return {name: info for name, info in found.items() if info["type"] == "file"}

    @_request
    def read(self, name: str) -> bytes:
        return self._fs.cat_file(name)

    def upload(self, folder: pathlib.Path, names: Iterable[str]) -> None:
        """Uploads files of a folder, those that exist."""
        for batch in _split(name for name in names if (folder / name).exists()):
            self._put(folder, batch)

    @_request
    def _put(self, folder: pathlib.Path, names: Sequence[str]) -> None:
        sources = [str(folder / name) for name in names]
        self._fs.put(sources, names, batch_size=_NUM_TRANSFERS, callback=self._transfers)

    def download(self, paths: Mapping[str, pathlib.Path], sizes: Mapping[str, int]) -> None:
        """Downloads objects. Args: paths: by the names of objects. sizes: of those that are whole
        only with this number of bytes."""
        for batch in _split(paths):
            self._get({name: paths[name] for name in batch}, sizes)

    @_request
    def _get(self, paths: Mapping[str, pathlib.Path], sizes: Mapping[str, int]) -> None:
        partial = {name: pathlib.Path(f"{paths[name]}{files.PARTIAL_SUFFIX}") for name in paths}
        targets = [str(path) for path in partial.values()]
        self._fs.get([*paths], targets, batch_size=_NUM_TRANSFERS)
        for name, path in partial.items():
            if path.stat().st_size != sizes.get(name, path.stat().st_size):
                raise OSError(f"{self.url}/{name} has changed while it was downloaded")
            path.replace(paths[name])

    @_request
    def delete(self, name: str) -> None:
        """Deletes an object, or all objects in a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(name, recursive=True)


def _split(names: Iterable[str]) -> list[list[str]]:
    """Batches of names, so that an outage repeats the transfers of one batch only."""
    ordered = sorted(names)
    starts = range(0, len(ordered), _NUM_TRANSFERS)
    return [ordered[start : start + _NUM_TRANSFERS] for start in starts]
