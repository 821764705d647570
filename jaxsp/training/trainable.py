"""Trained and frozen weights: the parameter table of a run, and the part of a tree that is trained."""

import dataclasses
import functools
from typing import Any

import jax

from jaxsp.config.schema import Config
from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter

_SAVED_MODULES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
"""Tensors of `adapter.modules_to_save`, by name."""


def build_table(model: ModelConfig, config: Config) -> layers.Weights:
    """Parameter table of a model, in which frozen weights have their format."""
    adapter = config.adapter
    if adapter.type == "none":
        return decoder.param_table(model)
    saved = {_SAVED_MODULES[name] for name in adapter.modules_to_save}
    if model.tie_embeddings and saved:
        saved = set(_SAVED_MODULES.values())

    def freeze(param: Parameter) -> Parameter:
        if param.is_adapter or param.hf_name in saved:
            return param
        return dataclasses.replace(param, frozen_as=config.model.compute_dtype)

    return jax.tree.map(freeze, decoder.param_table(model))


def select_trained(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to trained weights."""
    return _select(table, tree, is_trainable=True)


def select_frozen(table: layers.Weights, tree: Any) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to frozen weights."""
    return _select(table, tree, is_trainable=False)


def _select(table: layers.Weights, tree: Any, *, is_trainable: bool) -> Any:
    selected = {}
    for name, part in table.items():
        if isinstance(part, Parameter):
            if part.is_trainable == is_trainable:
                selected[name] = tree[name]
        elif inner := _select(part, tree[name], is_trainable=is_trainable):
            selected[name] = inner
    return selected


def merge(table: layers.Weights, trained: Any, frozen: Any) -> Any:
    """The tree of which `select_trained` and `select_frozen` are the parts."""
    merged = {}
    for name, part in table.items():
        if isinstance(part, Parameter):
            merged[name] = (trained if part.is_trainable else frozen)[name]
        else:
            merged[name] = merge(part, trained.get(name, {}), frozen.get(name, {}))
    return merged
