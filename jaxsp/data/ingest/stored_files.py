"""Source files in object stores: found by URL or glob, downloaded once, and read from the disk."""

import dataclasses
import glob
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import filelock

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import files, urls
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import source_files
from jaxsp.data.ingest.columnar import LocatedRecord, RecordColumns
from jaxsp.processes import distributed
from jaxsp.storage.object_store import ObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFiles:
    """Files of a source in an object store."""

    store: ObjectStore
    objects: dict[str, dict[str, Any]]
    """Entry of the store for each file, by its URL."""

    @property
    def identity(self) -> list[tuple[str, int, str]]:
        """Values that change when a file does."""
        return [(url, info["size"], _version(info)) for url, info in self.objects.items()]

    def read(self, columns: RecordColumns) -> Iterator[LocatedRecord]:
        """Yields every record of the files, which are downloaded if this version never was, or if
        the downloaded file is damaged.

        Places and errors name URLs instead of the downloaded files.
        """
        for url, info in self.objects.items():
            path = str(self._download(url, info))
            try:
                for place, record, problem in source_files.read_file(path, columns):
                    yield place.replace(path, url, 1), record, problem
            except UserError as error:
                raise UserError(text.replace(path, url) for text in error.problems) from None

    def _download(self, url: str, info: dict[str, Any]) -> pathlib.Path:
        path = _cached_path(url, info)
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f"{path.name}.lock")):
            if not files.is_intact(path):
                if path.exists():
                    distributed.log(f"{path} IS DAMAGED; it is downloaded again from {url}")
                name = url.removeprefix(f"{self.store.url}/")
                self.store.download({name: path}, {name: info["size"]})
                files.write_checksum(path)
        return path


def find(source: SourceConfig) -> StoredFiles:
    """Finds the files that a URL or a glob stands for, sorted.

    Raises: UserError if there is none, or if the store cannot be used.
    """
    url = source.source
    urls.check(url)
    bucket = "/".join(url.split("/")[:3])
    store = ObjectStore(bucket)
    pattern = url.removeprefix(f"{bucket}/")
    objects = store.list(pattern, is_glob=glob.has_magic(pattern))
    if not glob.has_magic(pattern):
        objects = {name: info for name, info in objects.items() if name == pattern}
    if not objects:
        raise UserError(
            "no object matches. Name objects, for example "
            f"{url.rstrip('/') if not glob.has_magic(url) else bucket}/*.jsonl; `*` stays in one "
            "folder, `**` includes subfolders."
        )
    return StoredFiles(
        store=store, objects={f"{bucket}/{name}": objects[name] for name in sorted(objects)}
    )


def _cached_path(url: str, info: dict[str, Any]) -> pathlib.Path:
    """Path of one version of an object, with the object's name: its suffix tells the type."""
    import datasets

    version = f"{url} {info['size']} {_version(info)}"
    digest = hashlib.sha256(version.encode()).hexdigest()[:32]
    root = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / "objects"
    return root / digest / url.rpartition("/")[2]


def _version(info: dict[str, Any]) -> str:
    """Value that changes when an object is written with other content: its ETag."""
    version = info.get("ETag") or info.get("etag") or info.get("updated") or ""
    return str(version).strip('"')
