"""Merges the trained weights of a run, such as adapters, with the frozen base of the run."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.blocks.config import Lora, ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import checksums, reader
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, weights
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder
from jaxsp.run.config_file import Config
from jaxsp.sharding import quantization, sharding
from jaxsp.system import device_memory
from jaxsp.training import specs, train_state

ReadLayer = Callable[[int | None], np.ndarray]
"""Function that returns a layer of a weight, float32; None: of a weight outside the layers."""


def merge_base(
    checkpoint: pathlib.Path, trained: layers.Weights, *, config: Config, model: ModelConfig
) -> tuple[layers.Weights, layers.Weights]:
    """The whole model of a run with frozen weights.

    Args: trained: the checkpoint's weights, float32, in the structure of `select_trained`.
    Returns: the parameter table of the model without adapters, and its weights: functions that
        read and merge one layer, as `hf.weights.export_model` takes them.
    """
    if config.model.source is None:
        suggestion = "Train all weights, without frozen groups."
        if model.lora is not None:
            suggestion = "Export the adapter: leave out --merge."
        raise UserError(
            f"{checkpoint}: its frozen weights are random (model.config), and in no file. "
            f"{suggestion}"
        )
    base = weights.open_folder(folder.find(config.model.source), decoder.plain_table(model))
    table = specs.build_table(model, config.step)
    frozen = train_state.select_frozen(table, table)

    def compute_checksum(param: Parameter) -> Any:
        """Checksum of a frozen weight as training stored it; all of its layers are in memory."""
        tensors = [_read_tensor(base, param, layer) for layer in param.layers or [None]]
        array = tensors[0] if param.layers is None else np.stack(tensors)
        return jax.tree.map(checksums.compute_on_host, quantization.encode(param, array))

    found = {"base": jax.tree.map(compute_checksum, frozen)}
    reader.check_base(checkpoint, checksums.name_leaves(found))
    whole = train_state.merge(trained, jax.tree.map(lambda param: base, frozen))
    return merge_state(whole, table=table, model=model)


def merge_state(
    weights: layers.Weights, *, table: layers.Weights, model: ModelConfig
) -> tuple[layers.Weights, layers.Weights]:
    """The whole model of all weights of a run with frozen weights, like `merge_base`.

    Args: weights: arrays of this process's devices or numpy's, readers of weights in files, or
        functions: see `make_layer_readers`.
    """
    read: dict[tuple[Any, ...], ReadLayer] = {}  # by name, rows and layers

    def add(param: Parameter, stored: Any) -> None:
        key = (param.hf_name, param.hf_rows, param.layers)
        read[key] = functools.partial(_read_layer, param, stored)

    jax.tree.map(add, table, weights)
    merge = functools.partial(_merge_weight, read, model.lora)
    plain_table = decoder.plain_table(model)
    return plain_table, jax.tree.map(merge, plain_table)


def make_layer_readers(weights: layers.Weights, *, table: layers.Weights) -> layers.Weights:
    """Functions that copy a layer of a weight, as it is stored, to the host of every process.

    Moves: the layer to all devices, if there are several processes, which must call together.
    Raises: UserError with several processes, if weights are in host memory.
    """

    def read(param: Parameter, stored: Any, layer: int | None) -> Any:
        def read_array(array: Any) -> np.ndarray:
            if device_memory.is_on_host(array):
                if not array.is_fully_addressable:
                    raise UserError(
                        "weights: with several processes, they must be on the devices. Use "
                        "memory.offload_optimizer=none."
                    )
                array = np.asarray(array)
            part = array if layer is None else array[param.find(layer)]
            return np.asarray(multihost_utils.process_allgather(part, tiled=True))

        return jax.tree.map(read_array, stored)

    return jax.tree.map(lambda *each: functools.partial(read, *each), table, weights)


def _read_layer(param: Parameter, stored: Any, layer: int | None) -> np.ndarray:
    """A layer, float32 and without padding, as training used it."""
    if isinstance(stored, WeightReader):
        stored = quantization.encode(param, _read_tensor(stored, param, layer))
    elif callable(stored):
        stored = stored(layer)
    elif layer is not None:
        stored = jax.tree.map(lambda x: x[param.find(layer)], stored)
    stored = jax.tree.map(np.asarray, stored)
    whole = np.asarray(quantization.decode(param, stored, jnp.dtype("float32")))
    return np.asarray(sharding.remove_padding(param, whole))


def _read_tensor(reader: WeightReader, param: Parameter, layer: int | None) -> np.ndarray:
    return reader.read(param, layer, tuple(slice(size) for size in param.shape))


def _merge_weight(
    read: dict[tuple[Any, ...], ReadLayer], lora: Lora | None, param: Parameter
) -> ReadLayer:
    """Function that returns a layer of a weight with its adapter, if it has one."""
    rows = param.hf_rows
    read_weight = read[param.hf_name, rows, param.layers]
    if lora is None or not param.is_matrix:
        return read_weight
    stem = param.hf_name.removesuffix(".weight")
    tensor = param.adapted_tensor
    if tensor is not None and tensor in lora.target_parameters:
        stem = decoder.LAYER_PREFIX + lora.name_module(tensor)
        rows = param.adapted_rows
    read_a = read.get((f"{stem}.lora_A.weight", None, param.layers))
    read_b = read.get((f"{stem}.lora_B.weight", rows, param.layers))
    read_magnitude = read.get((f"{stem}.lora_magnitude_vector", rows, param.layers))
    if read_a is None or read_b is None:
        return read_weight

    def merge(layer: int | None) -> np.ndarray:
        magnitude = None if read_magnitude is None else read_magnitude(layer)
        weights = read_weight(layer), read_a(layer), read_b(layer)
        return merge_matrix(*weights, scale=lora.scale, magnitude_o=magnitude)

    return merge


def merge_matrix(
    weight_oi: np.ndarray,
    a_ri: np.ndarray,
    b_or: np.ndarray,
    *,
    scale: float,
    magnitude_o: np.ndarray | None = None,
) -> np.ndarray:
    """The matrix W + scale * B A, whose rows have DoRA's magnitudes as norms if there are any.

    All are float32; experts' have a dim of experts first. The operations are PEFT's
    `merge_and_unload`.
    """
    merged_oi = weight_oi + (b_or @ a_ri) * np.float32(scale)
    if magnitude_o is not None:
        norms_o = np.sqrt(np.sum(np.square(merged_oi, dtype=np.float64), axis=-1))
        # A row of zeros stays zero, as in training
        factors_o = np.divide(magnitude_o, norms_o, out=np.zeros_like(norms_o), where=norms_o > 0)
        merged_oi *= factors_o.astype(np.float32)[:, None]
    return merged_oi
