"""Training state: weights, optimizer state and step, as arrays or as their shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.core import batch
from jaxsp.core.batch import PER_ROW, PER_TOKEN, SPECS, Batch
from jaxsp.model import layers
from jaxsp.model.layers import Parameter
from jaxsp.runtime import device_mesh
from jaxsp.training import optimizer, optimizer_state, quantization, sharding, weight_init
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


def random_state(program: StepSpec, *, seed: int) -> TrainState:
    """Random weights and an initial optimizer state, each on its devices."""
    master = weight_init.random_weights(
        program.table, seed=seed, mesh=program.mesh, is_on_host=program.is_on_host
    )
    return init_state(program, master)


def init_state(program: StepSpec, master: layers.Weights) -> TrainState:
    """These weights and an initial optimizer state."""
    shapes = abstract_inputs(program)[0]

    def init_param(param: Parameter, opt_state: Any) -> Any:
        if not param.is_trainable:
            return None

        def init() -> Any:
            state = optimizer.init(program.config.optimizer, param)
            return optimizer_state.add_padding(state, opt_state)

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, opt_state))()

    # One after another: the temporaries of all weights of a large model may not fit a device
    opt_state = jax.tree.map(init_param, program.table, shapes.opt_state)
    step = jax.device_put(jnp.int32(0), shapes.step.sharding)
    return TrainState(master=master, opt_state=opt_state, step=step)


def abstract_weights(program: StepSpec) -> layers.Weights:
    """Weights as jax.ShapeDtypeStructs with shardings."""
    num_shards = device_mesh.num_shards(program.mesh)

    def describe(param: Parameter) -> Any:
        shape = sharding.stored_shape(param, num_shards)
        place = sharding.named_sharding(param, program.mesh, is_on_host=program.is_on_host(param))

        def add_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(add_sharding, quantization.describe(param, shape))

    return jax.tree.map(describe, program.table)


def abstract_inputs(program: StepSpec) -> tuple[TrainState, Batch]:
    """Inputs of a step as jax.ShapeDtypeStructs with shardings.

    They are enough to compile it, also for devices that are absent.
    """
    replicated = NamedSharding(program.mesh, PartitionSpec())

    def describe_state(param: Parameter) -> Any:
        if not param.is_trainable:
            return None
        describe = functools.partial(
            optimizer_state.describe,
            param,
            mesh=program.mesh,
            is_on_host=program.is_on_host(param),
        )
        return jax.tree.map(describe, optimizer.describe_state(program.config.optimizer, param))

    master = abstract_weights(program)
    opt_state = jax.tree.map(describe_state, program.table)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    state = TrainState(master=master, opt_state=opt_state, step=step)
    return state, _abstract_batch(program)


def _abstract_batch(program: StepSpec) -> Batch:
    """Batch of the longest rows, [microbatches, rows, ...], as jax.ShapeDtypeStructs."""
    config = program.config
    num_rows = device_mesh.num_groups(program.mesh) * config.batch.rows_per_microbatch
    widths = {PER_TOKEN: config.data.max_row_tokens, PER_ROW: config.data.max_segments_per_row}
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (program.num_microbatches, num_rows, widths[spec]),
            jnp.int32,
            sharding=NamedSharding(program.mesh, spec),
        )
        for name, spec in SPECS.items()
    }
    if program.has_weights:
        labels = arrays["labels_BL"]
        arrays["weights_BL"] = jax.ShapeDtypeStruct(
            labels.shape, jnp.float32, sharding=labels.sharding
        )
    return Batch(**arrays)
