"""Source files: found by name, glob or URL.

Those in object stores are downloaded once, and read from the disk.
"""

import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Sequence

import filelock

from jaxsp.core import errors, paths
from jaxsp.core import files as core_files
from jaxsp.core.errors import UserError
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import file_types
from jaxsp.system import distributed
from jaxsp.system.object_store import ObjectStore


def resolve_path(source: Source) -> pathlib.Path:
    """Returns a source's path or glob, with `~` and `{stdlib}` replaced."""
    path = source.source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    return paths.expand_user(path)


def find_files(path: pathlib.Path, source: Source) -> list[str]:
    """Returns the files that a path or a glob stands for, each once, sorted."""
    if path.is_dir():
        suffixes = (file.suffix for file in path.rglob("*.*") if file.is_file())
        example = f"{source.source.rstrip('/')}/**/*{next(suffixes, '.jsonl')}"
        raise UserError(f"is a folder. Name its files, for example {example}.")
    if path.is_file():
        return [str(path)]
    if not glob.has_magic(str(path)):
        raise UserError(
            f"no such file below {pathlib.Path.cwd()}. Give a file, a glob such as "
            "texts/**/*.txt, or the name of a data set on the hub, such as "
            "HuggingFaceH4/ultrachat_200k."
        )
    files = [file for file in glob.glob(str(path), recursive=True) if pathlib.Path(file).is_file()]
    if not files:
        raise UserError(
            f"no file matches below {pathlib.Path.cwd()}. `*` stays in one folder, `**` includes "
            "subfolders."
        )
    # `**/**` and symbolic links find a file under several names; keep the shortest
    files.sort(key=lambda file: (len(pathlib.PurePath(file).parts), file), reverse=True)
    return sorted({os.path.realpath(file): file for file in files}.values())


def file_identities(files: Sequence[str | pathlib.Path]) -> list[tuple[str, int, int, int]]:
    """Returns values that change when a file does, whatever the working directory. `cp -p`, `rsync
    -t` and tar set a file's mtime, but nothing sets its ctime. Inodes are left out: on some network
    file systems they differ between mounts."""
    resolved = [pathlib.Path(file).resolve() for file in files]
    stats = [(path, path.stat()) for path in resolved]
    return [(str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]


def common_file_type(files: Sequence[str], source: Source) -> str:
    """Returns the name of the type of all files.
    Raises: UserError if they have several types, or cannot contain the source's format."""
    examples = {file_types.detect_file_type(file).name: file for file in files}
    if len(examples) > 1:
        raise UserError(
            f"matches files of several types, such as {' and '.join(sorted(examples.values()))}. "
            "Make each type a source of its own."
        )
    (file_type,) = examples
    if file_type == file_types.TEXT.name and source.required != ("text",):
        raise UserError(
            f"plain text has no {errors.format_choices(source.required)}. Use format: text, "
            "or a .jsonl or .parquet file."
        )
    return file_type


class StoredFiles:
    """Files in an object store that a URL or a glob stands for, sorted.
    Raises: UserError if there is none, or if the store cannot be used."""

    def __init__(self, url: str):
        paths.check_url(url)
        bucket = "/".join(url.split("/")[:3])
        pattern = url.removeprefix(f"{bucket}/")
        self._store = ObjectStore(bucket)
        is_glob = glob.has_magic(pattern)
        self.versions = {}
        for name, info in sorted(self._store.list(pattern, is_glob=is_glob).items()):
            if is_glob or name == pattern:
                # an ETag changes when an object is written with other content
                version = info.get("ETag") or info.get("etag") or info.get("updated") or ""
                self.versions[f"{bucket}/{name}"] = (info["size"], str(version).strip('"'))
        """Values that change when a file does, by its URL."""
        if not self.versions:
            raise UserError(
                "no object matches. Name objects, for example "
                f"{bucket if glob.has_magic(url) else url.rstrip('/')}/*.jsonl; `*` stays in one "
                "folder, `**` includes subfolders."
            )

    def download(self, url: str) -> str:
        """Returns a file's path on the disk. It is downloaded if this version never was, or if the
        downloaded file is damaged."""
        import datasets

        size, version = self.versions[url]
        digest = hashlib.sha256(f"{url} {size} {version}".encode()).hexdigest()[:32]
        root = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / "objects"
        path = root / digest / url.rpartition("/")[2]  # the suffix determines the type
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f"{path.name}.lock")):
            if not core_files.is_intact(path):
                if path.exists():
                    distributed.log(f"{path} IS DAMAGED; it is downloaded again from {url}")
                name = url.removeprefix(f"{self._store.url}/")
                self._store.download({name: path}, {name: size})
                core_files.write_checksum(path)
        return str(path)
