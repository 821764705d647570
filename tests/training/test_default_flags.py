"""Training on virtual CPU devices with XLA's default flags, which the other tests replace.

With them, XLA starts independent collectives of a device in an order of its own. Muon without
clipping, sharded weights, windows and an all-gather have most of them.
"""

import json

import pytest

from jaxsp.core.errors import ExitCode
from tests import commands

PROGRAM = """
import sys
from jaxsp import cli, train
from jaxsp.sharding import sharding
sharding.MIN_SHARDED_SIZE = 64
cli.run_command(train.main)
"""
MODEL = {
    "model_type": "cohere2",
    "vocab_size": 257,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 100,
    "sliding_window": 23,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.slow
def test_independent_collectives_do_not_wait_for_each_other(tmp_path):
    commands.write_documents(tmp_path / "documents.jsonl", [40, 70, 110, 200, 16, 90] * 4)
    config = {
        "run": {"directory": str(tmp_path / "run"), "steps": 40, "save_every": None},
        "model": {"config": MODEL},
        "mesh": {"virtual_cpu_devices": 8, "seq": 8},
        "attention": {"strategy": "all_gather"},
        "data": {
            "row_tokens": 256,
            "train": [{"source": str(tmp_path / "documents.jsonl"), "format": "tokens"}],
        },
        "batch": {"rows_per_step": 2},
        "optimizer": {"name": "muon", "learning_rate": 1e-3, "max_grad_norm": None},
        "logging": {"trackers": []},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    done = commands.run_python(
        "-c", PROGRAM, tmp_path / "config.yaml", env={"XLA_FLAGS": ""}, timeout=500
    )
    assert done.returncode == ExitCode.OK, done.stderr
    assert len(commands.read_lines(tmp_path / "run/metrics.jsonl")) == 40
