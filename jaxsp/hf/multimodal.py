"""Multimodal checkpoints: the text model, which is trained, and the other parts.

The vision tower and the projector are left out, also of exports if transformers has a class for the
text model. For others (see `Family.has_other_parts`), the export is the multimodal model: the
trained text model, and the other parts as they are in the checkpoint that the run started from.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxsp.config.yaml_io import format_value
from jaxsp.core import errors
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import config_fields, families
from jaxsp.hf.tensors import StoredTensor

_PREFIXES = {
    "language_model.model.": "model.",  # on the hub, and what transformers 5 saves by default
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",  # the modules of transformers 5
}
"""Prefixes of the text model's tensors, and those of the text model without the other parts."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Small files of a multimodal model for images and videos."""


def find_family(fields: dict[str, Any]) -> families.Family | None:
    """Returns the multimodal family of a config.json; None for a text model."""
    name = fields.get("model_type")
    return families.MULTIMODAL_FAMILIES.get(name) if isinstance(name, str) else None


def is_multimodal(directory: pathlib.Path) -> bool:
    """True for a folder whose config.json is that of a multimodal model."""
    path = directory / "config.json"
    return path.is_file() and find_family(json.loads(path.read_bytes())) is not None


def read_text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model; that of a text model as it is.

    Of a multimodal one, missing sizes are transformers' defaults, and special tokens beside
    text_config replace those in it.

    Raises: UserError for fields that require what is not implemented.
    """
    family = find_family(fields)
    if family is None:
        return fields
    import transformers

    outer = {name: value for name, value in fields.items() if value is not None}
    defaults = transformers.AutoConfig.for_model(outer["model_type"]).to_dict()
    problems = ProblemCollector(config_fields.find_field_problems(outer, defaults))
    architecture = families.find_architecture(outer["model_type"])
    text = outer.get("text_config")
    if not isinstance(text, dict):
        problem = f".text_config = {format_value(text)}: must be a group of fields."
        raise UserError([*problems, problem])
    text_type = text.get("model_type") or family.text_types[0]
    if text_type not in family.text_types:
        problems.append(
            f".text_config.model_type = {format_value(text_type)}: is not implemented in "
            f"{architecture}. Use {errors.format_choices(family.text_types)}."
        )
    softcap = text.get("final_logit_softcapping")
    if outer["model_type"] == "gemma3" and softcap is not None:
        problems.append(
            f".text_config.final_logit_softcapping = {format_value(softcap)}: is not implemented: "
            f"{architecture} ignores it, and the exported text model would use it. Write null, or "
            "leave it out."
        )
    problems.raise_if_any()
    # transformers' defaults of the sizes that it lacks (Gemma 3 4B: the heads)
    defaults = transformers.AutoConfig.for_model(text_type).to_dict()
    required = config_fields.list_required_sizes(text_type)
    sizes = {name: defaults[name] for name in (*required, "max_position_embeddings")}
    text = sizes | text | {"model_type": text_type}
    text |= {name: outer[name] for name in config_fields.TOKEN_ID_FIELDS if name in outer}
    # Embedding and head are tied only if neither config has false. transformers 4 reads that of
    # text_config. transformers 5 reads the outer one, with the default true, and saves it, but it
    # does not tie a stored head that differs from the embedding. In its copies of Ministral 3 8B,
    # the two fields disagree, and the head is not tied.
    tie = "tie_word_embeddings"
    if tie in outer and (outer[tie] is False or text.get(tie) is None):
        text[tie] = outer[tie]
    return text


def select_tensors(
    stored: dict[str, StoredTensor], fields: dict[str, Any]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns the text model's tensors by their names in a text model's files, and the others.

    The others, which belong to known parts that are left out, keep the names that they are stored
    with. Tensors of no known part keep their names, and are in the first.

    Raises: UserError if two tensors have the same name in the export.
    """
    multimodal = find_family(fields)
    text = families.find_text_family(fields)
    other_parts = {*(multimodal or text).other_parts}
    if families.EXTRA_LAYERS in text.more_fields:
        given = fields.get(families.EXTRA_LAYERS)
        extra = range(1 if given is None else given)
        other_parts |= {f"layers.{fields['num_hidden_layers'] + number}" for number in extra}
    # transformers ignores the keys that layers with those of another layer have in some files
    text_fields = fields if multimodal is None else fields["text_config"]
    num_layers = text_fields.get("num_hidden_layers", 0)
    num_shared = text_fields.get("num_kv_shared_layers") or 0
    unused = {
        f"layers.{layer}.self_attn.{name}"
        for layer in range(num_layers - num_shared, num_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    prefixes = {} if multimodal is None else _PREFIXES
    selected: dict[str, StoredTensor] = {}
    left_out: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _find_part(name) in other_parts:
            left_out[name] = tensor
            continue
        prefix = next(filter(name.startswith, prefixes), "")
        text_name = prefixes.get(prefix, "") + name.removeprefix(prefix)
        if text_name.removeprefix("model.").rpartition(".")[0] in unused:
            continue
        text_name = ".".join(text.stored_names.get(part, part) for part in text_name.split("."))
        if text_name in selected:
            raise UserError(
                f"{text_name}: stored twice, one of them as {name}. Copy or download the folder "
                "again."
            )
        selected[text_name] = tensor
    return selected, left_out


def _find_part(name: str) -> str:
    """Part of a model that a stored tensor belongs to."""
    first, _, rest = name.removeprefix("model.").partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else first


def describe_left_out(names: Iterable[str], fields: dict[str, Any]) -> str:
    """Describes tensors that are not read; empty if all are. Args: names: their stored names."""
    parts = [_find_part(name) for name in names]
    if not parts:
        return ""
    start = "" if find_family(fields) is None else "text model only, "
    return f"{start}without {len(parts):,} tensors of {' and '.join(sorted({*parts}))}"


def add_other_fields(text: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole model's fields, of which text_config and shared ones beside it are `text`."""
    shared = ["dtype", "torch_dtype", "architectures", "tie_word_embeddings"]
    shared += [name for name in config_fields.TOKEN_ID_FIELDS if name in whole]
    text_config = {name: value for name, value in text.items() if name != "architectures"}
    outer = {name: text[name] for name in shared if name in text}
    return {**whole, **outer, "text_config": text_config}


def are_exported(fields: dict[str, Any]) -> bool:
    """True for a text model whose export has the other parts. Args: fields: of its config.json."""
    return families.FAMILIES[fields["model_type"]].has_other_parts


def describe_missing(fields: dict[str, Any], directory: pathlib.Path | None) -> str:
    """Describes the parts that an export needs; empty if the run's own model has them."""
    if not are_exported(fields) or (directory is not None and is_multimodal(directory)):
        return ""
    return (
        f"transformers has no class for {fields['model_type']}. An export needs the other parts of "
        "a multimodal checkpoint with a text model of the same sizes: give its folder to jaxsp "
        "export with --source."
    )
