"""A model's Hugging Face folder: on this machine, or on the hub and from then on in its cache. Nothing in it is ever run."""

import dataclasses
import json
import pathlib
import queue
import shutil
import threading
from collections.abc import Callable, Iterable
from typing import Any

import huggingface_hub
import huggingface_hub.errors as hub

from jaxsp.core import errors, paths
from jaxsp.core.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
"""Says which tensor lies in which file, where there are several."""

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.tiktoken",
    "tekken.json",
    "tokenizer.model*",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""What belongs to a model beside its weights: config, generation config, tokenizer, chat template."""


class HubError(UserError):
    """The hub cannot be reached, or refuses a model to this login."""

    def __init__(self, problem: str, *, reason: str):
        super().__init__(problem)
        self.reason = reason
        """The reason without suggestions, in the middle of a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder that is there; its weights may still be on the hub."""

    source: str
    """What the user called it."""
    field: str
    """Where the user wrote that."""
    path: pathlib.Path
    config_fields: dict[str, Any]
    """Of its config.json."""
    is_on_hub: bool = False

    def download_files(self, names: Iterable[str]) -> None:
        """Downloads those of these files that the hub has, if the folder is the hub's; the cache keeps them."""
        if self.is_on_hub:
            # a snapshot's folder is called after its commit: the files that follow are of the same
            _download(self.source, names, field=self.field, revision=self.path.name)


def find(
    source: str,
    *,
    field: str = "model.source",
    names: tuple[str, ...] = (*_SMALL_FILES, INDEX_FILE),
    deadline_s: float | None = None,
) -> ModelFolder:
    """Finds a folder, or else the hub's model of that name, and downloads files of these names.

    Args:
        names: names and patterns of files to download; weights are not among them.
        deadline_s: longest wait for the hub; None: no limit.
    Raises:
        HubError if the hub cannot be reached or refuses the model; other UserError if there is no
        such folder or model, or it has no config.json.
    """
    path = paths.expand_user(source, field=field)
    asked = f"{field} = {source}"
    if path.exists() and not path.is_dir():
        raise UserError(
            f"{asked}: is a file. Give the folder with the model's config.json: {path.parent}."
        )
    on_hub = not path.is_dir()
    if on_hub and paths.is_path(source):
        raise UserError(f"{asked}: {_missing_problem(path)}")
    if on_hub:
        try:
            path = _run_with_deadline(
                deadline_s,
                lambda: _download(source, names, field=field, revision=None),
                cached=lambda: _cached_snapshot(source),
                asked=asked,
            )
        except HubError as error:
            if not has_parent(source):
                raise
            raise HubError(f"{asked}: {_missing_problem(path)}", reason=error.reason) from None
    if not (path / "config.json").is_file():
        complete = (
            f" If a download was cut short, complete it with: hf download {source}."
            if on_hub
            else ""
        )
        raise UserError(
            f"{asked}: {path} holds no config.json. Give a folder that transformers loads.{complete}"
        )
    fields = read_json(path / "config.json", error_prefix=asked)
    return ModelFolder(
        source=source, field=field, path=path, config_fields=fields, is_on_hub=on_hub
    )


def has_parent(source: str) -> bool:
    """True if a name can be a folder because its parent folder exists."""
    return pathlib.Path(source).expanduser().parent.is_dir()


def _missing_problem(path: pathlib.Path) -> str:
    """The problem of a folder that is not there, and what to give."""
    folders = [file.parent for file in path.parent.glob("*/config.json")]
    known = {folder.name: str(folder) for folder in folders}
    return (
        f"there is no folder {path.absolute()}. Give a folder with the model's config.json, or the "
        f"name of a model on the hub, such as Qwen/Qwen3-0.6B.{errors.did_you_mean(path.name, known)}"
    )


def _cached_snapshot(source: str) -> pathlib.Path | None:
    """The snapshot of a model in the hub's cache, or None."""
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(source, local_files_only=True))
    except (OSError, ValueError):
        return None


def _run_with_deadline(
    deadline_s: float | None,
    download: Callable[[], pathlib.Path],
    *,
    cached: Callable[[], pathlib.Path | None],
    asked: str,
) -> pathlib.Path:
    """Returns the folder that a function downloads, or the cached one if that takes too long.

    Raises: HubError if it takes longer and nothing is cached.

    huggingface_hub sets no timeout for its first request, and no timeout covers a name server that
    does not answer. The thread goes on; the process does not wait for it.
    """
    if deadline_s is None:
        return download()
    results: queue.Queue[pathlib.Path | Exception] = queue.Queue()

    def run() -> None:
        try:
            results.put(download())
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=deadline_s)
    except queue.Empty:
        if (folder := cached()) is not None and (folder / "config.json").is_file():
            return folder
        reason = f"the hub cannot be reached (no answer in {deadline_s:g} s)"
        raise HubError(f"{asked}: {reason}. Try again, or give a folder.", reason=reason) from None
    if isinstance(result, Exception):
        raise result
    return result


def read_json(path: pathlib.Path, *, error_prefix: str) -> dict[str, Any]:
    """The fields of a JSON file. Raises: UserError where it holds none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{error_prefix}: {path} cannot be read as JSON: {error}. Copy or download it again."
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{error_prefix}: {path} holds no fields. Copy or download it again.")
    return fields


def copy_small_files(
    folder: pathlib.Path, directory: pathlib.Path, *, exclude: tuple[str, ...] = ()
) -> None:
    """Copies everything that belongs to a model beside its weights: config, generation config, tokenizer, chat template."""
    for path in sorted(
        path for pattern in _SMALL_FILES for path in folder.glob(pattern) if path.is_file()
    ):
        name = path.relative_to(folder)
        if str(name) not in exclude:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            # the hub's cache is links into a store that nobody may write
            shutil.copyfile(path, directory / name)


def _download(
    source: str, names: Iterable[str], *, field: str, revision: str | None
) -> pathlib.Path:
    """The snapshot of a hub model in the cache, with the files of these names or patterns, as far as there are any."""
    asked = f"{field} = {source}"
    no_folder = "there is no such folder"
    example = "Give a folder with config.json, or a name such as Qwen/Qwen3-0.6B."
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(names))
        )
    except hub.HFValidationError:
        raise UserError(f"{asked}: {_missing_problem(pathlib.Path(source).expanduser())}") from None
    except hub.GatedRepoError:
        reason = "the hub shows it only to logins that have accepted its terms"
        raise HubError(
            f"{asked}: is gated. Accept its terms on https://huggingface.co/{source}, and log in: hf auth login.",
            reason=reason,
        ) from None
    except hub.RepositoryNotFoundError:
        raise UserError(
            f"{asked}: {no_folder}, and no such model on the hub. {example} If it is private, log in: hf auth login."
        ) from None
    except (hub.HTTPError, hub.XetDownloadError, OSError) as error:
        raise _download_error(error, source, asked=asked) from None


def _download_error(error: Exception, source: str, *, asked: str) -> UserError:
    """The problem of a download that failed for another reason than the model's name."""
    is_local = isinstance(error, hub.LocalEntryNotFoundError)
    cause = error.__cause__ if is_local and error.__cause__ else error
    if isinstance(cause, hub.HfHubHTTPError) and cause.response.status_code in (401, 403):
        reason = f"the hub refuses: {_first_line(cause)}"
        return HubError(
            f"{asked}: {reason}. Log in with a token that may read it: hf auth login.",
            reason=reason,
        )
    if not is_local:
        problem = f"{asked}: cannot be downloaded: {_first_line(cause)}. Try again: completed files are kept."
        if not isinstance(error, hub.HTTPError | hub.XetDownloadError):  # of this machine's disk
            return UserError(problem)
        return HubError(problem, reason=f"the download failed: {_first_line(cause)}")
    is_offline = (
        isinstance(cause, hub.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE
    )
    reason = (
        "HF_HUB_OFFLINE is set"
        if is_offline
        else f"the hub cannot be reached ({_first_line(cause)})"
    )
    advice = "Unset it" if is_offline else "Try again"
    return HubError(
        f"{asked}: there is no such folder, the hub's cache does not hold it (or not all of it), and {reason}. "
        f"{advice}, or give a folder: where there is a network, hf download {source} --local-dir FOLDER makes one.",
        reason=reason,
    )


def _first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
