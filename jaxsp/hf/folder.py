"""Finds a model's Hugging Face folder, local or on the hub. No code in it is ever run."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import huggingface_hub
import huggingface_hub.errors as hub

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError, at

INDEX_FILE = "model.safetensors.index.json"
"""File that maps tensors to files, if there are several."""

_CONFIG_FILE = "config.json"

_SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("*.tiktoken", "tekken.json", "tokenizer.model*", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""Files of a model besides its weights: configs, tokenizer, chat template."""


class HubError(UserError):
    """Raised if the hub cannot be reached, or refuses a model to this login."""

    def __init__(self, problem: str, *, reason: str):
        """Args: reason: without suggestions, as part of a sentence."""
        super().__init__(problem)
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A local folder; its weights may still be on the hub."""

    source: str
    """Path or hub name that the user gave."""
    field: str
    """Field of the config that has it."""
    path: pathlib.Path
    config_fields: dict[str, Any]
    is_on_hub: bool = False

    def download_files(self, names: Iterable[str]) -> None:
        """Downloads these files, if they exist and the folder is in the hub's cache."""
        if self.is_on_hub:
            # a snapshot's folder has the name of its commit, so the files are of the same commit
            with at(self.field, self.source):
                _download(self.source, names, revision=self.path.name)


def find(
    source: str,
    *,
    field: str = "model.source",
    names: tuple[str, ...] = (*_SMALL_FILES, INDEX_FILE),
    config_file: str = _CONFIG_FILE,
    deadline_s: float | None = None,
) -> ModelFolder:
    """Finds a folder, or else the hub's model of that name, and downloads files of these names.

    Args:
        names: names and patterns, by default of all files except weights.
        config_file: name of the file that the folder must have.
        deadline_s: longest wait for the hub; None: no limit.
    Raises: HubError; other UserError if there is no such folder or model, or no config file in it.
    """
    with at(field, source):
        path = files.expand_user(source)
        if path.exists() and not path.is_dir():
            raise UserError(f"is a file. Give the folder with {config_file}: {path.parent}.")
        is_on_hub = not path.is_dir()
        if is_on_hub and files.is_path(source):
            raise UserError(_missing_problem(path, config_file))
        try:
            if is_on_hub:
                path = _find_snapshot(source, names, deadline_s)
        except HubError as error:
            if not has_parent(source):
                raise
            raise HubError(_missing_problem(path, config_file), reason=error.reason) from None
        files.check_model_folder(path)
        if not (path / config_file).is_file():
            library = "transformers" if config_file == _CONFIG_FILE else "PEFT"
            problem = f"{path} contains no {config_file}. Give a folder that {library} loads."
            if is_on_hub:
                problem += (
                    f" If a download was interrupted, complete it with: hf download {source}."
                )
            raise UserError(problem)
        fields = read_json(path / config_file)
    return ModelFolder(
        source=source, field=field, path=path, config_fields=fields, is_on_hub=is_on_hub
    )


def has_parent(source: str) -> bool:
    """True if a name can be a folder because its parent folder exists."""
    return pathlib.Path(source).expanduser().parent.is_dir()


def _missing_problem(path: pathlib.Path, config_file: str = _CONFIG_FILE) -> str:
    """The problem of a missing folder, with a suggestion."""
    is_model = config_file == _CONFIG_FILE
    kind = "a model" if is_model else "an adapter"
    example = ", such as Qwen/Qwen3-0.6B" if is_model else ""
    names = [file.parent.name for file in path.parent.glob(f"*/{config_file}")]
    return (
        f"there is no folder {path.absolute()}. Give a folder with {kind}'s {config_file}, or the "
        f"name of {kind} on the hub{example}.{errors.did_you_mean(path.name, names)}"
    )


def _find_snapshot(source: str, names: tuple[str, ...], deadline_s: float | None) -> pathlib.Path:
    """Downloads; if it takes too long, returns the cached folder, or raises HubError without one.

    huggingface_hub sets no timeout for its first request, and no timeout covers a name server that
    does not answer. The thread goes on; the process does not wait for it.
    """
    if deadline_s is None:
        return _download(source, names)
    result: Future[pathlib.Path] = Future()

    def run() -> None:
        try:
            result.set_result(_download(source, names))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(timeout=deadline_s)
    except TimeoutError:
        with contextlib.suppress(OSError, ValueError):  # not in the cache
            cached = pathlib.Path(huggingface_hub.snapshot_download(source, local_files_only=True))
            if (cached / _CONFIG_FILE).is_file():
                return cached
        reason = f"the hub cannot be reached (no answer in {deadline_s:g} s)"
        raise HubError(f"{reason}. Try again, or give a folder.", reason=reason) from None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of a JSON file. Raises: UserError if it is not a JSON object."""
    try:
        fields = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON: {error}. Copy or download it again."
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} must be a JSON object. Copy or download it again.")
    return fields


def copy_small_files(
    folder: pathlib.Path,
    directory: pathlib.Path,
    *,
    patterns: tuple[str, ...] = _SMALL_FILES,
    exclude: tuple[str, ...] = (),
) -> None:
    """Copies files of a model, by default all except weights."""
    with at("cannot be copied"):
        files.check_model_folder(folder)
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        name = path.relative_to(folder)
        if path.is_file() and str(name) not in exclude:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            # not shutil.copy: files of the hub's cache may be read-only
            shutil.copyfile(path, directory / name)


def _download(source: str, names: Iterable[str], revision: str | None = None) -> pathlib.Path:
    """Downloads files of these names or patterns, as far as they exist; returns the snapshot."""
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(names))
        )
    except hub.HFValidationError:
        raise UserError(_missing_problem(pathlib.Path(source).expanduser())) from None
    except hub.GatedRepoError:
        raise HubError(
            f"is gated. Accept its terms on https://huggingface.co/{source}, and log in: hf auth "
            "login.",
            reason="the hub shows it only to logins that have accepted its terms",
        ) from None
    except hub.RepositoryNotFoundError:
        raise UserError(
            "there is no such folder, and no such model on the hub. Give a folder with "
            "config.json, or a name such as Qwen/Qwen3-0.6B. If it is private, log in: hf auth "
            "login."
        ) from None
    except (hub.HTTPError, hub.XetDownloadError, OSError) as error:
        is_missing_in_cache = isinstance(error, hub.LocalEntryNotFoundError)
        cause = error.__cause__ if is_missing_in_cache else None
        reason = f"the download failed: {errors.first_line(cause or error)}"
        if huggingface_hub.constants.HF_HUB_OFFLINE or isinstance(cause, hub.OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE is set"
        place = (
            "the model is not completely in the hub's cache, and " if is_missing_in_cache else ""
        )
        raise HubError(
            f"there is no such folder, {place}{reason}. Try again: completed files are kept. If it "
            "is private, log in: hf auth login. On a machine with a network, "
            f"hf download {source} --local-dir FOLDER makes a folder.",
            reason=reason,
        ) from None
