"""A model's Hugging Face folder: on this machine, or on the hub and from then on in its cache. Nothing in it is ever run."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

import huggingface_hub
import huggingface_hub.errors as hub

from jaxsp.core import errors, paths

INDEX = "model.safetensors.index.json"
"""Says which tensor lies in which file, where there are several."""

_SMALL = (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that is there; its weights may still be on the hub."""

    source: str
    """What the user called it."""
    field: str
    """Where the user wrote that."""
    path: pathlib.Path
    fields: dict[str, Any]
    """Of its config.json."""
    on_hub: bool = False

    def fetch(self, names: Iterable[str]) -> None:
        """Downloads those of these files that the hub has, if the folder is the hub's; the cache keeps them."""
        if self.on_hub:
            # a snapshot's folder is called after its commit: the files that follow are of the same
            _download(self.source, names, field=self.field, revision=self.path.name)


def find(source: str, *, field: str = "model.source", names: tuple[str, ...] = (*_SMALL, INDEX)) -> Folder:
    """The folder of that name, else the hub's model of that name, of which files of these names are downloaded: no weights.

    Raises: UserError when there is neither, the hub does not give it, or it has no config.json.
    """
    path = paths.expand_user(source, field=field)
    asked = f"{field} = {source}"
    if path.exists() and not path.is_dir():
        raise errors.UserError(f"{asked}: is a file. Give the folder with the model's config.json: {path.parent}.")
    on_hub = not path.is_dir()
    if on_hub:
        path = _download(source, names, field=field, revision=None)
    if not (path / "config.json").is_file():
        complete = f" If a download was cut short, complete it with: hf download {source}." if on_hub else ""
        raise errors.UserError(f"{asked}: {path} holds no config.json. Give a folder that transformers loads.{complete}")
    fields = read_json(path / "config.json", asked=asked)
    return Folder(source=source, field=field, path=path, fields=fields, on_hub=on_hub)


def read_json(path: pathlib.Path, *, asked: str) -> dict[str, Any]:
    """The fields of a JSON file. Raises: UserError where it holds none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise errors.UserError(f"{asked}: {path} cannot be read as JSON: {error}. Copy or download it again.") from None
    if not isinstance(fields, dict):
        raise errors.UserError(f"{asked}: {path} holds no fields. Copy or download it again.")
    return fields


def copy_small_files(folder: pathlib.Path, directory: pathlib.Path, *, but: tuple[str, ...] = ()) -> None:
    """Copies everything that belongs to a model beside its weights: config, generation config, tokenizer, chat template."""
    for path in sorted(path for pattern in _SMALL for path in folder.glob(pattern) if path.is_file()):
        name = path.relative_to(folder)
        if str(name) not in but:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            # the hub's cache is links into a store that nobody may write
            shutil.copyfile(path, directory / name)


def _download(source: str, names: Iterable[str], *, field: str, revision: str | None) -> pathlib.Path:
    """The snapshot of a hub model in the cache, with the files of these names or patterns, as far as there are any."""
    asked = f"{field} = {source}"
    no_folder, example = "there is no such folder", "Give a folder with config.json, or a name such as Qwen/Qwen3-0.6B."
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(names)))
    except hub.HFValidationError:
        raise errors.UserError(f"{asked}: {no_folder}, and no model on the hub can be called so. {example}") from None
    except hub.GatedRepoError:
        raise errors.UserError(
            f"{asked}: is gated. Accept its terms on https://huggingface.co/{source}, and log in: hf auth login."
        ) from None
    except hub.RepositoryNotFoundError:
        raise errors.UserError(
            f"{asked}: {no_folder}, and no such model on the hub. {example} If it is private, log in: hf auth login."
        ) from None
    except (hub.HTTPError, hub.XetDownloadError, OSError) as error:
        cause = error.__cause__ if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ else error
        if isinstance(cause, hub.HfHubHTTPError) and cause.response.status_code in (401, 403):
            problem = f"the hub refuses: {_reason(cause)}. Log in with a token that may read it: hf auth login."
        elif isinstance(error, hub.LocalEntryNotFoundError):
            offline = isinstance(cause, hub.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE
            why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({_reason(cause)})"
            problem = (
                f"{no_folder}, the hub's cache does not hold it (or not all of it), and {why}. "
                f"{'Unset it' if offline else 'Try again'}, or give a folder: where there is a network, "
                f"hf download {source} --local-dir FOLDER makes one."
            )
        else:
            problem = f"cannot be downloaded: {_reason(cause)}. Try again: what is there already is kept."
        raise errors.UserError(f"{asked}: {problem}") from None


def _reason(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
