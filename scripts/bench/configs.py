"""Configs, models and plans that several benchmarks share."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxsp.hf import model_config
from jaxsp.planning import absent, planner
from jaxsp.planning.planner import Plan
from jaxsp.run import config_file
from jaxsp.run.config_file import Config

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rope_theta": 500000.0,
}
"""config.json of Llama-3-8B and Llama-3.1-8B, without 3.1's scaled RoPE, which costs no time."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"directory": "unused", "steps": 1},
    "data": {"train": [{"source": "unused", "format": "tokens"}]},
    "optimizer": {"learning_rate": 1e-5},
}
"""Fields of `make_config`; nothing is read from the source or written to the directory."""


def make_config(model: Mapping[str, Any], /, **sections: Mapping[str, Any]) -> Config:
    """A config for a model, given as fields of its config.json.

    Args: sections: fields of the config's sections, besides DEFAULTS.
    """
    fields = {name: {**DEFAULTS.get(name, {}), **values} for name, values in sections.items()}
    fields = {**DEFAULTS, **fields}
    fields["model"] = {"config": dict(model), **fields.get("model", {})}
    return config_file.parse(fields)


def prepare_to_plan() -> None:
    """Sets up JAX for plans: on the CPU, without a compilation cache."""
    # planning must not take the memory of a GPU that is here
    jax.config.update("jax_platforms", "cpu")
    # planning reads files that XLA writes while it compiles: a program from the cache has none
    jax.config.update("jax_enable_compilation_cache", False)


def plan_config(
    config: Config,
    *,
    device: str,
    num_devices: int,
    host_gib: float | None = None,
    document_tokens: int | None = None,
) -> Plan:
    """Plans a step on GPUs of a type, by default with documents as long as the row.

    Args: host_gib: host memory of a node.
    """
    assert config.model.config is not None
    return planner.plan_step(
        config.step,
        model=model_config.parse_model_config(config.model.config),
        cluster=absent.make_cluster(device, num_devices, node_host_gib=host_gib),
        document_tokens=document_tokens,
    )
