"""Finds the files that a source's name or glob stands for."""

import collections
import glob
import os
import pathlib
import sysconfig
from collections.abc import Mapping, Sequence

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import errors, paths
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import formats, records
from jaxsp.data.ingest.records import FileType

TEXT_SUFFIXES = ".txt .md .text .rst .tex .html .htm .xml .log .py .yaml .yml".split()
"""Suffixes of plain text; a missing file with such a name is not looked up on the hub."""


def resolve_path(source: SourceConfig, *, field: str) -> pathlib.Path:
    """Returns a source's path or glob, with `~` and `{stdlib}` replaced."""
    path = source.source.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    return paths.expand_user(path, field=field)


def find_files(path: pathlib.Path, source: SourceConfig) -> list[str]:
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
    """Returns values that change when a file does, whatever the working directory.

    `cp -p`, `rsync -t` and tar set a file's mtime, but nothing sets its ctime. Inodes are left out:
    on some network file systems they differ between mounts.
    """
    identities = []
    for file in files:
        path = pathlib.Path(file).resolve()
        stat = path.stat()
        identities.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return identities


def common_file_type(files: list[str], source: SourceConfig) -> FileType:
    """Returns the type of all files.

    Raises: UserError if they have several types, or cannot contain the source's format.
    """
    examples = {records.detect_file_type(file).name: file for file in files}
    if len(examples) > 1:
        raise UserError(
            f"matches files of several types, such as {' and '.join(sorted(examples.values()))}. "
            "Make each type a source of its own."
        )
    file_type = records.detect_file_type(files[0])
    record_format = formats.FORMATS[source.format]
    if file_type is records.TEXT and not record_format.is_text:
        raise UserError(
            f"plain text has no {errors.format_choices(record_format.required)}. Use format: text, "
            "or a .jsonl or .parquet file."
        )
    return file_type


def check_no_duplicates(sources: Mapping[str, SourceConfig]) -> None:
    """Checks that no file is read twice in the same way, which would count its documents twice.

    Args:   sources: sources that can be read, by field, such as data.train.0.
    Raises: UserError naming the second source.
    """
    first_fields: dict[tuple[str, str], str] = {}
    # with other fields, or another split, a file has other documents
    settings = {
        field: source.model_dump_json(exclude={"source", "name", "weight"})
        for field, source in sources.items()
    }
    counts = collections.Counter(settings.values())
    for field, source in sources.items():
        if counts[settings[field]] == 1:
            continue  # avoids listing the files again, which takes seconds on network disks
        path = resolve_path(source, field=f"{field}.source")
        if not (path.is_file() or glob.has_magic(str(path))):
            continue
        for file in find_files(path, source):
            first = first_fields.setdefault((os.path.realpath(file), settings[field]), field)
            if first != field:
                raise UserError(
                    f"{field}.source = {source.source}: includes the file {file}, which {first} "
                    "also includes, so its documents would count twice. Leave it out of one of "
                    "them; to repeat a source, raise its weight."
                )
