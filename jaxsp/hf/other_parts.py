"""Parts of a multimodal checkpoint beside the text model, for exports that have all parts.

transformers has no class for some text models (see `Family.has_other_parts`). Their export is the
multimodal model: the trained text model, and the other parts as they are in the checkpoint that
the run started from.
"""

import dataclasses
import pathlib
from typing import Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import UserError
from jaxsp.hf import config_checks, text_part, weights
from jaxsp.hf.families import FAMILIES
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.tensors import StoredTensor
from jaxsp.model import decoder

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Small files of a multimodal model for images and videos."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherParts:
    """All of a multimodal checkpoint except the weights of its text model."""

    folder: pathlib.Path
    config_fields: dict[str, Any]
    """Fields of its config.json."""
    text_names: dict[str, str]
    """Name of each tensor of the text model in its files, by the name in a text model's."""
    tensors: dict[str, StoredTensor]
    """Tensors of the other parts, by their names in its files."""

    def add_fields(self, text: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of the whole model's config.json.

        Fields that it has beside text_config too are those of the text model.

        Args: text: fields of the text model's config.json.
        """
        shared = ("dtype", "torch_dtype", "architectures", "tie_word_embeddings")
        given_ids = [name for name in config_checks.TOKEN_ID_FIELDS if name in self.config_fields]
        text_config = {name: value for name, value in text.items() if name != "architectures"}
        return {
            **self.config_fields,
            **{name: text[name] for name in (*shared, *given_ids) if name in text},
            "text_config": text_config,
        }


def are_exported(fields: dict[str, Any]) -> bool:
    """True for a text model whose export has the other parts. Args: fields: of its config.json."""
    return FAMILIES[fields["model_type"]].has_other_parts


def describe_missing(fields: dict[str, Any], directory: pathlib.Path | None) -> str:
    """Describes the parts that an export needs; empty if the run's model has them.

    Args:
        fields: of the text model's config.json.
        directory: folder with the config.json that the run started from; None: random weights.
    """
    has_parts = directory is not None and text_part.is_multimodal(directory)
    if has_parts or not are_exported(fields):
        return ""
    return (
        f"transformers has no class for {fields['model_type']}. An export needs the other parts of "
        "a multimodal checkpoint with a text model of the same sizes: give its folder to jaxsp "
        "export with --source."
    )


def open_folder(source: ModelFolder, model: ModelConfig) -> OtherParts:
    """Opens the files of a multimodal checkpoint, after downloading those that are on the hub.

    Args: model: the trained text model; its adapters are left out.
    Raises: UserError if it is not a multimodal checkpoint, or its text model has other sizes.
    """
    if text_part.find_family(source.config_fields) is None:
        raise UserError(
            f"{source.field} = {source.source}: has only a text model, for which transformers has "
            "no class. Give a multimodal checkpoint, whose other parts are copied into the export: "
            "`jaxsp export --source`, or `Trainer.save(..., source=...)`."
        )
    reader = weights.open_folder(source, decoder.plain_table(model))
    source.download_files(PROCESSOR_FILES)
    return OtherParts(
        folder=source.path,
        config_fields=source.config_fields,
        text_names={
            name: tensor.name
            for name, tensor in reader.tensors.items()
            if isinstance(tensor, StoredTensor)  # no family with other parts has divided ones
        },
        tensors=reader.other_tensors,
    )
