"""The training step: the same loss, gradients and counts whatever the mesh.

Loss and gradients are computed inside one shard_map over the whole mesh. What is differentiated there is this device's *sum*
of token losses, with no collective on it; sums over devices come afterwards, each exactly once, and gradients are divided
once by the loss tokens of the whole step. (DeepSpeed 0.19.8 with its documented recipe differentiates a gathered mean, and
its gradients are `seq` times too large under ZeRO 0 to 2.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxsp import attention
from jaxsp.attention import Attend
from jaxsp.config.schema import Config
from jaxsp.core import axes, batch
from jaxsp.core.batch import NO_LABEL, PER_ROW, PER_TOKEN, SPECS, Batch, partition_specs
from jaxsp.model import decoder, layers, tiling
from jaxsp.model.config import ModelConfig
from jaxsp.model.layers import Parameter
from jaxsp.model.remat import RematPolicy
from jaxsp.runtime import device_mesh
from jaxsp.training import compile_options, host_offload, loss, optimizer, sharding, weight_init
from jaxsp.training.compile_options import CompileOptions
from jaxsp.training.loss import TokenLoss
from jaxsp.training.sharding import Gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that training carries from step to step."""

    master: layers.Weights
    """Float32 weights."""
    opt_state: Any
    step: batch.Leaf
    """Steps so far, an int32 scalar."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step says of itself, summed over the whole mesh, each token once."""

    loss: batch.Leaf
    """Mean over the step's loss tokens, weighted if rows have weights; 0 where there is none."""
    token_accuracy: batch.Leaf
    """Share of loss tokens that were the likeliest token."""
    grad_norm: batch.Leaf
    """Global, before clipping."""
    learning_rate: batch.Leaf
    num_rows: batch.Leaf
    num_tokens: batch.Leaf
    num_loss_tokens: batch.Leaf
    is_finite: batch.Leaf
    """Loss and gradient norm are finite; else nothing was updated."""
    loss_weight: batch.Leaf | None = None
    """Sum of the loss tokens' weights, which the loss is divided by; None if the rows have none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGradients:
    """Gradients of the step's mean token loss, sharded like the weights, and the step's counts."""

    gradients: layers.Weights
    loss: batch.Leaf
    num_correct: batch.Leaf
    num_rows: batch.Leaf
    num_tokens: batch.Leaf
    num_loss_tokens: batch.Leaf
    loss_weight: batch.Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over rows that are not learned from."""

    loss: batch.Leaf
    num_correct: batch.Leaf
    num_rows: batch.Leaf
    num_tokens: batch.Leaf
    num_loss_tokens: batch.Leaf
    loss_weight: batch.Leaf | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a step is made of."""

    config: Config
    model: ModelConfig
    mesh: Mesh
    attend: Attend
    num_steps: int
    loss: TokenLoss | None = None
    """A loss per token, `logits_TV, labels_T -> losses_T`, computed in tiles of
    `memory.loss_tile_tokens`; None: cross entropy. The step's loss is its mean over loss tokens."""
    has_weights: bool = False
    """True if the compiled step takes `weights_BL`, a weight for each token's loss."""

    @property
    def table(self) -> layers.Weights:
        return decoder.param_table(self.model)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.compute_dtype)

    @property
    def gather(self) -> Gather:
        memory = self.config.memory
        return Gather(
            num_shards=device_mesh.num_shards(self.mesh),
            compute_dtype=self.dtype,
            reduce_dtype=jnp.dtype(memory.grad_reduce_dtype),
            gradients_on_host=memory.offload_optimizer == "state_and_gradients",
        )

    @property
    def compile_options(self) -> CompileOptions:
        """Compile options."""
        return compile_options.choose_options(
            self.config, mesh=self.mesh, is_tiled=self.mlp_tile < self.tokens_per_device
        )

    @property
    def has_offloaded_state(self) -> bool:
        """Whether weights and optimizer state wait in host memory."""
        return self.config.memory.offload_optimizer != "none"

    @property
    def tokens_per_device(self) -> int:
        """Tokens of a device in a turn of the longest rows."""
        return (
            self.config.data.max_row_tokens
            * self.config.batch.rows_per_microbatch
            // self.mesh.shape[axes.SEQ]
        )

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        config = self.config.batch
        rows_per_turn = device_mesh.num_groups(self.mesh) * config.rows_per_microbatch
        return batch.num_microbatches(
            rows_per_step=config.rows_per_step, global_microbatch_rows=rows_per_turn
        )

    @property
    def mlp_tiles(self) -> list[int]:
        """Possible tile sizes of a layer's projections and MLP, in tokens of a device, largest
        first."""
        asked = self.config.memory.mlp_tile_tokens
        if asked != "auto":
            return [min(asked, self.tokens_per_device)]
        sizes = {
            "intermediate_size": self.model.intermediate_size,
            "hidden_size": self.model.hidden_size,
        }
        sizes |= {"num_tokens": self.tokens_per_device, "itemsize": self.dtype.itemsize}
        tiles = (tiling.choose_mlp_tile(**sizes, max_bytes=most) for most in tiling.MLP_TILE_BYTES)
        return [self.tokens_per_device, *(tile for tile in tiles if tile < self.tokens_per_device)]

    @property
    def loss_tiles(self) -> list[int]:
        """Possible tile sizes of the loss, in tokens of a device, largest first."""
        asked = self.config.memory.loss_tile_tokens
        if asked != "auto":
            return [min(asked, self.tokens_per_device)]
        sizes = {"num_tokens": self.tokens_per_device, "vocab_size": self.model.vocab_size}
        tiles = (loss.tile_tokens(**sizes, max_bytes=most) for most in loss.MAX_LOGIT_BYTES)
        return [self.tokens_per_device, *(tile for tile in tiles if tile < self.tokens_per_device)]

    @property
    def mlp_tile(self) -> int:
        """Tile size of a layer's projections and MLP, in tokens of a device; a safe size if it is
        `auto`."""
        return self.mlp_tiles[:2][-1]

    @property
    def loss_tile(self) -> int:
        """Tile size of the loss, in tokens of a device; a safe size if it is `auto`."""
        return self.loss_tiles[-1]

    @property
    def remat_policy(self) -> RematPolicy:
        """What the backward pass keeps of a layer; `auto` stands for attention here, see `compile`."""
        memory = self.config.memory
        kept = "save_attention" if memory.remat == "auto" else memory.remat
        return RematPolicy(remat=kept, offload_activations=memory.offload_activations)


def random_state(program: Program, *, seed: int) -> TrainState:
    """Random weights and an empty optimizer, each on its devices."""
    master = weight_init.random_weights(
        program.table, seed=seed, mesh=program.mesh, is_offloaded=program.has_offloaded_state
    )
    return init_state(program, master)


def init_state(program: Program, master: layers.Weights) -> TrainState:
    """These weights and an empty optimizer."""
    like = abstract_inputs(program)[0]

    def begin(row: Parameter, like: jax.ShapeDtypeStruct, opt: Any) -> Any:
        places = jax.tree.map(lambda x: x.sharding, opt)
        empty = functools.partial(jnp.zeros, like.shape, like.dtype)
        return jax.jit(
            lambda: optimizer.init(program.config.optimizer, row, empty()), out_shardings=places
        )()

    # one after another: those of a large model need not fit a device together
    opt = jax.tree.map(begin, program.table, like.master, like.opt_state)
    return TrainState(
        master=master, opt_state=opt, step=jax.device_put(jnp.int32(0), like.step.sharding)
    )


def abstract_weights(program: Program) -> layers.Weights:
    """The master weights as jax.ShapeDtypeStructs with shardings."""
    num_shards = device_mesh.num_shards(program.mesh)

    def weight(row: Parameter) -> jax.ShapeDtypeStruct:
        stored = sharding.choose_placement(row, num_shards).stored_shape
        stored = stored if row.num_layers is None else (row.num_layers, *stored)
        place = sharding.named_sharding(row, program.mesh, is_offloaded=program.has_offloaded_state)
        return jax.ShapeDtypeStruct(stored, jnp.float32, sharding=place)

    return jax.tree.map(weight, program.table)


def abstract_inputs(program: Program) -> tuple[TrainState, Batch]:
    """What a step takes, as jax.ShapeDtypeStructs with shardings: enough to compile it, on devices that need not be there."""
    table, mesh, config = program.table, program.mesh, program.config
    everywhere = NamedSharding(mesh, PartitionSpec())

    def state_of(row: Parameter, weight: jax.ShapeDtypeStruct) -> Any:
        """An optimizer's averages lie where their weight lies."""
        state = jax.eval_shape(lambda w: optimizer.init(config.optimizer, row, w), weight)
        places = jax.tree.map(
            lambda x: weight.sharding if x.shape == weight.shape else everywhere, state
        )
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
        )

    master = abstract_weights(program)
    opt = jax.tree.map(state_of, table, master)
    slots = device_mesh.num_groups(mesh) * config.batch.rows_per_microbatch
    widths = {PER_TOKEN: config.data.max_row_tokens, PER_ROW: config.data.max_segments_per_row}
    rows: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (program.num_microbatches, slots, widths[spec]),
            jnp.int32,
            sharding=NamedSharding(mesh, spec),
        )
        for name, spec in SPECS.items()
    }
    if program.has_weights:
        labels = rows["labels_BL"]
        rows["weights_BL"] = jax.ShapeDtypeStruct(
            labels.shape, jnp.float32, sharding=labels.sharding
        )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(master=master, opt_state=opt, step=step), Batch(**rows)


def _shardings(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, state)


_RETURN_GRADIENT = jax.ad.GradValue  # type: ignore[attr-defined]  # jax.ad is public, but has no type stubs
"""Marks a gradient that the backward pass returns instead of adding it into a reference."""


def compute_gradients(program: Program, master: layers.Weights, batch: Batch) -> StepGradients:
    """Gradients and counts of a step's rows; the one place where loss meets mesh. Call under jit."""
    gather, table = program.gather, program.table

    def local(master: layers.Weights, rows: Batch) -> dict[str, Any]:
        streams = program.config.memory.offload_optimizer == "state_and_gradients"
        values = master if streams else gather.make_working_copy(table, master)

        slots = gather.make_grad_slots(table, values)
        # The backward pass adds a layer's gradient into these as soon as it has it. Added up after the backward pass, the
        # gradients of all layers would be on the device twice (8B on 8 GPUs: 3.5 GiB more). References to host memory do
        # not exist.
        targets = jax.tree.map(
            lambda slot: _RETURN_GRADIENT() if host_offload.is_on_host(slot) else jax.new_ref(slot),
            slots,
        )

        def microbatch(rows: Batch) -> tuple[tuple[Array, Array], list[Array]]:
            """Sums of the rows' losses and correct tokens, and those gradients that wait in host memory."""

            def microbatch_loss(slots: layers.Weights) -> tuple[Array, Array]:
                return _sum_microbatch_loss(program, sharding.make_shards(values, slots), rows)

            loss_sum, backward, num_correct = jax.vjp(microbatch_loss, slots, has_aux=True)
            (found,) = cast(Any, backward).with_refs(targets)(jnp.float32(1))
            # Gradients that went into references are placeholders here
            return (loss_sum, num_correct), [
                leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, Array)
            ]

        def next_microbatch(sums: tuple, rows: Batch) -> tuple[tuple, None]:
            counts, grads = microbatch(rows)
            added = gather.accumulate(_host_leaves(slots, table), sums[1], grads)
            return (jax.tree.map(jnp.add, sums[0], counts), added), None

        if rows.tokens_BL.shape[0] == 1:
            (loss_sum, num_correct), on_host = microbatch(jax.tree.map(lambda x: x[0], rows))
        else:
            zeros = ((jnp.float32(0), jnp.int32(0)), _host_leaves(slots, slots))
            ((loss_sum, num_correct), on_host), _ = jax.lax.scan(next_microbatch, zeros, rows)
        rest = iter(on_host)
        grads = jax.tree.map(
            lambda slot, target: (
                next(rest) if host_offload.is_on_host(slot) else jax.freeze(target)
            ),
            slots,
            targets,
        )

        sums = _sum_over_mesh(loss_sum, num_correct, rows)
        divisor = jnp.maximum(sums["num_loss_tokens"], 1).astype(jnp.float32)
        if "loss_weight" in sums:
            divisor = jnp.where(sums["loss_weight"] > 0, sums["loss_weight"], 1.0)
        return sums | {
            "loss": sums["loss"] / divisor,
            "gradients": gather.reduce(table, grads, divisor),
        }

    weight_specs = sharding.partition_specs(program.table, program.gather.num_shards)
    return StepGradients(
        **_run_on_mesh(program, local, master, batch, out_specs={"gradients": weight_specs})
    )


def _host_leaves(slots: layers.Weights, tree: Any) -> list[Any]:
    """The leaves of a tree whose gradients wait in host memory."""
    return [
        leaf
        for slot, leaf in zip(jax.tree.leaves(slots), jax.tree.leaves(tree), strict=True)
        if host_offload.is_on_host(slot)
    ]


def compute_totals(program: Program, master: layers.Weights, batch: Batch) -> StepTotals:
    """Loss and counts of a step's rows, without gradients. Call under jit."""

    def local(master: layers.Weights, rows: Batch) -> dict[str, Any]:
        shards = sharding.make_shards(master, program.gather.make_grad_slots(program.table, master))

        def turn(sums: tuple, rows: Batch) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, sums, _sum_microbatch_loss(program, shards, rows)), None

        (loss_sum, num_correct), _ = jax.lax.scan(turn, (jnp.float32(0), jnp.int32(0)), rows)
        return _sum_over_mesh(loss_sum, num_correct, rows)

    return StepTotals(**_run_on_mesh(program, local, master, batch, out_specs={}))


def _sum_microbatch_loss(
    program: Program, shards: layers.Weights, batch: Batch
) -> tuple[Array, Array]:
    """Sum of the token losses of this device's part of a turn, and how many labels were the likeliest token."""
    head = decoder.lm_head(program.table)
    hidden_BlD = decoder.hidden_states(
        shards,
        batch,
        config=program.model,
        attend=program.attend,
        gather=program.gather,
        dtype=program.dtype,
        policy=program.remat_policy,
        tile_tokens=program.mlp_tile,
    )
    shard = decoder.lm_head(shards)
    tile = min(program.loss_tile, batch.tokens_BL.size)
    sums = loss.sum_token_losses(
        hidden_BlD,
        batch.labels_BL,
        batch.weights_BL,
        gather=program.gather,
        head=head,
        shard=shard,
        tile=tile,
        token_loss=program.loss,
    )
    return sums.loss, sums.num_correct


def _sum_over_mesh(loss_sum: Array, num_correct: Array, batch: Batch) -> dict[str, Array]:
    """The fields of Totals, of what each device has summed up over its part of a step's rows."""

    def count(values: Array, over: tuple[str, ...]) -> Array:
        return jax.lax.psum(values.sum(dtype=jnp.int32), over)

    # Labels are split over the whole mesh; starts and lengths are the same along seq, where they count once.
    sums = {
        "loss": jax.lax.psum(loss_sum, axes.ALL),
        "num_correct": jax.lax.psum(num_correct, axes.ALL),
        "num_rows": count((batch.lengths_BM > 0).any(-1), axes.GROUPS),
        "num_tokens": count(batch.lengths_BM, axes.GROUPS),
        "num_loss_tokens": count(batch.labels_BL != NO_LABEL, axes.ALL),
    }
    if batch.weights_BL is not None:
        of_labels = jnp.where(batch.labels_BL != NO_LABEL, batch.weights_BL, 0.0)
        sums["loss_weight"] = jax.lax.psum(of_labels.sum(), axes.ALL)
    return sums


def _run_on_mesh(
    program: Program,
    local: Callable,
    master: layers.Weights,
    batch: Batch,
    *,
    out_specs: dict[str, Any],
) -> dict[str, Any]:
    """What `local` makes of each device's shards and rows: the fields of Totals, equal everywhere, and those of `out_specs`."""
    weight_specs = sharding.partition_specs(program.table, program.gather.num_shards)
    row_specs = partition_specs(batch)
    everywhere = {field.name: PartitionSpec() for field in dataclasses.fields(StepTotals)}
    if batch.weights_BL is None:
        del everywhere["loss_weight"]
    on_mesh = jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(weight_specs, row_specs),
        out_specs=everywhere | out_specs,
        check_vma=False,
    )
    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if program.dtype == jnp.float32 else None):
        return on_mesh(master, batch)


def build_step(program: Program) -> jax.stages.Wrapped:
    """The jitted step; it takes the state's memory for the new state."""
    config, table = program.config.optimizer, program.table
    rates = optimizer.build_schedule(config, program.num_steps)

    def step(state: TrainState, rows: Batch) -> tuple[TrainState, StepMetrics]:
        state = _set_memory_kinds(program, state)
        done = compute_gradients(program, state.master, rows)
        squares = jax.tree.map(
            lambda row, g: host_offload.sum_layers(row, lambda g: jnp.sum(g * g), g),
            table,
            done.gradients,
        )
        norm = jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.float32(0)))
        limit = config.max_grad_norm
        scale = jnp.float32(1) if limit is None else jnp.where(norm > limit, limit / norm, 1.0)
        rate = rates(state.step)
        finite = jnp.isfinite(done.loss) & jnp.isfinite(norm)
        # without a single label there is nothing to learn, and decay and momentum alone should not move the weights
        has_loss = done.num_loss_tokens > 0 if done.loss_weight is None else done.loss_weight > 0
        accept = finite & has_loss
        master, opt = optimizer.update(
            config,
            table,
            done.gradients,
            state.opt_state,
            state.master,
            learning_rate=rate,
            grad_scale=scale,
            accept=accept,
        )
        accuracy = done.num_correct.astype(jnp.float32) / jnp.maximum(
            done.num_loss_tokens, 1
        ).astype(jnp.float32)
        metrics = StepMetrics(
            loss=done.loss,
            token_accuracy=accuracy,
            grad_norm=norm,
            learning_rate=rate,
            num_rows=done.num_rows,
            num_tokens=done.num_tokens,
            num_loss_tokens=done.num_loss_tokens,
            is_finite=finite,
            loss_weight=done.loss_weight,
        )
        return TrainState(master=master, opt_state=opt, step=state.step + 1), metrics

    everywhere = NamedSharding(program.mesh, PartitionSpec())
    return jax.jit(
        step, donate_argnums=0, out_shardings=(_shardings(abstract_inputs(program)[0]), everywhere)
    )


def _set_memory_kinds(program: Program, state: TrainState) -> TrainState:
    """The same state, with what is to be in host memory of that type: arguments from absent devices have lost it."""
    if not program.has_offloaded_state:
        return state

    def of_weight(row: Parameter, weight: Array, opt: Any) -> tuple[Array, Any]:
        if not host_offload.should_offload(row):
            return weight, opt
        return host_offload.to_host(weight), jax.tree.map(
            lambda x: host_offload.to_host(x) if x.shape == weight.shape else x, opt
        )

    master, opt = optimizer.map_weights_and_state(
        program.table, of_weight, state.master, state.opt_state
    )
    return dataclasses.replace(state, master=master, opt_state=opt)


def compile(program: Program) -> jax.stages.Compiled:
    """The step compiled; raises what `check` and `xla.compiled` raise."""
    return check_collectives(
        program,
        compile_options.compile_lowered(
            build_step(program).lower(*abstract_inputs(program)), program.compile_options
        ),
    )


def compile_totals(program: Program) -> jax.stages.Compiled:
    """`totals` compiled, from master weights and a step's rows; raises what `compile` raises."""
    state, rows = abstract_inputs(program)
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    lowered = jax.jit(functools.partial(compute_totals, program), out_shardings=everywhere).lower(
        state.master, rows
    )
    return check_collectives(
        program, compile_options.compile_lowered(lowered, program.compile_options)
    )


def check_collectives(program: Program, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """The program it is given, after a look at what it does.

    Raises: RuntimeError when rows are split over devices, but attention does not communicate: each device would attend to
        its own share only, with plausible losses. (Somebody once trained 20,000 steps of another system that way.)
    """
    seq = program.mesh.shape[axes.SEQ]
    if seq > 1 and not attention.find_collectives(compiled.as_text() or ""):
        raise RuntimeError(
            f"mesh.seq = {seq}, but the compiled step holds no attention collective: rows would be cut into "
            f"{seq} unrelated parts. This is a bug in attention; mesh.seq=1 is right meanwhile."
        )
    return compiled
