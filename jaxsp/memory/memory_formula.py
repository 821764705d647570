"""Formulas for a step's memory on the device and on the host."""

from typing import NamedTuple

import jax
import numpy as np

from jaxsp.blocks import layers, registry
from jaxsp.blocks.config import LayerKind, ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core.units import GIB
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.optimizers import optimizer
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_mesh
from jaxsp.training import trainable
from jaxsp.training.specs import StepSpec
from jaxsp.training.step_config import StepConfig
from jaxsp.training.trainable import Predicate


def predict_bytes(spec: StepSpec) -> int:
    """Predicts a step's memory on each device, in bytes.

    Arguments, gradients and saved activations are live during the whole step. The largest of four
    phases is added: the backward pass of a layer's MLP, that of its attention, the loss, and the
    gradient of the embedding.
    """
    resident = resident_bytes(spec)
    phases = find_phases(spec)
    return int(resident.weights + resident.moments + max(phases.values()))


def find_phases(spec: StepSpec) -> dict[str, int]:
    """Finds the bytes of each phase of a step beside its arguments, by the phase's name."""
    model = spec.model
    resident = resident_bytes(spec)
    gradients = resident.gradients
    saved = resident.activations
    prefetched = 2 * step_offloaded_bytes(spec).activations // model.num_layers
    if spec.remat_policy.has_own_backward_pass:  # it reads an input when it needs it
        prefetched = 0
    stream = _stream_bytes(spec)
    in_layer = saved + gradients + prefetched
    # Before the loss there are no gradients of this step's first microbatch
    loss_gradients = gradients if spec.num_microbatches > 1 else 0
    embedding = 0
    if spec.table["embedding"].is_trainable:
        embedding = 4 * model.vocab_size * model.hidden_size
    return {
        "the backward pass of an MLP": in_layer
        + max(_feed_forward_bytes(spec, kind) for kind in model.kinds),
        "the backward pass of attention": in_layer
        + max(_mixer_bytes(spec, kind) for kind in model.kinds),
        "the loss": saved + loss_gradients + _loss_bytes(spec),
        "the gradient of the embedding": gradients
        + embedding
        + 2 * stream
        + _kept_embedding_bytes(spec),
    }


class ResidentBytes(NamedTuple):
    """Formula for the bytes of a device's arrays that are live during most of a step."""

    weights: int
    """Float32 weights, copies in the compute dtype of those in host memory, and frozen weights."""
    moments: int
    """Bytes of the optimizer state, such as AdamW's moments."""
    gradients: int
    activations: int
    """Activations that all layers save for the backward pass, and embeddings before their norm."""


def resident_bytes(spec: StepSpec) -> ResidentBytes:
    """Arrays that a device holds during most of a step."""
    num_shards = device_mesh.num_shards(spec.mesh)
    stacked = _num_trained(spec.table, num_shards, host_offload.should_offload_gradient)
    weights = 4 * _num_device_weights(spec)
    weights += _frozen_bytes(spec.table, num_shards, lambda param: not spec.is_on_host(param))
    gradients = 4 * _num_trained(spec.table, num_shards)
    if spec.has_offloaded_gradients:
        gradients -= 4 * stacked
    elif spec.has_offloaded_state:
        weights += spec.dtype.itemsize * stacked
    return ResidentBytes(
        weights=weights,
        moments=_device_state_bytes(spec),
        gradients=gradients,
        activations=sum(
            _saved_bytes(spec, kind, policy)
            for kind, policy in [
                (kind, policy)
                for segment in spec.model.segments
                for periods, policy in spec.remat_policy.divide(segment, spec.model.num_layers)
                for _ in periods
                for kind in segment.period
            ]
        )
        + _kept_embedding_bytes(spec),
    )


def _stream_bytes(spec: StepSpec) -> int:
    """Bytes of a layer's input."""
    return spec.tokens_per_device * spec.model.hidden_size * spec.dtype.itemsize


def _kept_embedding_bytes(spec: StepSpec) -> int:
    """Bytes of the tokens' embeddings, which are kept if they are the input of a norm."""
    return _stream_bytes(spec) if spec.model.has_embedding_norm else 0


def list_kept_mlp_bytes(spec: StepSpec) -> list[int]:
    """Bytes of the MLP's products that are kept with `kept_mlp_layers` of 0, 1, ... up to all."""
    per_element = spec.tokens_per_device * spec.dtype.itemsize
    return [per_element * width for width in kept_mlp_widths(spec.model)]


def kept_mlp_widths(model: ModelConfig) -> list[int]:
    """Elements for each token of the MLP's products that are kept with `kept_mlp_layers` of 0, 1,
    ... up to all. Whole periods of layers keep them, so that some numbers keep no more."""

    def count(number: int) -> int:
        policy = RematPolicy(remat="save_attention_and_mlp", kept_mlp_layers=number)
        return sum(
            len(periods) * sum(registry.FEED_FORWARDS[kind.feed_forward].saved_widths(model))
            for segment in model.segments
            for periods, of_part in policy.divide(segment, model.num_layers)
            if of_part.is_mlp_saved
            for kind in segment.period
        )

    return [count(number) for number in range(model.num_layers + 1)]


def _saved_bytes(spec: StepSpec, kind: LayerKind, policy: RematPolicy) -> int:
    """Bytes of a layer's activations that are saved on the device for the backward pass."""
    model = spec.model
    itemsize = spec.dtype.itemsize
    widths: list[int] = []
    # Activations of tiles are not saved
    has_tiles = spec.mlp_tile < spec.tokens_per_device
    if (policy.is_mlp_saved or policy.are_products_saved) and not has_tiles:
        widths += registry.FEED_FORWARDS[kind.feed_forward].saved_widths(spec.model)
    if policy.are_products_saved:
        widths += registry.MIXERS[kind.mixer].product_widths(spec.model, spec.workload)
    per_token = itemsize * sum(widths)
    if not policy.is_input_offloaded:
        per_token += model.hidden_size * itemsize
    if policy.is_attention_saved and not policy.is_attention_offloaded:
        per_token += registry.MIXERS[kind.mixer].output_bytes(model, itemsize)
    return spec.tokens_per_device * per_token


def _feed_forward_bytes(spec: StepSpec, kind: LayerKind) -> int:
    """Bytes of the backward pass of a layer's feed-forward."""
    model = spec.model
    itemsize = spec.dtype.itemsize
    tokens = spec.tokens_per_device
    tile = min(spec.mlp_tile, tokens)
    stream = _stream_bytes(spec)
    params = decoder.split_kinds(model, spec.table["layers"])[kind]["post_attention"]
    weights = _matrix_elements(params)
    feed_forward = registry.FEED_FORWARDS[kind.feed_forward]
    live = tile * feed_forward.backward_width(model) + feed_forward.fixed_elements(model)
    # Statistics are float32, and have gradients
    live = itemsize * live + 2 * 4 * tokens * feed_forward.statistics_width(model)
    has_gradients = model.lora is None
    own_sums = 4 * feed_forward.gradient_elements(model)
    if tile < tokens:
        activations = live + 2 * stream + 5 * tile * model.hidden_size * itemsize
        return activations + (itemsize + 4 * has_gradients) * weights + own_sums
    gradients = 5 * _matrix_elements(params["mlp"]) // 3 * has_gradients
    return live + 6 * stream + itemsize * weights + max(gradients, own_sums)


def _matrix_elements(params: layers.Weights) -> int:
    """Elements of the matrices of a layer, without adapters."""
    matrices = (p for p in jax.tree.leaves(params) if p.is_matrix and not p.is_adapter)
    return sum(param.size for param in matrices)


def _mixer_bytes(spec: StepSpec, kind: LayerKind) -> int:
    """Bytes of the backward pass of a layer's mixer: the maximum of the layers of a kind."""
    params = decoder.split_kinds(spec.model, spec.table["layers"])[kind]
    weights = sum(param.size for param in jax.tree.leaves(params))
    backward = registry.MIXERS[kind.mixer].backward_bytes(spec.model, spec.workload)
    # The layer's input and its gradient, or a copy of a gradient for the all-to-all
    num_streams = 1 if spec.remat_policy.offloads_during_attention else 2
    streams = num_streams * _stream_bytes(spec)
    gathered = spec.dtype.itemsize * weights
    return backward + streams + gathered


def _loss_bytes(spec: StepSpec) -> int:
    model = spec.model
    tokens = spec.tokens_per_device
    tile = min(spec.loss_tile, tokens)
    stream = _stream_bytes(spec)
    head = spec.dtype.itemsize * model.num_logits * model.hidden_size
    head_gradient = 0
    if decoder.lm_head(spec.table).is_trainable:
        head_gradient = 4 * model.num_logits * model.hidden_size
    logits = 6 * tile * model.num_logits
    if tile < tokens:
        return head + logits + head_gradient + 2 * stream
    return head + max(logits, 2 * tile * model.num_logits + head_gradient) + 2 * stream


def _num_trained(
    table: layers.Weights,
    num_shards: int,
    is_counted: Predicate = lambda param: True,
) -> int:
    """Elements of trained weights that a device holds."""
    params = filter(is_counted, jax.tree.leaves(table))
    return sum(sharding.shard_size(param, num_shards) for param in params if param.is_trainable)


def _frozen_bytes(table: layers.Weights, num_shards: int, is_counted: Predicate) -> int:
    """Bytes of frozen weights that a device holds."""
    params = filter(is_counted, jax.tree.leaves(table))
    return sum(
        sharding.shard_bytes(param, num_shards) for param in params if not param.is_trainable
    )


def checkpoint_bytes(spec: StepSpec) -> int:
    """Host memory for an asynchronous checkpoint of the state on the device, in bytes per device.

    The copies, and XLA's buffers for the transfers, which are pinned and stay allocated. They have
    a pool of their own, with the limit of the pool for offloaded arrays (`pool_bytes`). Arrays
    that are in host memory are written from there.

    Source: PjRtStreamExecutorRawBuffer::CopyRawDeviceToHostAndReturnEvent, openxla/xla
        xla/pjrt/se_raw_buffer.cc. Arrays of 1 GiB and more per device have no such buffer.
    """
    copies = 4 * _num_device_weights(spec) + _device_state_bytes(spec)
    offloaded = step_offloaded_bytes(spec)
    num_shards = device_mesh.num_shards(spec.mesh)
    is_buffered = lambda param: 4 * sharding.shard_size(param, num_shards) < GIB
    buffers = 4 * _num_device_weights(spec, is_buffered)
    buffers += _device_state_bytes(spec, is_buffered)
    if offloaded.total:
        buffers = min(buffers, pool_bytes(offloaded))
    return copies + buffers


def _device_state_bytes(spec: StepSpec, is_counted: Predicate = lambda param: True) -> int:
    """Bytes of the optimizer state that a device holds in its own memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    total = 0
    for param in filter(is_counted, jax.tree.leaves(spec.table)):
        state = optimizer.state_bytes(spec.config.optimizer, param, num_shards)
        is_offloaded = spec.has_offloaded_state and host_offload.should_offload(param)
        total += state.others if is_offloaded else state.total
    return total


def _num_device_weights(spec: StepSpec, is_counted: Predicate = lambda param: True) -> int:
    """Elements of trained weights that a device holds in its own memory."""

    def is_held(param: Parameter) -> bool:
        is_offloaded = spec.has_offloaded_state and host_offload.should_offload(param)
        return is_counted(param) and not is_offloaded

    return _num_trained(spec.table, device_mesh.num_shards(spec.mesh), is_held)


class OffloadedBytes(NamedTuple):
    """Formula for the bytes of each device's arrays in host memory."""

    activations: int
    weights: int
    """Bytes of trained weights, float32."""
    moments: int
    """Bytes of the optimizer state, such as AdamW's moments."""
    gradients: int
    frozen: int = 0
    """Bytes of frozen weights."""

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(self)


def offloaded_bytes(model: ModelConfig, config: StepConfig, *, num_shards: int) -> OffloadedBytes:
    """Arrays in host memory with a config.

    Args: num_shards: number of devices that weights are sharded over.
    """
    memory = config.memory
    policy = RematPolicy(
        offload_activations=memory.offload_activations,
        offload_every=memory.offload_every,
        offloads_during_attention=memory.offload_during_attention == "always",
    ).with_whole_periods(model)
    itemsize = np.dtype(config.compute_dtype).itemsize
    rows_per_microbatch = config.microbatch_rows
    input_bytes = model.hidden_size * itemsize if policy.is_input_offloaded else 0
    output_bytes = 0
    if policy.is_attention_offloaded:
        output_bytes = sum(
            registry.MIXERS[layer.mixer].output_bytes(model, itemsize) for layer in model.layers
        )
    num_inputs = policy.num_offloaded_inputs(model.num_layers)
    if policy.is_input_offloaded and not policy.has_own_backward_pass:
        num_inputs += model.inner_loop  # its arrays are copied into those of all periods
    tokens = config.row_tokens * rows_per_microbatch // config.mesh.degree
    table = trainable.build_table(model, config)
    num_weights = 0
    moments = 0
    if memory.offload_optimizer != "none":
        num_weights = _num_trained(table, num_shards, host_offload.should_offload)
        moments = sum(
            optimizer.state_bytes(config.optimizer, param, num_shards).like_weight
            for param in filter(host_offload.should_offload, jax.tree.leaves(table))
        )
    num_gradients = frozen_bytes = 0
    if memory.offload_optimizer == "state_and_gradients":
        num_gradients = _num_trained(table, num_shards, host_offload.should_offload_gradient)
        frozen_bytes = _frozen_bytes(table, num_shards, host_offload.should_offload)
    num_groups = config.mesh.replica * max(1, num_shards // config.mesh.degree)
    global_rows = rows_per_microbatch * num_groups
    if config.rows_per_step > global_rows:
        num_gradients *= 2  # the gradients of a microbatch, and their sums
    return OffloadedBytes(
        activations=tokens * (num_inputs * input_bytes + output_bytes),
        weights=4 * num_weights,
        moments=moments,
        gradients=4 * num_gradients,
        frozen=frozen_bytes,
    )


def step_offloaded_bytes(spec: StepSpec) -> OffloadedBytes:
    """Arrays that a step keeps in host memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    return offloaded_bytes(spec.model, spec.config, num_shards=num_shards)


def pool_bytes(offloaded: OffloadedBytes) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for other arrays."""
    return int(1.1 * offloaded.total) + 2 * GIB
