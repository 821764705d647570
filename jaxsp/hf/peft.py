"""Adapters in PEFT's format, both ways: adapter_config.json and adapter_model.safetensors.

Source: the files that PEFT 0.21 writes and reads (peft/tuners/lora/config.py,
peft/utils/save_and_load.py).
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.config import json_values
from jaxsp.config.json_values import POSITIVE, Rule
from jaxsp.config.yaml_io import format_value
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.hf import folder, tensors, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.tensors import StoredTensor
from jaxsp.hf.weights import WeightReader
from jaxsp.model import adapters, decoder
from jaxsp.model.adapter_config import SAVED_MODULES, AdapterConfig

CONFIG_FILE = "adapter_config.json"

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Beginning of the names of tensors, before the names of Hugging Face's files."""

_TEXT_PREFIX = "model.language_model."
"""Beginning of these names in a multimodal model, where a text model has `model.`."""

_SCORE = decoder.SCORE_NAME.rpartition(".")[0]

_READ_MODULES = SAVED_MODULES | {_SCORE: decoder.SCORE_NAME}
"""Modules that an adapter may train as a whole, and their tensors; reward models have a score."""


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(x, str) for x in value))


_RULES = {
    "peft_type": Rule(lambda x: x == "LORA", "LORA"),
    "r": Rule(lambda x: json_values.is_integer(x) and x > 0, "an integer of at least 1"),
    "lora_alpha": POSITIVE,
    "target_parameters": Rule(_are_names, "a list of names or null"),
    "modules_to_save": Rule(
        lambda x: _are_names(x) and _READ_MODULES.keys() >= _short_names(x),
        f"a list of {' and '.join(SAVED_MODULES)}, or null",
    ),
    # PiSSA, OLoRA and LoftQ change the base
    "init_lora_weights": Rule(
        lambda x: x in (True, False, "gaussian", "orthogonal", "eva", None),
        "one that leaves the base weights as they are. Convert the adapter to LoRA with PEFT's "
        "path_initial_model_for_weight_conversion",
    ),
}

_OTHER_FIELDS = {
    *("use_rslora", "use_dora", "ensure_weight_tying"),
    # the tensors in the file are those of the modules that these choose
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # the others do not change what a trained adapter computes
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("task_type", "lora_dropout", "megatron_core", "qalora_group_size"),
    *("runtime_config", "eva_config"),
}
"""Fields without a rule that an adapter may have."""


def _short_names(modules: list[str] | None) -> set[str]:
    return {name.rpartition(".")[2] for name in modules or ()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedAdapter:
    """Adapter section of a config, resolved for a model."""

    config: AdapterConfig
    """The section, in which every field has a value."""
    model: ModelConfig
    """The model with the adapters."""
    folder: ModelFolder | None
    """Folder of adapter.source; None without a source."""


def find(source: str) -> ModelFolder:
    """Finds the folder of adapter.source, or else the hub's adapter of that name."""
    names = (CONFIG_FILE, WEIGHTS_FILE)
    return folder.find(source, field="adapter.source", names=names, config_file=CONFIG_FILE)


def resolve(adapter: AdapterConfig, model: ModelConfig) -> ResolvedAdapter:
    """Reads the config of adapter.source, and adds the adapters to a model.

    Fields without a value get those of the source, or jaxsp's defaults.

    Raises: UserError with all fields that differ from the source's, and all that are unsupported.
    """
    source = None
    update: dict[str, Any] = {}
    if adapter.type != "none" and adapter.source is not None:
        source = find(adapter.source)
        with at(source.field, source.source):
            stored = _read_header(source)
            with at(CONFIG_FILE):
                update = _read_settings(source.config_fields, stored, model)
        given = {name: getattr(adapter, name) for name in ("type", "rank", "alpha", "use_rslora")}
        if adapter.targets is not None:
            given["targets"] = adapters.find_targets(model, adapter.targets)
        if adapter.target_parameters is not None:
            given["target_parameters"] = adapters.find_target_parameters(model, adapter)
        sort = lambda value: sorted(value) if isinstance(value, tuple) else value
        problems = ProblemCollector(
            f"adapter.{name} = {format_value(value)}: must be that of adapter.source, "
            f"{format_value(update[name])}. Leave it out."
            for name, value in given.items()
            if value is not None and sort(value) != sort(update[name])
        )
        problems.raise_if_any()
        saved = {*update["modules_to_save"], *adapter.modules_to_save}
        update["modules_to_save"] = tuple(name for name in SAVED_MODULES if name in saved)
    elif adapter.type != "none":
        rank = adapter.rank or adapters.DEFAULT_RANK
        alpha = adapters.DEFAULT_ALPHA_PER_RANK * rank
        update = {"rank": rank, "alpha": alpha, "use_rslora": False}
        update |= {"targets": "all-linear", "target_parameters": ()}
        update = {name: x for name, x in update.items() if getattr(adapter, name) is None}
    adapter = adapter.model_copy(update=update)
    return ResolvedAdapter(
        config=adapter, model=adapters.add_adapter(model, adapter), folder=source
    )


def _read_settings(
    fields: dict[str, Any], stored: Mapping[str, StoredTensor], model: ModelConfig
) -> dict[str, Any]:
    """Fields of a config's section, from those of an adapter_config.json. Raises: UserError."""
    found = [json_values.find_problem(_RULES, name, fields.get(name)) for name in _RULES]
    problems = ProblemCollector(filter(None, found))
    problems.raise_if_any()
    problems += [
        f"{name} = {format_value(value)}: is not supported."
        for name, value in fields.items()
        if name not in _RULES.keys() | _OTHER_FIELDS and value and value != "none"
    ]
    saved = _short_names(fields.get("modules_to_save"))
    modules = f"modules_to_save = {format_value(fields.get('modules_to_save'))}"
    if _SCORE in saved and not model.has_scores:
        problems.append(
            f"{modules}: it is the adapter of a reward model. Use objective.type=reward."
        )
    is_tied = model.tie_embeddings and not fields.get("ensure_weight_tying")
    if is_tied and len(saved) == 1:
        problems.append(
            f"{modules}: PEFT has trained a copy of a weight that is both embedding and head, and "
            "only in one of its places; merge the adapter with PEFT, and use the merged model as "
            "model.source."
        )
    names: dict[str, tuple[str, ...]] = {}
    with problems.collect():
        names = _find_adapted(fields, stored, model)
    problems.raise_if_any()
    return {
        "type": "dora" if fields.get("use_dora") else "lora",
        "rank": int(fields["r"]),
        "alpha": float(fields["lora_alpha"]),
        "use_rslora": bool(fields.get("use_rslora")),
        "modules_to_save": tuple(saved),
        **names,
    }


def _find_adapted(
    fields: dict[str, Any], stored: Mapping[str, StoredTensor], model: ModelConfig
) -> dict[str, tuple[str, ...]]:
    """Projections (targets) with tensors in the file, and tensors of experts (target_parameters).

    Raises: UserError for other names, and for a projection that has an adapter in some layers only.
    """
    offered = adapters.list_parameters(model)
    names = fields.get("target_parameters") or []
    parameters = {name: [x for x in offered if f".{x}".endswith(f".{name}")] for name in names}
    if others := [name for name in names if not parameters[name]]:
        raise UserError(
            f"target_parameters = {format_value(others)}: only experts' matrices of all layers are "
            f"supported ({', '.join(offered) or 'the model has none'})."
        )
    targets = []
    projections = adapters.find_projections(model)
    for name, numbers in projections.items():
        modules = [decoder.LAYER_PREFIX.format(layer=number) + name for number in numbers]
        count = sum(f"{module}.lora_A.weight" in stored for module in modules)
        if 0 < count < len(numbers):
            raise UserError(
                f"target_modules: {name} has an adapter in {count} of {len(numbers)} layers that "
                "have it; it must be in all or none."
            )
        if count:
            targets.append(name)
    if not targets and not names:
        raise UserError(
            f"target_modules: {WEIGHTS_FILE} has no tensors of a projection of the model "
            f"({', '.join(projections)})."
        )
    chosen = {x for matches in parameters.values() for x in matches}
    return {
        "targets": tuple(targets),
        "target_parameters": tuple(x for x in offered if x in chosen),
    }


def _read_header(source: ModelFolder) -> dict[str, StoredTensor]:
    """An adapter's tensors, by the names of a text model. Raises: UserError."""
    path = source.path / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f"{source.path} contains no {WEIGHTS_FILE}. jaxsp does not read pickles "
            "(adapter_model.bin): save the adapter with PEFT's save_pretrained."
        )
    return {
        re.sub(f"^{re.escape(_TEXT_PREFIX)}", "model.", name.removeprefix(_PREFIX)): tensor
        for name, tensor in tensors.read_header(path).items()
    }


def open_weights(source: ModelFolder, table: layers.Weights) -> WeightReader:
    """Opens an adapter's weights: those of its projections, and of its modules_to_save.

    Raises: UserError with all tensors that differ from the table's, and for a damaged file.
    """
    with at(source.field, source.source):
        stored = _read_header(source)
        modules = _short_names(source.config_fields.get("modules_to_save"))
        saved = [_READ_MODULES[module] for module in modules]
        params = jax.tree.leaves(table)
        shapes = weights.tensor_shapes([x for x in params if x.is_adapter or x.hf_name in saved])
        head = SAVED_MODULES["lm_head"]  # may be a copy of the embedding
        views = tensors.make_views(stored, shapes, {})
        read = weights.check_tensors(
            {name: view for name, view in views.items() if name in shapes or name != head},
            shapes,
            "Use an adapter of this model, as PEFT's save_pretrained writes it",
            "tensors of neither a projection of the model nor its modules_to_save:",
        )
        has_copy = head in stored and head not in shapes
        if has_copy and not tensors.is_same(stored[head], stored[SAVED_MODULES["embed_tokens"]]):
            raise UserError(
                f"{head} must equal the embedding, because the model's config.json has "
                "tie_word_embeddings = true. Merge the adapter with PEFT, and use the merged model "
                "as model.source."
            )
        return WeightReader(source=source, tensors=read)


def save_adapter(
    trained: layers.Weights,
    *,
    table: layers.Weights,
    adapter: AdapterConfig,
    model: ModelConfig,
    base: str | None,
    directory: str | pathlib.Path,
    is_multimodal: bool = False,
    small_files: pathlib.Path | None = None,
) -> None:
    """Writes a folder that `peft.PeftModel` loads; it appears under its name when it is complete.

    Args:
        trained: float32, in the structure of `table`.
        adapter: resolved section of the config.
        base: name or folder of the base model, for `base_model_name_or_path`.
        is_multimodal: True if the base has the text model beside other parts.
        small_files: folder whose tokenizer and chat template are copied.
    Raises: as `weights.create_folder`.
    """
    lora = model.lora
    assert lora is not None, "the model has adapters"
    saved: list[str] = [*adapter.modules_to_save]
    named = weights.list_tensors(trained, table, "float32")
    is_tied = model.tie_embeddings and SAVED_MODULES["embed_tokens"] in named
    if is_tied:
        # PEFT would leave the head as it was: it copies the modules that it trains. Versions before
        # ensure_weight_tying ignore it, and read the head from the file.
        saved = [*SAVED_MODULES]
        named[SAVED_MODULES["lm_head"]] = named[SAVED_MODULES["embed_tokens"]]
    if model.has_scores:
        saved.append(_SCORE)
    targets: Any = adapters.abbreviate(lora.targets, adapters.list_projections(model))
    if is_multimodal:
        if targets:  # a list would match the vision tower too
            pattern = "|".join(map(re.escape, targets))
            targets = rf"{re.escape(_TEXT_PREFIX)}.*\.({pattern})"
        named = {re.sub(r"^model\.", _TEXT_PREFIX, name): x for name, x in named.items()}
    alpha = adapter.alpha or lora.scale * lora.rank
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": "SEQ_CLS" if model.has_scores else "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # as PEFT writes it
        "lora_dropout": adapter.dropout,
        "use_rslora": bool(adapter.use_rslora),
        "use_dora": lora.is_dora,
        "base_model_name_or_path": base,
        "target_modules": targets,
        "target_parameters": list(lora.target_parameters) or None,
        "modules_to_save": saved or None,
        "ensure_weight_tying": is_tied,
    }
    with weights.create_folder(directory) as target:
        weights.write_json(target / CONFIG_FILE, config)
        if small_files is not None:
            exclude = ("config.json", "generation_config.json")
            folder.copy_small_files(small_files, target, exclude=exclude)
        prefixed = {f"{_PREFIX}{name}": tensor for name, tensor in named.items()}
        weights.write_file(target / WEIGHTS_FILE, prefixed)
