"""Merges the trained weights of a run, such as adapters, with the frozen base of the run."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.checkpoint import base
from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, weights
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder, layers
from jaxsp.model.config import Lora, ModelConfig
from jaxsp.model.layers import Parameter
from jaxsp.training import quantization, trainable

ReadLayer = Callable[[int | None], np.ndarray]
"""Function that returns a layer of a weight, float32; None: of a weight outside the layers."""

_Key = tuple[str, tuple[int, int] | None]
"""Name and rows of a parameter: see `Parameter.hf_rows`."""


def merge_base(
    checkpoint: pathlib.Path, trained: layers.Weights, *, config: Config, model: ModelConfig
) -> tuple[layers.Weights, layers.Weights]:
    """The whole model of a run with frozen weights.

    Args: trained: the checkpoint's weights, float32, in the structure of `select_trained`.
    Returns: the parameter table of the model without adapters, and its weights: functions that
        read and merge one layer, as `hf.writer.export_model` takes them.
    Raises: UserError if the base cannot be read, or is another one than in training.
    """
    if config.model.source is None:
        raise UserError(
            f"{checkpoint}: its base has random weights (model.config), which are in no file. "
            "Export the adapter: leave out --merge."
        )
    source = folder.find(config.model.source)
    plain_table = decoder.param_table(dataclasses.replace(model, lora=None))
    reader = weights.open_folder(source, plain_table)
    table = trainable.build_table(model, config)
    read: dict[_Key, ReadLayer] = {}
    for path, param in jax.tree.leaves_with_path(table):
        array: Any = trained
        if param.is_trainable:
            for key in path:
                array = array[key.key]
            read[_key(param)] = functools.partial(_select_layer, array)
        else:
            read[_key(param)] = functools.partial(_read_frozen, reader, param)
    base.check_readable(checkpoint, table, lambda param: read[_key(param)])
    merge = functools.partial(_merge_weight, read, model.lora)
    return plain_table, jax.tree.map(merge, plain_table)


def _key(param: Parameter) -> _Key:
    return param.hf_name, param.hf_rows


def _select_layer(array: np.ndarray, layer: int | None) -> np.ndarray:
    return array if layer is None else array[layer]


def _read_frozen(reader: WeightReader, param: Parameter, layer: int | None) -> np.ndarray:
    """A layer of a frozen weight, as training used it."""
    whole = reader.read(param, layer, tuple(slice(size) for size in param.shape))
    return np.asarray(quantization.decode(param, quantization.encode(param, whole), jnp.float32))


def _merge_weight(read: dict[_Key, ReadLayer], lora: Lora | None, param: Parameter) -> ReadLayer:
    """Function that returns a layer of a weight with its adapter, if it has one."""
    stem = param.hf_name.removesuffix(".weight")
    read_a = read.get((f"{stem}.lora_A.weight", None))
    read_b = read.get((f"{stem}.lora_B.weight", param.hf_rows))
    read_magnitude = read.get((f"{stem}.lora_magnitude_vector", param.hf_rows))
    read_weight = read[_key(param)]
    if lora is None or read_a is None or read_b is None or not param.is_matrix:
        return read_weight

    def merge(layer: int | None) -> np.ndarray:
        merged = read_weight(layer) + (read_b(layer) @ read_a(layer)) * np.float32(lora.scale)
        if read_magnitude is not None:
            norms = np.sqrt(np.sum(np.square(merged, dtype=np.float64), axis=-1))
            merged *= (read_magnitude(layer) / norms).astype(np.float32)[:, None]
        return merged

    return merge
