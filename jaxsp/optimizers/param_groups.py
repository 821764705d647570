"""Parameter groups: which group of the config a weight belongs to, by its Hugging Face name."""

import difflib
import fnmatch
import re

import jax

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.optimizers.registry import Optimizer, ParameterGroup

DEFAULT = ParameterGroup(pattern="*")  # group of the weights that no pattern matches


def find_group(config: Optimizer, param: Parameter) -> ParameterGroup:
    """The first group whose pattern matches a weight; DEFAULT if there is none.

    `*` matches the numbers of layers and experts, which are `{layer}` and `{expert}` in the name of
    a stacked weight.
    """
    return next((group for group in config.groups if _matches(group, param)), DEFAULT)


def is_frozen(config: Optimizer, param: Parameter) -> bool:
    """True if a weight is not trained."""
    return find_group(config, param).frozen


def weight_decay(config: Optimizer, param: Parameter) -> float:
    """Weight decay of a weight; only matrices decay."""
    if not param.is_matrix:
        return 0.0
    own = find_group(config, param).weight_decay
    return config.weight_decay if own is None else own


def find_problems(config: Optimizer, table: layers.Weights) -> list[str]:
    """Groups that would have no effect, because no weight matches or earlier groups match all.
    A config with weights that all are frozen is a problem too."""
    params = jax.tree.leaves(table)
    names = list(dict.fromkeys(param.hf_name for param in params))
    problems = []
    for index, group in enumerate(config.groups):
        setting = f"optimizer.groups.{index}.pattern = {group.pattern}"
        matched = [param for param in params if _matches(group, param)]
        if not matched:
            suggestion = _suggest(group.pattern, names)
            problems.append(f"{setting}: matches no weight of the model. {suggestion}")
        elif not any(find_group(config, param) is group for param in matched):
            problems.append(
                f"{setting}: has no effect, because earlier groups match all of its weights, and "
                "the first match counts. Move it up, or leave it out."
            )
    if params and all(is_frozen(config, param) for param in params):
        problems.append(
            "optimizer.groups: all weights of the model are frozen. Use a pattern that leaves some "
            "to train, for example model.embed_tokens*."
        )
    return problems


def describe(config: Optimizer, table: layers.Weights) -> list[str]:
    """Describes each group. Example: `model.embed_tokens*: 1,024 weights, frozen`."""
    params = jax.tree.leaves(table)
    lines = []
    for group in config.groups:
        own = [param for param in params if find_group(config, param) is group]
        size = sum(param.size * (param.num_layers or 1) for param in own)
        parts = [f"{group.pattern}: {size:,} weights"]
        if group.learning_rate_factor != 1:
            parts.append(f"learning rate x {group.learning_rate_factor:g}")
        if group.weight_decay is not None:
            parts.append(f"weight decay {group.weight_decay:g}")
        if group.frozen:
            parts.append("frozen")
        lines.append(", ".join(parts))
    return lines


def _matches(group: ParameterGroup, param: Parameter) -> bool:
    return fnmatch.fnmatchcase(param.hf_name, group.pattern)


def _suggest(pattern: str, names: list[str]) -> str:
    """Suggestion of a pattern, from the names of the model's weights."""
    for_all_layers = re.sub(r"(?<=\.)(?:\d+|\[[\d-]+\])(?=\.|$)", "*", pattern)
    if for_all_layers != pattern and fnmatch.filter(names, for_all_layers):
        return (
            "A group has a weight in all layers and of all experts; one layer or expert cannot be "
            f"selected. Use {for_all_layers}."
        )
    plain = dict.fromkeys(re.sub(r"\{\w+\}", "*", name) for name in names)
    nearest = difflib.get_close_matches(pattern, plain, n=6, cutoff=0.0)
    return f"Names are {', '.join(nearest)}."
