"""Source files: found by name, glob or URL, and read as records; a truncated file is an error.

Those in object stores are downloaded once, and read from the disk.
"""

import contextlib
import csv
import functools
import glob
import hashlib
import io
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import filelock
import pyarrow as pa

from jaxsp.core import errors, paths, urls
from jaxsp.core import files as core_files
from jaxsp.core.errors import UserError
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import columnar, json_records
from jaxsp.data.ingest.columnar import LocatedRecord, Select
from jaxsp.system import distributed
from jaxsp.system.object_store import ObjectStore

TEXT_SUFFIXES = ".txt .md .text .rst .tex .html .htm .xml .log .py .yaml .yml".split()
"""Suffixes of plain text; a missing file with such a name is not looked up on the hub."""

CODECS = {".gz": "gzip", ".zst": "zstd"}

_UNSUPPORTED_SUFFIXES = """.zip .xz .bz2 .lz4 .snappy .tar .tgz .7z .rar .npy .npz .pkl .pickle .pt
    .pth .bin .safetensors .h5 .pdf .docx .xlsx .epub .db .sqlite .orc .avro .feather .tfrecord
    .array_record""".split()
"""Suffixes of files that would be nonsense as plain text."""

_CHUNK_BYTES = 2**20

_MAX_CELL_CHARS = 2**30
"""Limit of a csv cell: a quote without its end makes one cell of the rest of the file."""


def _read_text(file: str, select: Select) -> Iterator[LocatedRecord]:
    with _open_decompressed(file) as stream:
        document = stream.read()
    try:
        yield "", {"text": document.decode("utf-8-sig")}, None
    except UnicodeDecodeError as error:
        yield "", None, f"is not UTF-8 text ({error})."


def _read_json(file: str, select: Select) -> Iterator[LocatedRecord]:
    is_array = False
    if split_suffix(file)[0] == ".json":  # in .jsonl, a line with an array is one bad record
        with _open_decompressed(file) as stream:
            blocks = iter(lambda: stream.read(4096), b"")
            first_bytes = (block.strip(b"\xef\xbb\xbf \t\r\n")[:1] for block in blocks)
            is_array = next(filter(None, first_bytes), b"") == b"["
    with _open_decompressed(file) as stream:
        if is_array:
            text = stream.read().decode("utf-8-sig", errors="surrogateescape")
            for number, record, problem in json_records.read_array(text):
                yield f"record {number}", record, problem
        else:
            for number, record, problem in json_records.read_lines(stream):
                yield f"line {number}", record, problem


def _read_csv(file: str, select: Select, *, delimiter: str) -> Iterator[LocatedRecord]:
    csv.field_size_limit(_MAX_CELL_CHARS)  # applies to this process; Python's default is 131,072
    with _open_decompressed(file) as stream:
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        table = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(table, [])
        if not names:
            raise UserError("its first line is empty. It must name the columns.")
        if len(set(names)) < len(names):
            raise UserError("its first line names a column twice. Rename one of them.")
        line = table.line_num + 1
        for cells in table:
            place = f"line {line}"
            line = table.line_num + 1
            if len(cells) == len(names):
                record = dict(zip(names, cells, strict=True))
                yield place, record, json_records.utf8_problem("".join(cells))
            elif cells:
                problem = f"has {len(cells)} cells, but the first line names {len(names)} columns."
                yield place, None, problem


class FileType(NamedTuple):
    """A type of file that holds records."""

    name: str
    read: Callable[[str, Select], Iterator[LocatedRecord]]
    is_compressible: bool = True


TEXT = FileType("text", _read_text)

_JSON = FileType("json", _read_json)

FILE_TYPES = {
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".json": _JSON,
    ".csv": FileType("csv", functools.partial(_read_csv, delimiter=",")),
    ".tsv": FileType("csv", functools.partial(_read_csv, delimiter="\t")),
    ".parquet": FileType("parquet", columnar.read_parquet, is_compressible=False),
    ".arrow": FileType("arrow", columnar.read_arrow, is_compressible=False),
}
"""File types by suffix; any other file is plain text."""


def split_suffix(file: str) -> tuple[str, str | None]:
    """Returns the suffix that names a file's type, and the codec that compresses it."""
    path = pathlib.PurePath(file.lower())
    codec = CODECS.get(path.suffix)
    return (pathlib.PurePath(path.stem).suffix if codec else path.suffix), codec


def detect_file_type(file: str) -> FileType:
    """Returns the type that a file's name stands for.
    Raises: UserError if files of this name are not supported."""
    suffix, codec = split_suffix(file)
    file_type = FILE_TYPES.get(suffix, TEXT)
    codec_suffix = pathlib.Path(file).suffix if codec else ""
    if suffix in _UNSUPPORTED_SUFFIXES or (codec and not file_type.is_compressible):
        raise UserError(
            f"{file}: {suffix}{codec_suffix.lower()} files are not supported. Convert to .jsonl, "
            ".parquet or plain text."
        )
    if codec and not suffix:
        example = f"{file.removesuffix(codec_suffix)}.jsonl{codec_suffix}"
        raise UserError(
            f"{file}: its name does not show what is compressed. Rename it to {example} if it is "
            "lines of JSON."
        )
    return file_type


def read_files(files: Sequence[str], select: Select) -> Iterator[LocatedRecord]:
    """Yields every record of files in order: see `read_file`."""
    for file in files:
        yield from read_file(file, select)


def read_file(file: str, select: Select, *, name: str | None = None) -> Iterator[LocatedRecord]:
    """Yields every record of a file in order; those that cannot be read have a problem instead.
    Args: name: the file's name in places and errors, if it has another one.
    Raises: UserError naming the file, and the last record before the damage."""
    return columnar.locate_records(name or file, _read_file(file, select))


def _read_file(file: str, select: Select) -> Iterator[LocatedRecord]:
    place = ""
    try:
        size = os.path.getsize(file)
        if split_suffix(file)[1] and not size:
            raise UserError(
                "is empty, but a compressed file has a header. Copy or create it again."
            )
        if size < 1024 and pathlib.Path(file).read_bytes().startswith(b"version https://git-lfs"):
            raise UserError("is a git-lfs pointer, not the file. Run git lfs pull.")
        for located in detect_file_type(file).read(file, select):
            place = located[0]
            yield located
    except UserError:
        raise
    except PermissionError:
        raise UserError(
            "no permission to read it. Change its permissions, or leave it out."
        ) from None
    # pyarrow's errors are ValueErrors or OSErrors
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        after = f"after {place}" if place else "before the end of its first record"
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"is broken {after} ({reason}). Copy or create it again: the number of missing records "
            "is unknown."
        ) from None


@contextlib.contextmanager
def _open_decompressed(file: str) -> Iterator[io.BufferedReader]:
    codec = split_suffix(file)[1]
    if codec is None:
        with open(file, "rb") as stream:
            yield stream
        return
    with pa.OSFile(file, "rb") as compressed:
        # unlike zlib, pyarrow reports a truncated stream
        decompressed = pa.CompressedInputStream(compressed, codec)
        with io.BufferedReader(decompressed, _CHUNK_BYTES) as stream:
            yield stream


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


def common_file_type(files: Sequence[str], source: Source) -> FileType:
    """Returns the type of all files.
    Raises: UserError if they have several types, or cannot contain the source's format."""
    examples = {detect_file_type(file).name: file for file in files}
    if len(examples) > 1:
        raise UserError(
            f"matches files of several types, such as {' and '.join(sorted(examples.values()))}. "
            "Make each type a source of its own."
        )
    file_type = detect_file_type(files[0])
    if file_type is TEXT and source.required != ("text",):
        raise UserError(
            f"plain text has no {errors.format_choices(source.required)}. Use format: text, "
            "or a .jsonl or .parquet file."
        )
    return file_type


class StoredFiles:
    """Files in an object store that a URL or a glob stands for, sorted.
    Raises: UserError if there is none, or if the store cannot be used."""

    def __init__(self, url: str):
        urls.check(url)
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

    def read(self, select: Select) -> Iterator[LocatedRecord]:
        """Yields every record of the files, which are downloaded if this version never was, or if
        the downloaded file is damaged. Places and errors name URLs instead of the downloaded
        files."""
        for url in self.versions:
            yield from read_file(str(self._download(url)), select, name=url)

    def _download(self, url: str) -> pathlib.Path:
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
        return path
