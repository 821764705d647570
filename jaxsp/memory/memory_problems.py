"""Checks of the memory options of a config: those that do not work with a release of JAX."""

import jax

from jaxsp.blocks.config import ModelConfig
from jaxsp.config.schema import Config, MemoryConfig
from jaxsp.memory import memory_formula
from jaxsp.model.remat import RematPolicy, has_saved_products
from jaxsp.sharding import host_offload
from jaxsp.training import compile_options

WRONG_OFFLOAD_RELEASES = ("0.10.2", "0.11.0")
"""jax releases that read offloaded activations back in the wrong order (openxla/xla PR 46231)."""

MIN_DOUBLE_BUFFER_RELEASE = (0, 11, 2)
"""First jax release whose copies of offloaded arrays are right in double-buffered loops, which XLA
uses from optimization level O1 on."""


def find_problems(
    config: Config,
    *,
    platform: str,
    model: ModelConfig | None = None,
    version: str = jax.__version__,
) -> list[str]:
    """Reasons that the memory options of a config of one row length do not work with this release
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
        problems += _find_host_problems(memory, version)
    problems += _find_level_problems(memory, release)
    if model is not None:
        problems += _find_period_problems(memory, model)
        if RematPolicy(remat=memory.remat).is_mlp_saved and not has_saved_products(model):
            problems.append(
                f"memory.remat = {memory.remat}: all layers of this model have experts, which are "
                "recomputed. Use memory.remat=save_attention."
            )
    problems += _find_kept_problems(memory, model)
    tokens = config.data.row_tokens * config.batch.microbatch_rows
    tokens //= config.mesh.degree
    tile = memory.mlp_tile_tokens
    if RematPolicy(remat=memory.remat).is_mlp_saved and tile != "auto" and tile < tokens:
        problems.append(
            f"memory.mlp_tile_tokens = {tile}: must be at least {tokens}, all tokens of a device, "
            f"because memory.remat = {memory.remat} cannot keep activations of tiles. "
            "Use memory.mlp_tile_tokens=auto, or memory.remat=auto."
        )
    return problems


def _find_kept_problems(memory: MemoryConfig, model: ModelConfig | None) -> list[str]:
    """Reasons that a number of layers does not keep the MLP's products."""
    number = memory.kept_mlp_layers
    if isinstance(number, str) or number == 0:
        return []
    requested = f"memory.kept_mlp_layers = {number}"
    if not RematPolicy(remat=memory.remat).is_mlp_saved:
        return [
            f"{requested}: needs memory.remat=save_attention_and_mlp. Use that, or leave it out."
        ]
    if memory.offload_optimizer == "state_and_gradients":
        return [
            f"{requested}: with memory.offload_optimizer = state_and_gradients, layers cannot "
            "differ. Use memory.offload_optimizer=state, or leave it out."
        ]
    if model is None:
        return []
    if number > model.num_layers:
        return [f"{requested}: the model has {model.num_layers} layers. Use auto for all of them."]
    widths = memory_formula.kept_mlp_widths(model)
    equal = widths.index(widths[number])
    if equal < number:
        return [
            f"{requested}: whole periods of layers with an MLP keep its products, here as many as "
            f"with {equal}. Use {equal}."
        ]
    return []


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


def _find_level_problems(memory: MemoryConfig, release: tuple[int, ...]) -> list[str]:
    """Reasons that offloading does not work at the optimization level that the user has set."""
    level = jax.config.values["jax_optimization_level"]
    is_offloaded = not memory.offload_activations == memory.offload_optimizer == "none"
    if not is_offloaded or level not in ("O1", "O2", "O3") or release >= MIN_DOUBLE_BUFFER_RELEASE:
        return []
    return [
        f"JAX_OPTIMIZATION_LEVEL = {level}: copies of offloaded arrays would have wrong offsets in "
        "loops (openxla/xla PR 47218). Unset it, install jax 0.11.2 or later, or use "
        "memory.offload_activations=none memory.offload_optimizer=none."
    ]


def _find_host_problems(memory: MemoryConfig, version: str) -> list[str]:
    """Reasons that options do not work before host_offload.MIN_RELEASE."""
    requested: list[tuple[str, str, str]] = []
    if memory.offload_optimizer != "none":
        requested.append(("offload_optimizer", memory.offload_optimizer, "none"))
    if memory.offload_every > 1:
        requested.append(("offload_every", str(memory.offload_every), "1"))
    if memory.offload_during_attention == "always":
        requested.append(("offload_during_attention", "always", "auto"))
    return [
        f"memory.{name} = {value}: jax {version} cannot keep arrays in host memory inside "
        "shard_map and loops. Install jax 0.11.1 or later (Python 3.12), or use "
        f"memory.{name}={default}."
        for name, value, default in requested
    ]
