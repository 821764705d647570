"""Reads data sets of `datasets`, saved in folders or on the hub; never runs their code."""

import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import huggingface_hub
import huggingface_hub.errors as hub

from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.data import file_types
from jaxsp.data.file_types import LocatedRecord, Select
from jaxsp.data.source import Source

if TYPE_CHECKING:
    import datasets

_NO_SUCH_FILE = "there is no such file or folder"
_EXAMPLE = (
    "Give a file, a glob such as texts/**/*.txt, or a name such as HuggingFaceH4/ultrachat_200k."
)

_SUBSETS_PATTERN = re.compile(
    r"(?:available configs: |Available: |configs in the cache: |configurations in the cache: )"
    r"\[?(.*?)(?:\]|$)",
    re.MULTILINE,
)
"""List of existing subsets in an error of `datasets` for an unknown or missing subset."""

UNKNOWN_LENGTH = 2**40
"""Number of records of a split that is not read yet."""


def is_saved_dataset(path: pathlib.Path) -> bool:
    """Returns True if `save_to_disk` wrote this folder."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


@contextlib.contextmanager
def hide_progress_without_terminal() -> Iterator[None]:
    """Disables progress bars of `datasets` if stderr is not a terminal: they would fill logs."""
    import datasets

    hides = not (sys.stderr.isatty() or datasets.are_progress_bars_disabled())
    if hides:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            datasets.enable_progress_bars()


def open_saved_dataset(path: pathlib.Path, source: Source) -> "datasets.Dataset":
    """Opens the data set in a folder, or its split `source.split`."""
    import datasets

    try:
        _check_names_own_files(path)
        loaded = datasets.load_from_disk(str(path))
    except UserError:  # a ValueError, which the next branch would describe once more
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = errors.first_line(error)
        raise UserError(f"cannot be loaded: {reason}. Copy or create it again.") from None
    if isinstance(loaded, datasets.Dataset):
        loaded = datasets.DatasetDict({str(loaded.split or "train"): loaded})
    return _choose_split(loaded, source)


def _check_names_own_files(folder: pathlib.Path) -> None:
    """Raises: UserError if a data set names files outside its folder; `datasets` opens them."""

    def read_json(path: pathlib.Path) -> dict[str, Any]:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    splits = read_json(folder / "dataset_dict.json").get("splits", [])
    names = [*splits]
    for split_folder in [folder, *(folder / str(split) for split in splits)]:
        state = read_json(split_folder / "state.json")
        names += [file["filename"] for file in state.get("_data_files", [])]
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise UserError(
                f"cannot be loaded: it names {name}, which is not in its folder. Copy or create it "
                "again."
            )


@hide_progress_without_terminal()
def open_hub_dataset(source: Source) -> "datasets.Dataset":
    """Opens a data set on the hub, downloaded once, or its split `source.split`."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(
            source.source, name=source.subset, revision=source.revision
        )
        # without a network, `datasets` uses any cached revision
        is_cached = type(builder).__name__ == "Cache"
        if source.revision and is_cached and builder.hash != source.revision:
            raise UserError(
                f".revision = {source.revision}: the hub cannot be reached, and the cache has "
                f"{builder.hash}. Use that, or try again with a network."
            )
        builder.download_and_prepare()
        splits = builder.as_dataset()
    except UserError:  # a ValueError, which the next branch would describe once more
        raise
    except (
        datasets.exceptions.DatasetsError,
        hub.HTTPError,
        hub.HFValidationError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        raise UserError(_describe_failure(error, source)) from None
    assert isinstance(splits, datasets.DatasetDict)
    return _choose_split(splits, source)


def read_records(dataset: "datasets.Dataset", select: Select) -> Iterator[LocatedRecord]:
    """Yields records with the selected columns: see `file_types.read_batches`."""
    names = dataset.column_names
    selected = dataset.select_columns(select(names) or names[:1])
    tables = selected.with_format("arrow").iter(1000)
    batches = (batch for table in tables for batch in table.to_batches())
    yield from file_types.read_batches(batches, names, select)


def _choose_split(splits: "datasets.DatasetDict", source: Source) -> "datasets.Dataset":
    """Split or part `source.split`, such as train[:95%], without copying; without `source.split`,
    the only split, or `train`. Raises: UserError."""
    import datasets

    names = list(splits)
    if not names:
        raise UserError("has no splits, so no records. Save it again, or use another data set.")
    if source.split is not None and source.split not in splits:
        lengths = {name: len(split) for name, split in splits.items()}
        parts = [
            splits[name]
            if (start, stop) == (0, lengths[name])
            else splits[name].select(range(start, stop))
            for name, start, stop in resolve_ranges(source.split, lengths)
        ]
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    split = source.split or (names[0] if len(names) == 1 else "train")
    if split not in splits:
        raise UserError(f"has several splits. Set split to {errors.format_choices(names)}.")
    return splits[split]


def resolve_ranges(spec: str, lengths: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns split, start and stop of each part in `spec`, by the rules of `datasets`.
    Args: lengths: number of records of each split.
    Raises: UserError if `spec` is not valid, or names an unknown split or an empty part."""
    import datasets

    try:
        instruction = datasets.ReadInstruction.from_spec(spec).to_absolute(dict(lengths))
    except ValueError as error:
        raise UserError(
            f".split = {spec}: {errors.first_line(error)}. Use {errors.format_choices(lengths)}, "
            "or a part, such as train[:95%] or train[100:200]."
        ) from None
    parts = [(part.splitname, part.from_, part.to) for part in instruction]
    for name, start, stop in parts:
        if start >= stop:
            available = f", {name} has {lengths[name]:,}" if lengths[name] < UNKNOWN_LENGTH else ""
            raise UserError(
                f".split = {spec}: selects no record{available}. Use for example {name}[:95%]."
            )
    return parts


def _describe_failure(error: Exception, source: Source) -> str:
    """Problem and suggestion for an error of `datasets` or of the hub."""
    import datasets

    name = source.source
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__  # the error itself gives no reason
    reason = " ".join(str(error).split())[:300]
    known = _SUBSETS_PATTERN.search(str(error))
    if known:
        problem = "has several subsets"
        if source.subset:
            problem = f".subset = {source.subset}: there is no such subset"
        subsets = errors.format_choices(word.strip(" '\"") for word in known[1].split(","))
        return f"{problem}. Set subset to {subsets}."
    if "gated dataset" in reason:
        url = f"https://huggingface.co/datasets/{name}"
        return f"is gated. Accept its terms on {url}, and log in: hf auth login."
    if source.revision and reason.startswith("Revision"):
        return f".revision = {source.revision}: the data set has no such branch, tag or commit."
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return (
            f"{_NO_SUCH_FILE}, and no such data set on the hub. {_EXAMPLE} If it is private, log "
            "in: hf auth login."
        )
    download = f"hf download {name} --repo-type dataset --local-dir FOLDER"
    if isinstance(error, ConnectionError):
        is_offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if is_offline else "the hub cannot be reached"
        return (
            f"{_NO_SUCH_FILE}, the cache has no data set with this name, and {why}. With a "
            f"network: {download}."
        )
    if "scripts are no longer supported" in reason:
        return (
            "needs a script, and jaxsp runs no code of a data set. Use a data set of parquet or "
            "JSON files."
        )
    return f"cannot be loaded: {reason.rstrip('.')}. Try again, or give files: {download}."
