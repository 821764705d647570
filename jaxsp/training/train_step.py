"""The training step: gradients, clipping and the optimizer's update, jitted and compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxsp.attention.attend import find_collectives
from jaxsp.attention.workload import count_workloads
from jaxsp.blocks.layers import Parameter, Weights
from jaxsp.core import axes
from jaxsp.core.batch import Batch
from jaxsp.optimizers import optimizer
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory
from jaxsp.training import compile_options, step_gradients, train_state
from jaxsp.training.specs import StepSpec
from jaxsp.training.train_state import TrainState

StepResults = dict[str, Any]
"""Arrays by name, most of them scalars, for a step over the whole mesh: METRICS, the sums that they
are made from, and:

- grad_norm: global norm of the gradients, before clipping.
- learning_rate
- is_finite: True if loss and gradient norm are finite; otherwise the update was skipped.

Means are 0 in a step without loss tokens.
"""


def build_step(spec: StepSpec) -> jax.stages.Wrapped:
    """Jitted step, which reuses the old state's memory for the new state."""
    config = spec.config.optimizer
    schedule = config.make_rate(spec.num_steps)

    # Do not rename step, state and batch: the planner looks for these names in the compiled program
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepResults]:
        state = _set_memory_kinds(spec, state)
        gradients, results = step_gradients.compute_gradients(spec, state.master, batch, state.step)
        norm = _global_norm(spec, gradients)
        scale = jnp.float32(1)
        if (limit := config.max_grad_norm) is not None:
            scale = jnp.where(norm > limit, limit / norm, 1.0)
        learning_rate = schedule(state.step)
        is_finite = jnp.isfinite(results["loss"]) & jnp.isfinite(norm)
        master, opt_state = optimizer.update(
            config,
            spec.state_table,
            gradients,
            state.opt_state,
            state.master,
            mesh=spec.mesh,
            dtype=spec.dtype,
            learning_rate=learning_rate,
            grad_scale=scale,
            # A step without labels must not change weights, not even by weight decay or momentum
            accept=is_finite & (results["loss_weight"] > 0),
        )
        results |= {"grad_norm": norm, "learning_rate": learning_rate, "is_finite": is_finite}
        return TrainState(master=master, opt_state=opt_state, step=state.step + 1), results

    state = train_state.abstract_inputs(spec)[0]
    shardings = jax.tree.map(lambda x: x.sharding, state)
    replicated = NamedSharding(spec.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated))


def _global_norm(spec: StepSpec, gradients: Weights) -> Array:
    def sum_squares(param: Parameter, gradient: Array | None) -> Array | None:
        if gradient is None:
            return None
        return host_offload.sum_layers(param, lambda layer: jnp.sum(layer * layer), gradient)

    squares = jax.tree.map(sum_squares, spec.state_table, gradients)
    return jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.float32(0)))


def _set_memory_kinds(spec: StepSpec, state: TrainState) -> TrainState:
    """Marks offloaded arrays as arrays in host memory.

    Needed when the step is compiled for absent devices: its arguments then lack this mark.
    """
    if not spec.has_offloaded_state:
        return state

    def set_kind(param: Parameter, weight: Any, opt_state: Any) -> tuple[Any, Any]:
        if not spec.is_on_host(param):
            return weight, opt_state
        return device_memory.to_host(weight), jax.tree.map(
            lambda x: device_memory.to_host(x) if x.shape == weight.shape else x, opt_state
        )

    master, opt_state = optimizer.map_weights_and_state(
        spec.state_table, set_kind, state.master, state.opt_state
    )
    return dataclasses.replace(state, master=master, opt_state=opt_state)


def compile(spec: StepSpec) -> jax.stages.Compiled:
    """Compiles the step. Raises: as `check_collectives` and `compile_options.compile_lowered`."""
    lowered = build_step(spec).lower(*train_state.abstract_inputs(spec))
    return check_collectives(spec, compile_options.compile_lowered(lowered, spec.compile_options))


def compile_forward(spec: StepSpec, compute: Callable[..., Any]) -> jax.stages.Compiled:
    """Compiles a function of weights and a batch, whose results all devices get.

    Raises: as `compile`.
    """
    state, batch = train_state.abstract_inputs(spec)
    replicated = NamedSharding(spec.mesh, PartitionSpec())
    lowered = jax.jit(compute, out_shardings=replicated).lower(state.master, batch)
    return check_collectives(spec, compile_options.compile_lowered(lowered, spec.compile_options))


def check_collectives(spec: StepSpec, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """Checks that attention communicates if it has to, and returns the compiled program.

    It does not have to on a mesh with seq = 1, nor if each token sees only itself (windows of 1).

    Raises: RuntimeError if it does not. Each device would attend to its own shard only, with
        plausible losses. (A user of another system trained 20,000 steps that way.)
    """
    seq = spec.mesh.shape[axes.SEQ]
    strategy = spec.attend.strategy
    workloads = count_workloads(spec.config.rows, spec.model)
    must_send = strategy.seq != seq or any(map(strategy.sent_bytes, workloads))
    if must_send and not find_collectives(compiled.as_text() or ""):
        raise RuntimeError(
            f"mesh.seq = {seq}, but the compiled step has no attention collective: rows would be "
            f"cut into {seq} unrelated parts. This is a bug in attention. As a workaround, use "
            "mesh.seq=1."
        )
    return compiled
