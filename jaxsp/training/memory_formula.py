"""Formulas for a step's memory on the device and on the host."""

from typing import NamedTuple

import jax
import numpy as np

from jaxsp.attention import LayerWorkload
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.model import decoder
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter
from jaxsp.runtime import device_mesh
from jaxsp.training import host_offload, sharding
from jaxsp.training.program import Program

GIB = 2**30


def predict_bytes(program: Program, *, workspace_bytes: int = 0) -> int:
    """Predicts a step's memory on each device, in bytes.

    Arguments, gradients and saved activations are live during the whole step. The largest of four
    phases is added: the backward pass of a layer's MLP, that of its attention, the loss, and the
    gradient of the embedding.

    Args:
        workspace_bytes: estimate of the attention kernel's workspace.
    """
    state, gradients = _state_bytes(program)
    saved = program.model.num_layers * _saved_bytes(program)
    prefetched = 2 * _offloaded_layer_bytes(program)
    stream = _stream_bytes(program)
    in_layer = saved + gradients + prefetched
    # Before the loss there are no gradients of this step's first microbatch
    loss_gradients = gradients if program.num_microbatches > 1 else 0
    embedding = 4 * program.model.vocab_size * program.model.hidden_size
    phases = (
        in_layer + _mlp_bytes(program),
        in_layer + _attention_bytes(program) + workspace_bytes,
        saved + loss_gradients + _loss_bytes(program),
        gradients + embedding + 2 * stream,
    )
    return int(state + max(phases))


def _stream_bytes(program: Program) -> int:
    """Bytes of a layer's input."""
    return program.tokens_per_device * program.model.hidden_size * program.dtype.itemsize


def _attention_output_bytes(program: Program) -> int:
    """Bytes of attention's output and log-sum-exp in a layer."""
    model = program.model
    per_head = model.head_dim * program.dtype.itemsize + 4
    return program.tokens_per_device * model.num_heads * per_head


def _offloaded_layer_bytes(program: Program) -> int:
    """Bytes of a layer's offloaded activations."""
    if program.config.memory.offload_activations == "none":
        return 0
    if program.remat_policy.is_attention_offloaded:
        return _stream_bytes(program) + _attention_output_bytes(program)
    return _stream_bytes(program)


def _saved_bytes(program: Program) -> int:
    """Bytes of a layer's activations that are saved on the device for the backward pass."""
    model = program.model
    policy = program.remat_policy
    tokens = program.tokens_per_device
    itemsize = program.dtype.itemsize
    saved = 0
    if program.config.memory.offload_activations == "none":
        saved += _stream_bytes(program)
    if policy.is_attention_saved and not policy.is_attention_offloaded:
        saved += _attention_output_bytes(program)
    # Activations of tiles are not saved
    if policy.remat in ("save_attention_and_mlp", "none") and program.mlp_tile >= tokens:
        saved += 2 * tokens * model.intermediate_size * itemsize
    if policy.remat == "none":
        heads = model.num_heads + 2 * model.num_kv_heads
        saved += tokens * (heads * model.head_dim + model.hidden_size) * itemsize
    return saved


def _mlp_bytes(program: Program) -> int:
    """Bytes of the backward pass of a layer's MLP."""
    model = program.model
    itemsize = program.dtype.itemsize
    D = model.hidden_size
    F = model.intermediate_size
    tokens = program.tokens_per_device
    tile = min(program.mlp_tile, tokens)
    stream = _stream_bytes(program)
    weights = 3 * D * F + D * model.num_heads * model.head_dim
    if tile < tokens:
        activations = 4 * tile * F * itemsize + 2 * stream + 5 * tile * D * itemsize
        return activations + (itemsize + 4) * weights
    return 4 * tile * F * itemsize + 6 * stream + itemsize * weights + 5 * D * F


def _attention_bytes(program: Program) -> int:
    """Bytes of the backward pass of a layer's attention, without the kernel's workspace."""
    layer = LayerWorkload.from_config(program.config, program.model)
    weights = sum(param.size for param in jax.tree.leaves(program.table["layers"]))
    backward = program.attend.strategy.backward_bytes(layer, program.attend.settings)
    return backward + 2 * _stream_bytes(program) + program.dtype.itemsize * weights


def _loss_bytes(program: Program) -> int:
    """Bytes of the loss and its gradients."""
    model = program.model
    tokens = program.tokens_per_device
    tile = min(program.loss_tile, tokens)
    stream = _stream_bytes(program)
    head = program.dtype.itemsize * model.vocab_size * model.hidden_size
    head_gradient = 4 * model.vocab_size * model.hidden_size
    logits = 6 * tile * model.vocab_size
    if tile < tokens:
        return head + logits + head_gradient + 2 * stream
    return head + max(logits, 2 * tile * model.vocab_size + head_gradient) + 2 * stream


def _state_bytes(program: Program) -> tuple[int, int]:
    """Bytes of a device's weights, optimizer state and working copies; and of its gradients."""
    per_weight = bytes_per_weight(program)
    has_working_copy = program.has_offloaded_state and not program.has_offloaded_gradients
    state = 0
    gradients = 0
    for param in jax.tree.leaves(program.table):
        shard = shard_size(param, program)
        is_offloaded = program.has_offloaded_state and host_offload.should_offload(param)
        if not is_offloaded:
            state += per_weight * shard
        elif param.num_layers and has_working_copy:
            state += program.dtype.itemsize * shard
        if not (is_offloaded and param.num_layers and program.has_offloaded_gradients):
            gradients += 4 * shard
    return state, gradients


def bytes_per_weight(program: Program) -> int:
    """Bytes of a float32 weight and, with AdamW, of two moments."""
    return 12 if program.config.optimizer.name == "adamw" else 4


def shard_size(param: Parameter, program: Program) -> int:
    """Elements of a weight that a device holds, all layers together."""
    return sharding.shard_size(param, device_mesh.num_shards(program.mesh))


def checkpoint_bytes(program: Program) -> int:
    """Host memory for an asynchronous checkpoint's copy of the state on the device.

    In bytes per device.
    """
    return sum(
        bytes_per_weight(program) * shard_size(param, program)
        for param in jax.tree.leaves(program.table)
        if not (program.has_offloaded_state and host_offload.should_offload(param))
    )


class OffloadedBytes(NamedTuple):
    """Formula for the bytes of each device's arrays in host memory."""

    activations: int
    weights: int
    moments: int
    """AdamW's moments."""
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(self)


def offloaded_bytes(
    model: ModelConfig, config: Config, *, num_shards: int, seq: int
) -> OffloadedBytes:
    """Arrays in host memory with a config.

    Args:
        num_shards: number of devices that weights are sharded over.
        seq: number of devices that rows are sharded over.
    """
    memory = config.memory
    itemsize = np.dtype(config.model.compute_dtype).itemsize
    per_token = 0
    if memory.offload_activations != "none":
        per_token += model.hidden_size * itemsize
    if memory.offload_activations == "layer_inputs_and_attention":
        per_token += model.num_heads * (model.head_dim * itemsize + 4)
    rows_per_microbatch = config.batch.rows_per_microbatch
    tokens = config.data.max_row_tokens * rows_per_microbatch // seq
    weights = 0
    gradients = 0
    for param in jax.tree.leaves(decoder.param_table(model)):
        if memory.offload_optimizer == "none" or not host_offload.should_offload(param):
            continue
        shard_bytes = 4 * sharding.shard_size(param, num_shards)
        weights += shard_bytes
        if param.num_layers and memory.offload_optimizer == "state_and_gradients":
            gradients += shard_bytes
    global_rows = rows_per_microbatch * config.mesh.replica * max(1, num_shards // seq)
    if config.batch.rows_per_step > global_rows:
        gradients *= 2  # the gradients of a microbatch, and their sums
    return OffloadedBytes(
        activations=model.num_layers * tokens * per_token,
        weights=weights,
        moments=2 * weights if config.optimizer.name == "adamw" else 0,
        gradients=gradients,
    )


def program_offloaded_bytes(program: Program) -> OffloadedBytes:
    """Arrays that a program keeps in host memory."""
    return offloaded_bytes(
        program.model,
        program.config,
        num_shards=device_mesh.num_shards(program.mesh),
        seq=program.mesh.shape[axes.SEQ],
    )


def pool_bytes(offloaded: OffloadedBytes) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for other arrays."""
    return int(1.1 * offloaded.total) + 2 * GIB
