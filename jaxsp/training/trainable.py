"""Trained and frozen weights: the parameter table of a run, and parts of trees"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxsp.blocks import float8, layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.config.adapter_schema import SAVED_MODULES
from jaxsp.config.schema import Config
from jaxsp.model import adapters, decoder, flops
from jaxsp.optimizers import param_groups
from jaxsp.sharding import quantization

Predicate = Callable[[Parameter], bool]


def build_table(model: ModelConfig, config: Config) -> layers.Weights:
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
        frozen_as = param.compute_dtype or config.model.compute_dtype
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


def describe_products(table: layers.Weights, model: ModelConfig, config: Config) -> str:
    """Describes which matrices are multiplied in 8 bits; empty if none are requested.

    Example: `224 matrices multiplied in float8`.
    """
    if model.linear_dtype is None:
        return ""
    counts = {True: 0, False: 0}
    for param in jax.tree.leaves(table):
        if param.is_projection:
            counts[float8.can_multiply(*param.shape)] += param.num_layers or 1
    others = []
    if counts[False]:
        others.append(f"{counts[False]:,} whose dims are not multiples of {float8.DIM_MULTIPLE}")
    if model.experts is not None:
        others.append("experts")
    text = f"{counts[True]:,} matrices multiplied in {model.linear_dtype}"
    if others:
        text += f", {' and '.join(others)} in {config.model.compute_dtype}"
    return text


def describe(table: layers.Weights, model: ModelConfig, config: Config) -> str:
    """Describes the number of weights, their dtypes, and which of them are trained."""
    params = jax.tree.leaves(table)
    num_own = flops.num_parameters([param for param in params if not param.is_adapter])
    text = f"{num_own:,} parameters, {config.model.compute_dtype} compute"
    if products := describe_products(table, model, config):
        text += f" ({products})"
    if not config.has_frozen_weights:
        return f"{text}, float32 master weights"
    num_trained = flops.num_parameters([param for param in params if param.is_trainable])
    formats = dict.fromkeys(param.frozen_as for param in params if param.frozen_as is not None)
    text += f"; {num_trained:,} are trained in float32 ({100 * num_trained / num_own:.2f} %)"
    if model.lora is not None:
        text += f": {adapters.describe(model, model.lora, config.adapter)}"
    return f"{text}; the model's others are frozen in {' and '.join(formats)}"
