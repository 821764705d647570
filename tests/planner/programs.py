"""Configs of small models with the heads of large ones, and their steps compiled once for all tests."""

import functools

import numpy as np
import pytest

from jaxsp.config import config_file
from jaxsp.hf import families
from jaxsp.planner.compile import compiled

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 5120,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
}
"""Four layers, since XLA writes out loops over two, of a size at which no two causes of memory have arrays of the same size."""

SHARE_TOKENS = 65536
"""Of each device, however many there are."""


def settings(*words, **changes):
    """A config with this model but for `changes`, changed by `key.path=value` words."""
    fields = {
        "run": {"directory": "unused", "steps": 1},
        "model": {"config": {**LLAMA, **changes}},
        "data": {
            "train": [{"source": "unused", "format": "tokens"}],
            "row_tokens": 8192,
            "max_segments_per_row": 1,
        },
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.1},
    }
    return config_file.parse(fields, words)


def step(asked, devices):
    """The step of such a config on these devices."""
    return compiled.compile_config(
        asked,
        model=families.parse_model_config(asked.model.config, field="model.config"),
        devices=devices,
    )


@functools.cache
def gpu_step(*, data, seq, num_heads, turns, num_layers=4):
    """A step for H100s, with as many tokens on each of them whatever the mesh."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    asked = settings(
        f"mesh.data={data}",
        f"mesh.seq={seq}",
        f"batch.rows_per_step={data * turns}",
        f"data.row_tokens={seq * SHARE_TOKENS}",
        num_attention_heads=num_heads,
        num_hidden_layers=num_layers,
    )
    return step(asked, compiled.make_devices("h100-80gb", data * seq))


def pieces(step):
    """Lengths of the pieces that a step learns from, one in each row."""
    config = step.program.config
    return np.full(config.batch.rows_per_step, config.data.max_row_tokens)
