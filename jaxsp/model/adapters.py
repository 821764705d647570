"""Adapters of a model: the projections that a config's adapter section names."""

import dataclasses
import math

import jax

from jaxsp.blocks.config import Lora, ModelConfig
from jaxsp.core.errors import UserError
from jaxsp.model import decoder
from jaxsp.model.adapter_config import AdapterConfig

DEFAULT_RANK = 16

DEFAULT_ALPHA_PER_RANK = 2.0


def find_projections(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Projections in the layers, and the numbers of the layers that have each of them.

    Names are those of Hugging Face's files. Example: `self_attn.q_proj`. Projections that PEFT
    would take for experts are left out.
    """
    of_experts = _list_parts(model) if model.experts and model.experts.has_own_names else set()
    found: dict[str, set[int]] = {}
    for param in jax.tree.leaves(decoder.plain_table(model)["layers"]):
        if param.is_projection:
            # Parts of one tensor have the same name, and so have tensors of several kinds of layers
            name = param.hf_name.removeprefix(decoder.LAYER_PREFIX).removesuffix(".weight")
            if name.rpartition(".")[2] not in of_experts:
                found.setdefault(name, set()).update(param.layers)
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def list_projections(model: ModelConfig) -> tuple[str, ...]:
    """Names of all projections, as `find_projections` gives them."""
    return tuple(find_projections(model))


def list_parameters(model: ModelConfig) -> tuple[str, ...]:
    """Names of the tensors of experts that may have adapters: see `ExpertsConfig`."""
    return model.experts.adapted_tensors if model.experts else ()


def add_adapter(model: ModelConfig, adapter: AdapterConfig) -> ModelConfig:
    """The model with the adapters of a config.

    Raises: UserError for targets that the model does not have, for experts with options that their
        adapters do not have, and for the head of a model whose head is its embedding.
    """
    if adapter.type == "none":
        return model
    if model.tie_embeddings and adapter.modules_to_save == ("lm_head",):
        raise UserError(
            "adapter.modules_to_save = [lm_head]: the model's head is its embedding. "
            "Use adapter.modules_to_save=[embed_tokens]."
        )
    rank = adapter.rank or DEFAULT_RANK
    alpha = adapter.alpha or DEFAULT_ALPHA_PER_RANK * rank
    lora = Lora(
        rank=rank,
        scale=alpha / (math.sqrt(rank) if adapter.use_rslora else rank),
        targets=find_targets(model, "all-linear" if adapter.targets is None else adapter.targets),
        target_parameters=find_target_parameters(model, adapter),
        is_dora=adapter.type == "dora",
        dropout=adapter.dropout,
    )
    if not lora.targets and not lora.target_parameters:
        raise UserError(
            "adapter.targets = []: nothing would have an adapter. Use all-linear, or some of: "
            f"{', '.join(abbreviate(list_projections(model), list_projections(model)))}."
        )
    return dataclasses.replace(model, lora=lora)


def find_targets(model: ModelConfig, targets: str | tuple[str, ...]) -> tuple[str, ...]:
    """Projections that have one of the names, or end with it after a dot.

    Raises: UserError for a name without a projection.
    """
    projections = list_projections(model)
    if targets == "all-linear":
        return projections

    unknown = [name for name in targets if not any(_is_match(p, name) for p in projections)]
    if unknown:
        names = ", ".join(abbreviate(projections, projections))
        use = f"Use all-linear, or some of: {names}"
        asked = f"adapter.targets = [{', '.join(targets)}]"
        of_experts = [name for name in unknown if name.rpartition(".")[2] in _list_parts(model)]
        if of_experts:
            raise UserError(
                f"{asked}: {', '.join(of_experts)} would match experts or routers. Experts are in "
                f"adapter.target_parameters=[{','.join(list_parameters(model))}]; routers have no "
                f"adapters. {use}. adapter.type=none trains all weights."
            )
        raise UserError(
            f"{asked}: the layers of this model have no projection {', '.join(unknown)}. {use}."
        )
    return tuple(p for p in projections if any(_is_match(p, name) for name in targets))


def _is_match(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def find_target_parameters(model: ModelConfig, adapter: AdapterConfig) -> tuple[str, ...]:
    """Tensors of experts that `adapter.target_parameters` names, in the order of the module.

    Raises: UserError for a name without a tensor, and for options that need PEFT's linear layers.
    """
    names = adapter.target_parameters or ()
    if not names:
        return ()
    asked = f"adapter.target_parameters = [{', '.join(names)}]"
    parameters = list_parameters(model)
    if not parameters:
        raise UserError(
            f"{asked}: the model has no experts. Leave it out; adapter.targets has the names of "
            "projections."
        )
    unknown = [name for name in names if not any(_is_match(p, name) for p in parameters)]
    if unknown:
        raise UserError(
            f"{asked}: the model has no {', '.join(unknown)} of all experts. Use some of: "
            f"{', '.join(parameters)}."
        )
    if adapter.type == "dora":
        raise UserError(
            f"{asked}: experts have no adapters of type dora. Set adapter.type=lora, or leave "
            "adapter.target_parameters out."
        )
    if adapter.dropout:
        raise UserError(
            f"{asked}: adapters of experts have no dropout. Set adapter.dropout=0, or leave "
            "adapter.target_parameters out."
        )
    return tuple(p for p in parameters if any(_is_match(p, name) for name in names))


def _list_parts(model: ModelConfig) -> set[str]:
    """Parts of the names of experts and their router."""
    if model.experts is None:
        return set()
    names = model.experts.names
    of_experts = (names.router, names.gate, names.up, names.down)
    return {part for name in of_experts for part in name.split(".")} | {"gate_up_proj"}


def abbreviate(targets: tuple[str, ...], projections: tuple[str, ...]) -> list[str]:
    """The shortest names with which `find_targets` and PEFT find these projections.

    Last parts, except where a projection that is not among them ends with it too.
    """

    def last_part(name: str) -> str:
        return name.rpartition(".")[2]

    others = {last_part(name) for name in projections if name not in targets}
    names = [name if last_part(name) in others else last_part(name) for name in targets]
    return list(dict.fromkeys(names))


def describe(model: ModelConfig, lora: Lora, adapter: AdapterConfig) -> str:
    """Describes the adapters, and the model's own weights that are trained with them."""
    projections = list_projections(model)
    names = [f"all {len(lora.targets)} projections"]
    if len(lora.targets) < len(projections):
        names = abbreviate(lora.targets, projections)
    targets = ", ".join([*names, *lora.target_parameters])
    kind = "DoRA" if lora.is_dora else "LoRA"
    text = f"{kind} of rank {lora.rank}, scale {lora.scale:g}, on {targets}"
    if adapter.dropout:
        text += f", with dropout {adapter.dropout:g}"
    if adapter.modules_to_save:
        text += f", and all of {' and '.join(adapter.modules_to_save)}"
    return text
