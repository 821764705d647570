"""Sizes of published models, for plans and benchmarks if the hub does not give their config.json.

They are facts, without weights or a tokenizer: training never uses them.
"""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.config import yaml_io
from jaxsp.config.schema import ModelSourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config
from jaxsp.hf.folder import HubError

DEADLINE_S = 6.0
"""Longest wait for the hub before published sizes are used."""

_SIZE_COLUMNS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model."""

    name: str
    fields: dict[str, Any]
    billion_params: float
    """Published number of parameters."""
    source_url: str
    """Address of the document that has the sizes."""


@functools.cache
def _read_file() -> dict[str, Any]:
    """Content of published.yaml: read_date, sources, families and models."""
    text = pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml_io.load(text)
    return content


def read_date() -> str:
    """Day on which the sizes were read from their sources."""
    return str(_read_file()["read_date"])


@functools.cache
def read_models() -> dict[str, PublishedModel]:
    """Reads the published models, by name."""
    content = _read_file()
    models = {}
    for family, billions, *numbers, source, names in content["models"]:
        sizes = dict(zip(_SIZE_COLUMNS, numbers, strict=True))
        first, choices, last = re.split(r"[{}]", names) if "{" in names else (names, "", "")
        for choice in choices.split(","):
            name = f"{first}{choice}{last}"
            models[name] = PublishedModel(
                name=name,
                fields=content["families"][family] | sizes,
                billion_params=float(billions),
                source_url=content["sources"][source],
            )
    return models


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a config's model, for planning."""

    model: ModelConfig
    fields: dict[str, Any]
    """Fields of its config.json, with the changes of model.rope."""
    published: PublishedModel | None
    """The published sizes if they are used in place of the model's own config.json."""
    note: str
    """First line of the output if published sizes are used; empty otherwise."""

    @property
    def overrides(self) -> list[str]:
        """Changes of the config that use published sizes; none if they are not used."""
        if self.published is None:
            return []
        return ["model.source=null", f"model.config={json.dumps(self.published.fields)}"]


def read_sizes(model: ModelSourceConfig, *, row_tokens: int | None = None) -> ModelSizes:
    """Reads the sizes of a config's model.

    Published sizes are used only if the hub cannot be reached within DEADLINE_S, or refuses the
    model to this login.

    Args:
        row_tokens: length of the rows, for RoPE that depends on it.
    Raises: UserError if there is no such folder or model, or nothing about it is known.
    """
    name = str(model.source)
    models = read_models()
    published = None
    note = ""
    try:
        fields, field = model_config.read_fields(model, deadline_s=DEADLINE_S)
    except HubError as error:
        if name not in models and folder.has_parent(name):
            raise
        if name not in models:
            raise UserError(_unknown_problem(name, error.reason)) from None
        published = models[name]
        note = (
            f"PUBLISHED SIZES of {name}, because {error.reason}; "
            f"read on {read_date()} from {published.source_url}"
        )
        field = f"published sizes of {name}"
        fields = model_config.resolve_fields(published.fields, model, field=field)
    sizes = model_config.parse_model_config(fields, field=field, row_tokens=row_tokens)
    return ModelSizes(model=sizes, fields=fields, published=published, note=note)


def _unknown_problem(name: str, reason: str) -> str:
    """The problem of a model that is neither on the hub nor in the table."""
    known = " ".join(names for *_, names in _read_file()["models"])
    hint = errors.did_you_mean(name, read_models())
    return (
        f"model.source = {name}: {reason}, and jaxsp has no published sizes of it.{hint} Give a "
        f"folder with the model's config.json; on a machine with a network, `hf download {name} "
        f"config.json --local-dir FOLDER` makes one. Or use a model with published sizes: {known}."
    )
