"""Configs of small models with the heads of large ones, and steps compiled once for all tests."""

import functools

import numpy as np
import pytest

from jaxsp.hf import model_config
from jaxsp.model import adapters
from jaxsp.planning import absent, estimate
from jaxsp.run import config_file
from jaxsp.training.specs import make_spec

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
"""Four layers, because XLA unrolls loops over two."""

DEVICE_TOKENS = 65536
"""Tokens per device on every mesh."""


def settings(*words, **changes):
    """A config of LLAMA with `changes` of the model, and overrides `key.path=value`."""
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


def step(config, devices):
    """The compiled step of such a config on these devices."""
    model = model_config.parse_model_config(config.model.config)
    model = adapters.add_adapter(model, config.adapter)
    return absent.compile_step(make_spec(config.step, model, devices=devices))


@functools.cache
def gpu_step(*, data, seq, num_heads, microbatches, num_layers=4, is_tied=False):
    """A step for H100s, with equally many tokens per device on every mesh."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    config = settings(
        f"mesh.data={data}",
        f"mesh.seq={seq}",
        f"batch.rows_per_step={data * microbatches}",
        f"data.row_tokens={seq * DEVICE_TOKENS}",
        num_attention_heads=num_heads,
        num_hidden_layers=num_layers,
        tie_word_embeddings=is_tied,
    )
    return step(config, absent.make_devices("h100-80gb", data * seq))


def save_simply(spec):
    """Stands for `estimate.saved_bytes`, without tracing."""
    model = spec.model
    policy = spec.remat_policy
    width = 0 if policy.is_input_offloaded else model.num_layers * model.hidden_size
    if policy.is_attention_saved:
        width += model.num_layers * model.num_heads * model.head_dim
    if policy.is_mlp_saved:
        width += 2 * policy.count_kept(model) * model.intermediate_size
    return spec.dtype.itemsize * spec.tokens_per_device * width


def predict_simply(spec):
    """Stands for `estimate.predict_bytes`, without tracing."""
    state = sum(estimate.resident_bytes(spec))
    tiles = 8 * spec.mlp_tile * spec.model.intermediate_size
    tiles += 6 * spec.loss_tile * spec.model.vocab_size
    streams = 12 * spec.tokens_per_device * spec.model.hidden_size
    return state + save_simply(spec) + tiles + streams


def simplify_predictions(monkeypatch):
    """For tests of choices by memory, which predict that of many steps."""
    monkeypatch.setattr(estimate, "predict_bytes", predict_simply)
    monkeypatch.setattr(estimate, "saved_bytes", save_simply)


def segment_lengths(step):
    """Lengths of a step's segments, one per row."""
    config = step.spec.config
    return np.full(config.rows_per_step, config.row_tokens)
