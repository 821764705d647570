"""Runs of small configs in the process of a test."""

import pathlib
from typing import Any

import jax
import numpy as np
import rich.console

from jaxsp.hf import model_config, weights
from jaxsp.model import decoder
from jaxsp.run import build, config_file, trainer
from jaxsp.run.config_file import Config


def write_model(directory: pathlib.Path, fields: dict[str, Any], *, std: float) -> None:
    """Writes a model whose predictions differ from token to token if `std` is large."""
    table = decoder.param_table(model_config.parse_model_config(fields))
    rng = np.random.default_rng(3)
    weights.export_model(
        jax.tree.map(lambda p: rng.normal(p.mean, std, p.stacked_shape).astype(np.float32), table),
        table=table,
        fields=fields,
        tokenizer=None,
        directory=directory,
        dtype="float32",
    )


def make_fields(folder: pathlib.Path, file: str = "train.jsonl", **sections: Any) -> dict[str, Any]:
    """Fields of a config of a run in a folder, which has the documents too.

    Args: sections: fields by section, in addition to these or instead of them.
    """
    fields = {
        "run": {"directory": str(folder / "run"), "steps": 1},
        "model": {"compute_dtype": "float32"},
        "data": {"train": [{"source": str(folder / file), "format": "tokens"}], "row_tokens": 64},
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.01},
        "logging": {"trackers": []},
    }
    return {name: fields.get(name, {}) | sections.get(name, {}) for name in fields | sections}


def train(config: Config | dict[str, Any]) -> None:
    """Trains without output, on the devices that the mesh needs."""
    if isinstance(config, dict):
        config = config_file.parse(config)
    devices = jax.devices()[: max(config.mesh.data, 1) * config.mesh.seq]
    trainer.train(build.build_training(config, devices=devices), rich.console.Console(quiet=True))
