"""Checks of the memory options of a config: those that do not work with a release of JAX."""

import jax

from jaxsp.blocks.config import ModelConfig
from jaxsp.memory import memory_formula
from jaxsp.model.remat import RematPolicy, has_saved_products
from jaxsp.sharding import host_offload
from jaxsp.training import compile_options
from jaxsp.training.memory_config import MemoryConfig
from jaxsp.training.step_config import StepConfig

WRONG_OFFLOAD_RELEASES = ("0.10.2", "0.11.0")
"""jax releases that read offloaded activations back in the wrong order (openxla/xla PR 46231)."""

MIN_DOUBLE_BUFFER_RELEASE = (0, 11, 2)
"""First jax release whose copies of offloaded arrays are right in double-buffered loops, which XLA
uses from optimization level O1 on."""


def find_problems(
    config: StepConfig,
    *,
    platform: str,
    model: ModelConfig | None = None,
    version: str = jax.__version__,
) -> list[str]:
    """Reasons that the memory options of a config do not work with this release
    of JAX on these devices.

    Args: model: None if it is not known.
    """
    memory = config.memory
    problems = []
    release = compile_options.parse_version(version)
    if memory.offload_activations != "none":
        requested = f"memory.offload_activations = {memory.offload_activations}: jax {version}"
        if version in WRONG_OFFLOAD_RELEASES:
            problems.append(
                f"{requested} reads offloaded activations back in the wrong order, and gradients "
                "would be wrong. Install another release, or use memory.offload_activations=none."
            )
        elif release < host_offload.MIN_RELEASE and model is not None and model.inner_loop:
            problems.append(
                f"{requested} cannot compile it for models whose layers differ. Install jax 0.11.1 "
                "or later (Python 3.12), or use memory.offload_activations=none."
            )
        elif release < host_offload.MIN_RELEASE and platform == "cpu":
            problems.append(
                f"{requested} cannot compile it for CPUs. Install jax 0.11.1 or later (Python "
                "3.12), or use memory.offload_activations=none; on GPUs it works."
            )
    if release < host_offload.MIN_RELEASE:
        for name, default in (
            ("offload_optimizer", "none"),
            ("offload_every", 1),
            ("offload_during_attention", "auto"),
        ):
            value = getattr(memory, name)
            if value not in (default, "never"):
                problems.append(
                    f"memory.{name} = {value}: jax {version} cannot keep arrays in host memory "
                    "inside shard_map and loops. Install jax 0.11.1 or later (Python 3.12), or use "
                    f"memory.{name}={default}."
                )
    level = jax.config.values["jax_optimization_level"]
    is_offloaded = not memory.offload_activations == memory.offload_optimizer == "none"
    if is_offloaded and level in ("O1", "O2", "O3") and release < MIN_DOUBLE_BUFFER_RELEASE:
        problems.append(
            f"JAX_OPTIMIZATION_LEVEL = {level}: copies of offloaded arrays would have wrong "
            "offsets in loops (openxla/xla PR 47218). Unset it, install jax 0.11.2 or later, or "
            "use memory.offload_activations=none memory.offload_optimizer=none."
        )
    if model is not None:
        problems += _find_period_problems(memory, model)
        if RematPolicy(remat=memory.remat).is_mlp_saved and not has_saved_products(model):
            problems.append(
                f"memory.remat = {memory.remat}: all layers of this model have experts, which are "
                "recomputed. Use memory.remat=save_attention."
            )
    if problem := _find_kept_problem(memory, model):
        problems.append(f"memory.kept_mlp_layers = {memory.kept_mlp_layers}: {problem}")
    tokens = config.row_tokens * config.microbatch_rows
    tokens //= config.mesh.degree
    tile = memory.mlp_tile_tokens
    if RematPolicy(remat=memory.remat).is_mlp_saved and tile != "auto" and tile < tokens:
        problems.append(
            f"memory.mlp_tile_tokens = {tile}: must be at least {tokens}, all tokens of a device, "
            f"because memory.remat = {memory.remat} cannot keep activations of tiles. "
            "Use memory.mlp_tile_tokens=auto, or memory.remat=auto."
        )
    return problems


def _find_kept_problem(memory: MemoryConfig, model: ModelConfig | None) -> str | None:
    """Reason that memory.kept_mlp_layers layers do not keep the MLP's products."""
    number = memory.kept_mlp_layers
    if isinstance(number, str) or number == 0:
        return None
    if not RematPolicy(remat=memory.remat).is_mlp_saved:
        return "needs memory.remat=save_attention_and_mlp. Use that, or leave it out."
    if memory.offload_optimizer == "state_and_gradients":
        return (
            "with memory.offload_optimizer = state_and_gradients, layers cannot differ. Use "
            "memory.offload_optimizer=state, or leave it out."
        )
    if model is not None and number > model.num_layers:
        return f"the model has {model.num_layers} layers. Use auto for all of them."
    widths = memory_formula.kept_mlp_widths(model) if model is not None else []
    if widths and (equal := widths.index(widths[number])) < number:
        return (
            "whole periods of layers with an MLP keep its products, here as many as with "
            f"{equal}. Use {equal}."
        )
    return None


def _find_period_problems(memory: MemoryConfig, model: ModelConfig) -> list[str]:
    """Reasons that options do not work if the layers of a model differ in their weights.

    JAX's backward pass would return the gradients of all layers of a kind on the device.
    """
    policy = RematPolicy(
        offload_every=memory.offload_every,
        offloads_during_attention=memory.offload_during_attention == "always",
    )
    kinds = [kind for segment in model.segments for kind in {*segment.period}]
    is_divided = len(kinds) > len({*kinds})
    if (
        memory.offload_optimizer != "state_and_gradients"
        or len(model.kinds) == 1
        or (policy.has_own_backward_pass and not is_divided)
    ):
        return []
    period = max(len(segment.period) for segment in model.segments)
    instead = (
        f"memory.offload_every={max(2, period)} memory.offload_activations=layer_inputs "
        "memory.remat=full, or "
    )
    return [
        "memory.offload_optimizer = state_and_gradients: needs a whole period of layers in host "
        "memory, because the layers of this model differ. Use "
        f"{'' if is_divided else instead}memory.offload_optimizer=state."
    ]
