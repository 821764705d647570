"""Formulas for a step's memory on the device and on the host."""

from typing import NamedTuple

import jax
import numpy as np

from jaxsp.blocks import layers, registry
from jaxsp.blocks.block import FeedForwardCost
from jaxsp.blocks.config import LayerKind, ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core.units import GIB
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.optimizers import optimizer
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_mesh
from jaxsp.training import specs
from jaxsp.training.specs import StepSpec
from jaxsp.training.step_config import StepConfig


def predict_bytes(spec: StepSpec) -> int:
    """Predicts a step's memory on each device, in bytes.

    Arguments, gradients and saved activations are live during the whole step. The largest of four
    phases is added: the backward pass of a layer's MLP, that of its attention, the loss, and the
    gradient of the embedding.
    """
    resident = resident_bytes(spec)
    return int(resident.weights + resident.moments + max(find_phases(spec).values()))


def find_phases(spec: StepSpec) -> dict[str, int]:
    """Finds the bytes of each phase of a step beside its arguments, by the phase's name."""
    model = spec.model
    resident = resident_bytes(spec)
    gradients = resident.gradients
    saved = resident.activations
    prefetched = 2 * step_offloaded_bytes(spec).activations // model.num_layers
    if spec.remat_policy.has_own_backward_pass:  # it reads an input when it needs it
        prefetched = 0
    in_layer = saved + gradients + prefetched
    # Before the loss there are no gradients of this step's first microbatch
    loss_gradients = gradients if spec.num_microbatches > 1 else 0
    embedding = 2 * _stream_bytes(spec)
    if spec.table["embedding"].is_trainable:
        embedding += 4 * model.vocab_size * model.hidden_size
    if model.has_embedding_norm:  # its input is kept
        embedding += _stream_bytes(spec)
    phases = {
        "the backward pass of an MLP": in_layer
        + max(_feed_forward_bytes(spec, kind) for kind in model.kinds),
        "the backward pass of attention": in_layer
        + max(_mixer_bytes(spec, kind) for kind in model.kinds),
        "the loss": saved + loss_gradients + _loss_bytes(spec),
        "the gradient of the embedding": gradients + embedding,
    }
    if (teacher := spec.teacher) is not None:
        layer = max(_feed_forward_bytes(teacher, kind) for kind in teacher.model.kinds)
        phases["the teacher's forward pass"] = loss_gradients + layer
    return phases


# Arrays that are live during most of a step


class ResidentBytes(NamedTuple):
    """Bytes of a device's arrays that are live during most of a step."""

    weights: int
    """Float32 weights, copies in the compute dtype of those in host memory, and frozen weights."""
    moments: int
    """Bytes of the optimizer state, such as AdamW's moments."""
    gradients: int
    activations: int
    """Activations that all layers save for the backward pass, and embeddings before their norm."""


def resident_bytes(spec: StepSpec) -> ResidentBytes:
    """Arrays that a device holds during most of a step."""
    weights = moments = gradients = 0
    for param in jax.tree.leaves(spec.state_table):
        weight, state = _held_bytes(spec, param)
        weights += weight
        moments += state
        if not param.is_trainable:
            continue
        size = sharding.shard_size(param, device_mesh.num_shards(spec.mesh))
        is_stacked_on_host = host_offload.should_offload_gradient(param)
        if not (is_stacked_on_host and spec.has_offloaded_gradients):
            gradients += 4 * size
            if is_stacked_on_host and spec.has_offloaded_state:
                weights += spec.dtype.itemsize * size
    activations = _stream_bytes(spec) if spec.model.has_embedding_norm else 0
    activations += _shared_bytes(spec)
    if spec.teacher is not None:  # its hidden states
        activations += _stream_bytes(spec.teacher)
    for segment in spec.model.segments:
        for periods, policy in spec.remat_policy.divide(segment, spec.model.num_layers):
            saved = (_saved_bytes(spec, kind, policy) for kind in segment.period)
            activations += len(periods) * sum(saved)
    return ResidentBytes(weights, moments, gradients, activations)


def _held_bytes(spec: StepSpec, param: Parameter) -> tuple[int, int]:
    """Bytes of a weight and its optimizer state in a device's own memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    state = optimizer.state_bytes(spec.config.optimizer, param, num_shards)
    if spec.is_on_host(param):
        return 0, state.others
    return sharding.shard_bytes(param, num_shards), sum(state)


def _stream_bytes(spec: StepSpec) -> int:
    """Bytes of a layer's input."""
    return spec.tokens_per_device * spec.model.hidden_size * spec.dtype.itemsize


def _shared_bytes(spec: StepSpec) -> int:
    """Bytes of arrays that several layers share, and of their gradients, which are float32."""
    model = spec.model
    width = model.hidden_size if model.per_layer_size else 0
    for kind in model.kinds:
        if kind.sizes is not None and kind.sizes.stored_keys is not None:
            width += 2 * kind.sizes.num_kv_heads * kind.sizes.head_dim
    return 2 * 4 * width * spec.tokens_per_device


def kept_mlp_widths(model: ModelConfig) -> list[int]:
    """Elements for each token of the MLP's products that are kept with `kept_mlp_layers` of 0, 1,
    ... up to all. Whole periods of layers keep them, so that some numbers keep no more."""

    def count(number: int) -> int:
        policy = RematPolicy(remat="save_attention_and_mlp", kept_mlp_layers=number)
        return sum(
            len(periods) * _feed_forward_cost(model, kind).saved_width
            for segment in model.segments
            for periods, of_part in policy.divide(segment, model.num_layers)
            if of_part.is_mlp_saved
            for kind in segment.period
        )

    return [count(number) for number in range(model.num_layers + 1)]


def _feed_forward_cost(model: ModelConfig, kind: LayerKind) -> FeedForwardCost:
    return registry.FEED_FORWARDS[kind.feed_forward].cost(model.of_kind(kind))


def _saved_bytes(spec: StepSpec, kind: LayerKind, policy: RematPolicy) -> int:
    """Bytes of a layer's activations that are saved on the device for the backward pass."""
    model = spec.model.of_kind(kind)
    mixer = registry.MIXERS[kind.mixer]
    width = 0 if policy.is_input_offloaded else model.hidden_size
    # Activations of tiles are not saved
    has_tiles = spec.mlp_tile < spec.tokens_per_device
    if (policy.is_mlp_saved or policy.are_products_saved) and not has_tiles:
        width += _feed_forward_cost(model, kind).saved_width
    if policy.are_products_saved:
        width += mixer.product_width(model, spec.workload)
    per_token = spec.dtype.itemsize * width
    if policy.is_attention_saved and not policy.is_attention_offloaded:
        per_token += mixer.output_bytes(model, spec.dtype.itemsize)
    return spec.tokens_per_device * per_token


# Phases


def _feed_forward_bytes(spec: StepSpec, kind: LayerKind) -> int:
    """Bytes of the backward pass of a layer's feed-forward."""
    model = spec.model
    itemsize = spec.dtype.itemsize
    tokens = spec.tokens_per_device
    tile = min(spec.mlp_tile, tokens)
    stream = _stream_bytes(spec)

    def count_elements(params: layers.Weights) -> int:
        matrices = (p for p in jax.tree.leaves(params) if p.is_matrix and not p.is_adapter)
        return sum(param.size for param in matrices)

    params = decoder.split_kinds(model, spec.table["layers"])[kind]["post_attention"]
    weights = count_elements(params)
    cost = _feed_forward_cost(model, kind)
    live = tile * cost.backward_width + cost.fixed_elements
    # Statistics are float32, and have gradients
    live = itemsize * live + 2 * 4 * tokens * cost.statistics_width
    has_gradients = model.lora is None
    own_sums = 4 * cost.gradient_elements
    if tile < tokens:
        activations = live + 2 * stream + 5 * tile * model.hidden_size * itemsize
        return activations + (itemsize + 4 * has_gradients) * weights + own_sums
    gradients = 5 * count_elements(params["mlp"]) // 3 * has_gradients
    return live + 6 * stream + itemsize * weights + max(gradients, own_sums)


def _mixer_bytes(spec: StepSpec, kind: LayerKind) -> int:
    """Bytes of the backward pass of a layer's mixer: the maximum of the layers of a kind."""
    params = decoder.split_kinds(spec.model, spec.table["layers"])[kind]
    weights = sum(param.size for param in jax.tree.leaves(params))
    backward = registry.MIXERS[kind.mixer].backward_bytes(spec.model.of_kind(kind), spec.workload)
    # The layer's input and its gradient, or a copy of a gradient for the all-to-all
    num_streams = 1 if spec.remat_policy.offloads_during_attention else 2
    return backward + num_streams * _stream_bytes(spec) + spec.dtype.itemsize * weights


def _loss_bytes(spec: StepSpec) -> int:
    model = spec.model
    tokens = spec.tokens_per_device
    tile = min(spec.loss_tile, tokens)
    head = model.num_logits * model.hidden_size
    head_gradient = 4 * head if decoder.lm_head(spec.table).is_trainable else 0
    logits = (6 + spec.objective.bytes_per_logit) * tile * model.num_logits + head_gradient
    if tile == tokens:
        logits = max(logits - head_gradient, 2 * tile * model.num_logits + head_gradient)
    if (teacher := spec.teacher) is not None:
        head += teacher.model.num_logits * teacher.model.hidden_size
        logits += 4 * tile * teacher.model.num_logits
    return spec.dtype.itemsize * head + logits + 2 * _stream_bytes(spec)


# Host memory


def checkpoint_bytes(spec: StepSpec) -> int:
    """Host memory for an asynchronous checkpoint of the state on the device, in bytes per device.

    The copies of trained weights and state, and XLA's buffers for the transfers, which are pinned
    and stay allocated. They have a pool of their own, with the limit of the pool for offloaded
    arrays (`pool_bytes`). Arrays that are in host memory are written from there.

    Source: PjRtStreamExecutorRawBuffer::CopyRawDeviceToHostAndReturnEvent, openxla/xla
        xla/pjrt/se_raw_buffer.cc. Arrays of 1 GiB and more per device have no such buffer.
    """
    num_shards = device_mesh.num_shards(spec.mesh)
    copies = buffers = 0
    for param in jax.tree.leaves(spec.table):
        if param.is_trainable:
            held = sum(_held_bytes(spec, param))
            copies += held
            buffers += held if 4 * sharding.shard_size(param, num_shards) < GIB else 0
    offloaded = step_offloaded_bytes(spec)
    return copies + (min(buffers, pool_bytes(offloaded)) if offloaded.total else buffers)


class OffloadedBytes(NamedTuple):
    """Bytes of each device's arrays in host memory."""

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
        return sum(self)


def offloaded_bytes(model: ModelConfig, config: StepConfig, *, num_shards: int) -> OffloadedBytes:
    """Arrays in host memory with a config.

    Args: num_shards: number of devices that weights are sharded over.
    """
    weights = moments = gradients = frozen = 0
    memory = config.memory
    if memory.offload_optimizer != "none":
        table = specs.build_table(model, config)
        for param in filter(host_offload.should_offload, jax.tree.leaves(table)):
            num_bytes = sharding.shard_bytes(param, num_shards)
            if param.is_trainable:
                weights += num_bytes
                state = optimizer.state_bytes(config.optimizer, param, num_shards)
                moments += state.like_weight
                gradients += num_bytes if host_offload.should_offload_gradient(param) else 0
            else:
                frozen += num_bytes
    if memory.offload_optimizer != "state_and_gradients":
        gradients = frozen = 0
    num_groups = config.mesh.replica * max(1, num_shards // config.mesh.degree)
    if config.rows_per_step > config.microbatch_rows * num_groups:
        gradients *= 2  # the gradients of a microbatch, and their sums
    policy = RematPolicy(
        offload_activations=memory.offload_activations,
        offload_every=memory.offload_every,
        offloads_during_attention=memory.offload_during_attention == "always",
    ).with_whole_periods(model)
    per_token = 0
    itemsize = np.dtype(config.compute_dtype).itemsize
    if policy.is_input_offloaded:
        num_inputs = policy.num_offloaded_inputs(model.num_layers)
        if not policy.has_own_backward_pass:
            num_inputs += model.inner_loop  # its arrays are copied into those of all periods
        per_token = num_inputs * model.hidden_size * itemsize
    if policy.is_attention_offloaded:
        per_token += sum(
            registry.MIXERS[layer.mixer].output_bytes(model.of_kind(layer.kind), itemsize)
            for layer in model.layers
        )
    tokens_per_device = config.row_tokens * config.microbatch_rows // config.mesh.degree
    return OffloadedBytes(
        activations=tokens_per_device * per_token,
        weights=weights,
        moments=moments,
        gradients=gradients,
        frozen=frozen,
    )


def step_offloaded_bytes(spec: StepSpec) -> OffloadedBytes:
    """Arrays that a step keeps in host memory."""
    num_shards = device_mesh.num_shards(spec.mesh)
    return offloaded_bytes(spec.model, spec.config, num_shards=num_shards)


def pool_bytes(offloaded: OffloadedBytes) -> int:
    """Size for XLA's pool of pinned host memory: the formula, and a margin for other arrays."""
    return int(1.1 * offloaded.total) + 2 * GIB
