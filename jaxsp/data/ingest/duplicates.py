"""Check that no file is read by two sources in the same way."""

import collections
import glob
import os
from collections.abc import Mapping

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core import urls
from jaxsp.core.errors import UserError
from jaxsp.data.ingest import source_files, stored_files


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
        for file, identity in _list_files(source, field=f"{field}.source").items():
            first = first_fields.setdefault((identity, settings[field]), field)
            if first != field:
                raise UserError(
                    f"{field}.source = {source.source}: includes the file {file}, which {first} "
                    "also includes, so its documents would count twice. Leave it out of one of "
                    "them; to repeat a source, raise its weight."
                )


def _list_files(source: SourceConfig, *, field: str) -> dict[str, str]:
    """Returns the files of a source, each with a name that no other file has.

    Returns: nothing for folders and data sets on the hub.
    """
    if urls.is_url(source.source):
        return {url: url for url in stored_files.find(source).objects}
    path = source_files.resolve_path(source, field=field)
    if not (path.is_file() or glob.has_magic(str(path))):
        return {}
    return {file: os.path.realpath(file) for file in source_files.find_files(path, source)}
