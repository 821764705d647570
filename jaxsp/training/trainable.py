"""Trained and frozen weights: the parameter table of a run, and parts of trees"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.model import decoder
from jaxsp.model.adapter_config import SAVED_MODULES
from jaxsp.optimizers import param_groups
from jaxsp.sharding import quantization
from jaxsp.training.step_config import StepConfig

Predicate = Callable[[Parameter], bool]


def build_table(model: ModelConfig, config: StepConfig) -> layers.Weights:
    """Parameter table of a model, in which frozen weights have their format."""
    adapter = config.adapter
    has_adapter = adapter.type != "none"
    saved = {SAVED_MODULES[name] for name in adapter.modules_to_save}
    if model.tie_embeddings and saved:
        saved = set(SAVED_MODULES.values())
    if model.has_scores:  # a new head must learn
        saved.add(decoder.SCORE_NAME)

    def freeze(param: Parameter) -> Parameter:
        is_base = has_adapter and not param.is_adapter and param.hf_name not in saved
        if not is_base and not param_groups.is_frozen(config.optimizer, param):
            return param
        is_quantized = (
            is_base and adapter.quantization != "none" and quantization.can_quantize(param)
        )
        if is_quantized:
            return dataclasses.replace(param, frozen_as=adapter.quantization)
        frozen_as = param.compute_dtype or config.compute_dtype
        return dataclasses.replace(param, frozen_as=frozen_as)

    return jax.tree.map(freeze, decoder.param_table(model))


def select(table: layers.Weights, tree: Any, is_selected: Predicate) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to some of the weights.

    Subtrees without such a weight are left out.
    """
    selected = {}
    for name, part in table.items():
        if isinstance(part, Parameter):
            if is_selected(part):
                selected[name] = tree[name]
        elif inner := select(part, tree[name], is_selected):
            selected[name] = inner
    return selected


def select_trained(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to trained weights."""
    return select(table, tree, lambda param: param.is_trainable)


def select_frozen(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to frozen weights."""
    return select(table, tree, lambda param: not param.is_trainable)


def merge(part: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The tree of which two results of `select` are parts."""
    merged = part | other
    for name in part.keys() & other.keys():
        merged[name] = merge(part[name], other[name])
    return merged
