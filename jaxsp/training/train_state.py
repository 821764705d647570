"""Training state: weights, optimizer state and step, as arrays or as their shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core import batch
from jaxsp.core.batch import PER_ROW, PER_TOKEN, SPECS, Batch, Pairs, max_pairs
from jaxsp.objectives.distill import Distill
from jaxsp.optimizers import optimizer
from jaxsp.sharding import quantization, sharding
from jaxsp.system import device_mesh
from jaxsp.training.specs import StepSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Arrays that training carries from step to step."""

    master: layers.Weights
    """All weights: trained ones in float32, frozen ones in the format that they are stored in."""
    opt_state: Any
    """Optimizer state of each weight; None for a frozen one."""
    step: batch.Leaf
    """Number of steps done, an int32 scalar."""


def init_state(spec: StepSpec, master: layers.Weights) -> TrainState:
    """These weights and an initial optimizer state."""
    shapes = abstract_inputs(spec)[0]

    def init_param(param: Parameter, opt_state: Any) -> Any:
        if not param.is_trainable:
            return None

        def init() -> Any:
            state = optimizer.init(spec.config.optimizer, param)
            return optimizer.add_padding(state, opt_state)

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, opt_state))()

    # One after another: the temporaries of all weights of a large model may not fit a device
    opt_state = jax.tree.map(init_param, spec.state_table, shapes.opt_state)
    step = jax.device_put(jnp.int32(0), shapes.step.sharding)
    return TrainState(master=master, opt_state=opt_state, step=step)


def abstract_weights(spec: StepSpec) -> layers.Weights:
    """Weights as jax.ShapeDtypeStructs with shardings."""
    num_shards = device_mesh.num_shards(spec.mesh)

    def describe(param: Parameter) -> Any:
        shape = sharding.stored_shape(param, num_shards)
        place = sharding.named_sharding(param, spec.mesh, is_on_host=spec.is_on_host(param))

        def add_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(add_sharding, quantization.describe(param, shape))

    return jax.tree.map(describe, spec.state_table)


def abstract_inputs(spec: StepSpec) -> tuple[TrainState, Batch]:
    """Inputs of a step as jax.ShapeDtypeStructs with shardings.

    They are enough to compile it, also for devices that are absent.
    """
    replicated = NamedSharding(spec.mesh, PartitionSpec())

    def describe_state(param: Parameter) -> Any:
        if not param.is_trainable:
            return None
        describe = functools.partial(
            optimizer.describe_array,
            param,
            mesh=spec.mesh,
            is_on_host=spec.is_on_host(param),
        )
        return jax.tree.map(describe, optimizer.describe_state(spec.config.optimizer, param))

    master = abstract_weights(spec)
    opt_state = jax.tree.map(describe_state, spec.state_table)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    state = TrainState(master=master, opt_state=opt_state, step=step)
    return state, _abstract_batch(spec)


def _abstract_batch(spec: StepSpec) -> Batch:
    """Batch of a step, [microbatches, rows, ...], as jax.ShapeDtypeStructs."""
    config = spec.config
    num_rows = device_mesh.num_groups(spec.mesh) * config.microbatch_rows
    widths = {PER_TOKEN: config.row_tokens, PER_ROW: config.max_segments}
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (spec.num_microbatches, num_rows, widths[partition]),
            jnp.int32,
            sharding=NamedSharding(spec.mesh, partition),
        )
        for name, partition in SPECS.items()
    }
    if spec.has_weights:
        labels = arrays["labels_BL"]
        arrays["weights_BL"] = jax.ShapeDtypeStruct(
            labels.shape, jnp.float32, sharding=labels.sharding
        )
    if isinstance(spec.objective, Distill) and spec.objective.predictions is not None:
        labels = arrays["labels_BL"]
        width = 2 * spec.objective.top_k + 1
        arrays["predictions_BLK"] = jax.ShapeDtypeStruct(
            (*labels.shape, width), jnp.int32, sharding=labels.sharding
        )
    if names := spec.objective.needs:
        numbers = jax.ShapeDtypeStruct(
            arrays["labels_BL"].shape, jnp.float32, sharding=arrays["labels_BL"].sharding
        )
        arrays["numbers_BL"] = dict.fromkeys(names, numbers)
    if spec.objective.has_pairs:
        arrays["documents_BM"] = arrays["starts_BM"]
        num_pairs = max_pairs(
            rows_per_step=config.rows_per_step,
            max_segments=config.max_segments,
        )
        whole = NamedSharding(spec.mesh, PartitionSpec())
        arrays["pairs"] = Pairs(
            references_P2=jax.ShapeDtypeStruct((num_pairs, 2), jnp.float32, sharding=whole),
            is_desirable_P=jax.ShapeDtypeStruct((num_pairs,), bool, sharding=whole),
        )
    return Batch(**arrays)
