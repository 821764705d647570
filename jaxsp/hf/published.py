"""Sizes of published models (published.yaml), for plans if the hub gives no config.json.

They are facts, without weights or a tokenizer: training never uses them.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.config import yaml_io
from jaxsp.core import errors
from jaxsp.core.errors import UserError, at
from jaxsp.hf import folder, model_config
from jaxsp.hf.folder import HubError
from jaxsp.hf.model_source import ModelSourceConfig

DEADLINE_S = 6.0
"""Longest wait for the hub before published sizes are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedModel:
    name: str
    fields: dict[str, Any]
    billion_params: float
    """Published number of parameters."""
    source: str
    """Day and address of the document that has the sizes."""


@functools.cache
def read_models() -> dict[str, PublishedModel]:
    content = yaml_io.load(pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    models = {}
    for family, billions, *numbers, source, names in content["models"]:
        fields = content["families"][family] | dict(zip(content["columns"], numbers, strict=True))
        text = f"read on {content['read_date']} from {content['sources'][source]}"
        for name in names.split():
            models[name] = PublishedModel(
                name=name, fields=fields, billion_params=billions, source=text
            )
    return models


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a config's model, for planning."""

    model: ModelConfig
    fields: dict[str, Any]
    """Fields of its config.json, with the changes of model.rope."""
    published: PublishedModel | None = None
    """The published sizes if they are used in place of the model's own config.json."""
    note: str = ""
    """First line of the output if published sizes are used; empty otherwise."""

    @property
    def overrides(self) -> list[str]:
        """Changes of the config that use published sizes; none if they are not used."""
        if self.published is None:
            return []
        return ["model.source=null", f"model.config={json.dumps(self.published.fields)}"]


def read_sizes(
    model: ModelSourceConfig, *, row_tokens: int | None = None, teacher: str | None = None
) -> ModelSizes:
    """Reads the sizes of a config's model: published ones only if the hub does not give them.

    Args: teacher: folder or hub name of the objective's teacher, whose sizes are the model's
        `teacher`.
    Raises: UserError if there is no such folder or model, or nothing about it is known.
    """
    name = str(model.source)
    published = None
    note = ""
    try:
        fields, where = model_config.read_fields(model, deadline_s=DEADLINE_S)
    except HubError as error:
        published = read_models().get(name)
        if published is None and folder.has_parent(name):
            raise
        if published is None:
            problem = f"model.source = {name}: {error.reason}, and has no published sizes."
            near = errors.did_you_mean(name, read_models())
            raise UserError(f"{problem}{near} Give a folder with its config.json.") from None
        note = f"PUBLISHED SIZES of {name}, because {error.reason}; {published.source}"
        where = f"published sizes of {name}"
        with at(where):
            fields = model_config.resolve_fields(published.fields, model)
    with at(where):
        sizes = model_config.parse_model_config(fields, row_tokens=row_tokens)
    if teacher is not None:
        try:
            read = read_sizes(ModelSourceConfig(source=teacher), row_tokens=row_tokens)
        except UserError as error:
            raise UserError(
                problem.replace("model.source", "objective.teacher", 1)
                for problem in error.problems
            ) from None
        sizes = dataclasses.replace(sizes, teacher=read.model)
        note = "\n".join(filter(None, (note, read.note)))
    return ModelSizes(model=sizes, fields=fields, published=published, note=note)
