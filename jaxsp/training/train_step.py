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
from jaxsp.config import schema
from jaxsp.core import axes, batch
from jaxsp.model import decoder, layers, remat, tiling
from jaxsp.model.config import ModelConfig
from jaxsp.runtime import device_mesh
from jaxsp.training import compile_options, host_offload, loss, optimizer, sharding
from jaxsp.training.loss import TokenLoss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that training carries from step to step."""

    master: layers.Weights
    """Float32 weights."""
    opt: Any
    step: batch.Leaf
    """Steps so far, an int32 scalar."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
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
    finite: batch.Leaf
    """Loss and gradient norm are finite; else nothing was updated."""
    loss_weight: batch.Leaf | None = None
    """Sum of the loss tokens' weights, which the loss is divided by; None if the rows have none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
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
class Totals:
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

    config: schema.Config
    model: ModelConfig
    mesh: Mesh
    attend: attention.Attend
    num_steps: int
    loss: TokenLoss | None = None
    """A loss per token, `logits_TV, labels_T -> losses_T`, computed in tiles of
    `memory.loss_tile_tokens`; None: cross entropy. The step's loss is its mean over loss tokens."""
    has_weights: bool = False
    """True if the compiled step takes `weights_BL`, a weight for each token's loss."""

    @property
    def table(self) -> layers.Weights:
        return decoder.table(self.model)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.compute_dtype)

    @property
    def gather(self) -> sharding.Gather:
        memory = self.config.memory
        return sharding.Gather(
            num_shards=device_mesh.num_shards(self.mesh),
            compute_dtype=self.dtype,
            reduce_dtype=jnp.dtype(memory.grad_reduce_dtype),
            gradients_on_host=memory.offload_optimizer == "state_and_gradients",
        )

    @property
    def told(self) -> compile_options.Told:
        """Compile options."""
        return compile_options.options(self.config, mesh=self.mesh, is_tiled=self.tile < self.tokens)

    @property
    def offloads(self) -> bool:
        """Whether weights and optimizer state wait in host memory."""
        return self.config.memory.offload_optimizer != "none"

    @property
    def tokens(self) -> int:
        """Tokens of a device in a turn of the longest rows."""
        return self.config.data.longest_row * self.config.batch.rows_at_once // self.mesh.shape[axes.SEQ]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        settings = self.config.batch
        rows_per_turn = device_mesh.num_groups(self.mesh) * settings.rows_at_once
        return batch.num_turns(rows_per_step=settings.rows_per_step, rows_per_turn=rows_per_turn)

    @property
    def mlp_tiles(self) -> list[int]:
        """Possible tile sizes of a layer's projections and MLP, in tokens of a device, largest
        first."""
        asked = self.config.memory.mlp_tile_tokens
        if asked != "auto":
            return [min(asked, self.tokens)]
        sizes = {"intermediate_size": self.model.intermediate_size, "hidden_size": self.model.hidden_size}
        sizes |= {"num_tokens": self.tokens, "itemsize": self.dtype.itemsize}
        tiles = (tiling.mlp_tile_tokens(**sizes, max_bytes=most) for most in tiling.MLP_BYTES)
        return [self.tokens, *(tile for tile in tiles if tile < self.tokens)]

    @property
    def loss_tiles(self) -> list[int]:
        """Possible tile sizes of the loss, in tokens of a device, largest first."""
        asked = self.config.memory.loss_tile_tokens
        if asked != "auto":
            return [min(asked, self.tokens)]
        sizes = {"num_tokens": self.tokens, "vocab_size": self.model.vocab_size}
        tiles = (loss.tile_tokens(**sizes, max_bytes=most) for most in loss.LOGIT_BYTES)
        return [self.tokens, *(tile for tile in tiles if tile < self.tokens)]

    @property
    def tile(self) -> int:
        """Tile size of a layer's projections and MLP, in tokens of a device; a safe size if it is
        `auto`."""
        return self.mlp_tiles[:2][-1]

    @property
    def loss_tile(self) -> int:
        """Tile size of the loss, in tokens of a device; a safe size if it is `auto`."""
        return self.loss_tiles[-1]

    @property
    def how(self) -> remat.Remat:
        """What the backward pass keeps of a layer; `auto` stands for attention here, see `compile`."""
        memory = self.config.memory
        kept = "attention" if memory.remat == "auto" else memory.remat
        return remat.Remat(remat=kept, offload_activations=memory.offload_activations)


def start(program: Program, *, seed: int) -> State:
    """Random weights and an empty optimizer, each on its devices."""
    master = sharding.random_weights(program.table, seed=seed, mesh=program.mesh, offloaded=program.offloads)
    return with_weights(program, master)


def with_weights(program: Program, master: layers.Weights) -> State:
    """These weights and an empty optimizer."""
    like = shapes(program)[0]

    def begin(row: layers.Parameter, like: jax.ShapeDtypeStruct, opt: Any) -> Any:
        places = jax.tree.map(lambda x: x.sharding, opt)
        empty = functools.partial(jnp.zeros, like.shape, like.dtype)
        return jax.jit(lambda: optimizer.init(program.config.optimizer, row, empty()), out_shardings=places)()

    # one after another: those of a large model need not fit a device together
    opt = jax.tree.map(begin, program.table, like.master, like.opt)
    return State(master=master, opt=opt, step=jax.device_put(jnp.int32(0), like.step.sharding))


def weight_shapes(program: Program) -> layers.Weights:
    """The master weights as jax.ShapeDtypeStructs with shardings."""
    num_shards = device_mesh.num_shards(program.mesh)

    def weight(row: layers.Parameter) -> jax.ShapeDtypeStruct:
        stored = sharding.place(row, num_shards).stored
        stored = stored if row.num_layers is None else (row.num_layers, *stored)
        place = sharding.home(row, program.mesh, offloaded=program.offloads)
        return jax.ShapeDtypeStruct(stored, jnp.float32, sharding=place)

    return jax.tree.map(weight, program.table)


def shapes(program: Program) -> tuple[State, batch.Batch]:
    """What a step takes, as jax.ShapeDtypeStructs with shardings: enough to compile it, on devices that need not be there."""
    table, mesh, settings = program.table, program.mesh, program.config
    everywhere = NamedSharding(mesh, PartitionSpec())

    def state_of(row: layers.Parameter, weight: jax.ShapeDtypeStruct) -> Any:
        """An optimizer's averages lie where their weight lies."""
        state = jax.eval_shape(lambda w: optimizer.init(settings.optimizer, row, w), weight)
        places = jax.tree.map(lambda x: weight.sharding if x.shape == weight.shape else everywhere, state)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)

    master = weight_shapes(program)
    opt = jax.tree.map(state_of, table, master)
    slots = device_mesh.num_groups(mesh) * settings.batch.rows_at_once
    widths = {batch.PER_TOKEN: settings.data.longest_row, batch.PER_ROW: settings.data.max_documents_per_row}
    rows: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (program.num_microbatches, slots, widths[spec]), jnp.int32, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in batch.SPECS.items()
    }
    if program.has_weights:
        labels = rows["labels_BL"]
        rows["weights_BL"] = jax.ShapeDtypeStruct(labels.shape, jnp.float32, sharding=labels.sharding)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return State(master=master, opt=opt, step=step), batch.Batch(**rows)


def _places(state: State) -> State:
    return jax.tree.map(lambda x: x.sharding, state)


_BY_VALUE = jax.ad.GradValue  # type: ignore[attr-defined]  # jax.ad is public, but has no type stubs
"""Marks a gradient that the backward pass returns instead of adding it into a reference."""


def gradients(program: Program, master: layers.Weights, rows: batch.Batch) -> Gradients:
    """Gradients and counts of a step's rows; the one place where loss meets mesh. Call under jit."""
    gather, table = program.gather, program.table

    def local(master: layers.Weights, rows: batch.Batch) -> dict[str, Any]:
        streams = program.config.memory.offload_optimizer == "state_and_gradients"
        values = master if streams else gather.working_copy(table, master)

        slots = gather.slots(table, values)
        # The backward pass adds a layer's gradient into these as soon as it has it. Added up after the backward pass, the
        # gradients of all layers would be on the device twice (8B on 8 GPUs: 3.5 GiB more). References to host memory do
        # not exist.
        targets = jax.tree.map(lambda slot: _BY_VALUE() if host_offload.holds(slot) else jax.new_ref(slot), slots)

        def microbatch(rows: batch.Batch) -> tuple[tuple[Array, Array], list[Array]]:
            """Sums of the rows' losses and correct tokens, and those gradients that wait in host memory."""

            def microbatch_loss(slots: layers.Weights) -> tuple[Array, Array]:
                return _turn_loss(program, sharding.shards(values, slots), rows)

            loss_sum, backward, num_correct = jax.vjp(microbatch_loss, slots, has_aux=True)
            (found,) = cast(Any, backward).with_refs(targets)(jnp.float32(1))
            # Gradients that went into references are placeholders here
            return (loss_sum, num_correct), [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, Array)]

        def next_microbatch(sums: tuple, rows: batch.Batch) -> tuple[tuple, None]:
            counts, grads = microbatch(rows)
            added = gather.add(_on_host(slots, table), sums[1], grads)
            return (jax.tree.map(jnp.add, sums[0], counts), added), None

        if rows.tokens_BL.shape[0] == 1:
            (loss_sum, num_correct), on_host = microbatch(jax.tree.map(lambda x: x[0], rows))
        else:
            zeros = ((jnp.float32(0), jnp.int32(0)), _on_host(slots, slots))
            ((loss_sum, num_correct), on_host), _ = jax.lax.scan(next_microbatch, zeros, rows)
        rest = iter(on_host)
        grads = jax.tree.map(
            lambda slot, target: next(rest) if host_offload.holds(slot) else jax.freeze(target), slots, targets
        )

        sums = _over_mesh(loss_sum, num_correct, rows)
        divisor = jnp.maximum(sums["num_loss_tokens"], 1).astype(jnp.float32)
        if "loss_weight" in sums:
            divisor = jnp.where(sums["loss_weight"] > 0, sums["loss_weight"], 1.0)
        return sums | {"loss": sums["loss"] / divisor, "gradients": gather.finish(table, grads, divisor)}

    weight_specs = sharding.specs(program.table, program.gather.num_shards)
    return Gradients(**_on_mesh(program, local, master, rows, out_specs={"gradients": weight_specs}))


def _on_host(slots: layers.Weights, tree: Any) -> list[Any]:
    """The leaves of a tree whose gradients wait in host memory."""
    return [leaf for slot, leaf in zip(jax.tree.leaves(slots), jax.tree.leaves(tree), strict=True) if host_offload.holds(slot)]


def totals(program: Program, master: layers.Weights, rows: batch.Batch) -> Totals:
    """Loss and counts of a step's rows, without gradients. Call under jit."""

    def local(master: layers.Weights, rows: batch.Batch) -> dict[str, Any]:
        shards = sharding.shards(master, program.gather.slots(program.table, master))

        def turn(sums: tuple, rows: batch.Batch) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, sums, _turn_loss(program, shards, rows)), None

        (loss_sum, num_correct), _ = jax.lax.scan(turn, (jnp.float32(0), jnp.int32(0)), rows)
        return _over_mesh(loss_sum, num_correct, rows)

    return Totals(**_on_mesh(program, local, master, rows, out_specs={}))


def _turn_loss(program: Program, shards: layers.Weights, rows: batch.Batch) -> tuple[Array, Array]:
    """Sum of the token losses of this device's part of a turn, and how many labels were the likeliest token."""
    head = decoder.head(program.table)
    hidden_BlD = decoder.hidden_states(
        shards,
        rows,
        config=program.model,
        attend=program.attend,
        gather=program.gather,
        dtype=program.dtype,
        how=program.how,
        tile=program.tile,
    )
    shard = decoder.head(shards)
    tile = min(program.loss_tile, rows.tokens_BL.size)
    sums = loss.token_losses(
        hidden_BlD,
        rows.labels_BL,
        rows.weights_BL,
        gather=program.gather,
        row=head,
        shard=shard,
        tile=tile,
        token_loss=program.loss,
    )
    return sums.loss, sums.num_correct


def _over_mesh(loss_sum: Array, num_correct: Array, rows: batch.Batch) -> dict[str, Array]:
    """The fields of Totals, of what each device has summed up over its part of a step's rows."""

    def count(values: Array, over: tuple[str, ...]) -> Array:
        return jax.lax.psum(values.sum(dtype=jnp.int32), over)

    # Labels are split over the whole mesh; starts and lengths are the same along seq, where they count once.
    sums = {
        "loss": jax.lax.psum(loss_sum, axes.ALL),
        "num_correct": jax.lax.psum(num_correct, axes.ALL),
        "num_rows": count((rows.lengths_BM > 0).any(-1), axes.GROUPS),
        "num_tokens": count(rows.lengths_BM, axes.GROUPS),
        "num_loss_tokens": count(rows.labels_BL != batch.NO_LABEL, axes.ALL),
    }
    if rows.weights_BL is not None:
        of_labels = jnp.where(rows.labels_BL != batch.NO_LABEL, rows.weights_BL, 0.0)
        sums["loss_weight"] = jax.lax.psum(of_labels.sum(), axes.ALL)
    return sums


def _on_mesh(
    program: Program, local: Callable, master: layers.Weights, rows: batch.Batch, *, out_specs: dict[str, Any]
) -> dict[str, Any]:
    """What `local` makes of each device's shards and rows: the fields of Totals, equal everywhere, and those of `out_specs`."""
    weight_specs = sharding.specs(program.table, program.gather.num_shards)
    row_specs = batch.specs(rows)
    everywhere = {field.name: PartitionSpec() for field in dataclasses.fields(Totals)}
    if rows.weights_BL is None:
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
        return on_mesh(master, rows)


def make(program: Program) -> jax.stages.Wrapped:
    """The jitted step; it takes the state's memory for the new state."""
    settings, table = program.config.optimizer, program.table
    rates = optimizer.learning_rates(settings, program.num_steps)

    def step(state: State, rows: batch.Batch) -> tuple[State, Metrics]:
        state = _at_home(program, state)
        done = gradients(program, state.master, rows)
        squares = jax.tree.map(lambda row, g: host_offload.total(row, lambda g: jnp.sum(g * g), g), table, done.gradients)
        norm = jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.float32(0)))
        limit = settings.max_grad_norm
        scale = jnp.float32(1) if limit is None else jnp.where(norm > limit, limit / norm, 1.0)
        rate = rates(state.step)
        finite = jnp.isfinite(done.loss) & jnp.isfinite(norm)
        # without a single label there is nothing to learn, and decay and momentum alone should not move the weights
        has_loss = done.num_loss_tokens > 0 if done.loss_weight is None else done.loss_weight > 0
        accept = finite & has_loss
        master, opt = optimizer.update(
            settings, table, done.gradients, state.opt, state.master, rate=rate, scale=scale, accept=accept
        )
        accuracy = done.num_correct.astype(jnp.float32) / jnp.maximum(done.num_loss_tokens, 1).astype(jnp.float32)
        metrics = Metrics(
            loss=done.loss,
            token_accuracy=accuracy,
            grad_norm=norm,
            learning_rate=rate,
            num_rows=done.num_rows,
            num_tokens=done.num_tokens,
            num_loss_tokens=done.num_loss_tokens,
            finite=finite,
            loss_weight=done.loss_weight,
        )
        return State(master=master, opt=opt, step=state.step + 1), metrics

    everywhere = NamedSharding(program.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(_places(shapes(program)[0]), everywhere))


def _at_home(program: Program, state: State) -> State:
    """The same state, with what is to be in host memory of that type: arguments from absent devices have lost it."""
    if not program.offloads:
        return state

    def of_weight(row: layers.Parameter, weight: Array, opt: Any) -> tuple[Array, Any]:
        if not host_offload.worth_it(row):
            return weight, opt
        return host_offload.on_host(weight), jax.tree.map(
            lambda x: host_offload.on_host(x) if x.shape == weight.shape else x, opt
        )

    master, opt = optimizer.apart(program.table, of_weight, state.master, state.opt)
    return dataclasses.replace(state, master=master, opt=opt)


def compile(program: Program) -> jax.stages.Compiled:
    """The step compiled; raises what `check` and `xla.compiled` raise."""
    return check(program, compile_options.compiled(make(program).lower(*shapes(program)), program.told))


def compile_totals(program: Program) -> jax.stages.Compiled:
    """`totals` compiled, from master weights and a step's rows; raises what `compile` raises."""
    state, rows = shapes(program)
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    lowered = jax.jit(functools.partial(totals, program), out_shardings=everywhere).lower(state.master, rows)
    return check(program, compile_options.compiled(lowered, program.told))


def check(program: Program, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """The program it is given, after a look at what it does.

    Raises: RuntimeError when rows are split over devices, but attention does not communicate: each device would attend to
        its own share only, with plausible losses. (Somebody once trained 20,000 steps of another system that way.)
    """
    seq = program.mesh.shape[axes.SEQ]
    if seq > 1 and not attention.collectives(compiled.as_text() or ""):
        raise RuntimeError(
            f"mesh.seq = {seq}, but the compiled step holds no attention collective: rows would be cut into "
            f"{seq} unrelated parts. This is a bug in attention; mesh.seq=1 is right meanwhile."
        )
    return compiled
