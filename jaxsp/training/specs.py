"""Description of the compiled training step of a run."""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxsp import attention
from jaxsp.attention import Attend, AttentionChoice
from jaxsp.blocks import layers, registry
from jaxsp.blocks.block import Workload
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.config.schema import Config
from jaxsp.core import axes, batch
from jaxsp.core.units import format_count
from jaxsp.data.packing.loader import RowPlacement
from jaxsp.model import decoder, layer_stack, tiling
from jaxsp.model.remat import RematPolicy
from jaxsp.objectives.objective import PairObjective
from jaxsp.runtime import device_mesh
from jaxsp.sharding import host_offload
from jaxsp.sharding.sharding import Gather
from jaxsp.training import compile_options, loss, trainable
from jaxsp.training.compile_options import CompileOptions
from jaxsp.training.loss import TokenLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything that determines a compiled step: config, model, mesh and attention."""

    config: Config
    model: ModelConfig
    mesh: Mesh
    attention: AttentionChoice
    num_steps: int
    """Number of steps of the run."""
    loss: TokenLoss | None = None
    """Loss of each token, `logits_TV, labels_T -> losses_T`; None: cross entropy.

    It is computed in tiles of `memory.loss_tile_tokens`. The step's loss is the mean over its loss
    tokens.
    """
    has_weights: bool = False
    """True if the compiled step takes `weights_BL`, a weight of each token's loss."""
    has_split_pairs: bool = False
    """True if the data have pairs of documents that do not fit into one row."""

    @property
    def objective(self) -> PairObjective | None:
        """Objective of preference training; None for sft."""
        objective = self.config.objective
        return objective if isinstance(objective, PairObjective) else None

    def describe_objective(self) -> str:
        """Describes the objective of preference training; empty for sft.

        Example: `dpo: beta 0.1, label_smoothing 0, sft_weight 0; the reference is Qwen/Qwen3-8B`.
        """
        if self.objective is None:
            return ""
        values = [f"{name} {value:g}" for name, value in self.objective if name != "type"]
        text = f"{self.objective.type}: {', '.join(values)}"
        if self.objective.needs_reference:
            source = self.config.model.source
            text += f"; the reference is {source or 'the random model of step 0'}"
            if self.config.adapter.source is not None:
                text += f" with the adapter {self.config.adapter.source}"
            elif self.config.adapter.type != "none":
                text += ", without the adapter"
        if self.scores_pairs_first:
            reason = "its losses depend on the whole step"
            if not self.objective.needs_step:
                reason = "pairs have rows in two microbatches; an even number of rows per "
                reason += "microbatch avoids it"
            text += f"; a step has one forward pass more, because {reason}"
        return text

    @property
    def scores_pairs_first(self) -> bool:
        """True if a step computes all log-probabilities of documents before the first gradient.

        That is a forward pass more. It is needed if a microbatch does not hold all that the losses
        of its pairs depend on: the loader deals two rows of a pair to one microbatch only if
        microbatches have an even number of rows.
        """
        if self.objective is None or self.num_microbatches == 1:
            return False
        is_pair_torn = self.has_split_pairs and self.global_microbatch_rows % 2 > 0
        return self.objective.needs_step or is_pair_torn

    @functools.cached_property
    def attend(self) -> Attend:
        """Attention as the model calls it."""
        return attention.make_chosen_attend(self.attention)

    @property
    def workload(self) -> Workload:
        """Inputs of the cost of a layer's blocks."""
        return Workload(
            config=self.config,
            attention=self.attention,
            tokens_per_device=self.tokens_per_device,
        )

    @property
    def placement(self) -> RowPlacement:
        """Devices for the rows, the order of their tokens, and the rows of a step."""
        strategy = self.attention.strategy
        batch = self.config.batch
        return RowPlacement(
            mesh=self.mesh,
            layout=strategy.layout,
            rows_per_step=batch.rows_per_step,
            rows_per_microbatch=batch.microbatch_rows,
            has_ring_steps=strategy.tokens.has_ring_steps,
        )

    @functools.cached_property
    def table(self) -> layers.Weights:
        """Parameter table of the model, in which frozen weights have their format."""
        return trainable.build_table(self.model, self.config)

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype."""
        return jnp.dtype(self.config.model.compute_dtype)

    @property
    def gather(self) -> Gather:
        """All-gather of weights and reduce-scatter of gradients."""
        memory = self.config.memory
        return Gather(
            num_shards=device_mesh.num_shards(self.mesh),
            compute_dtype=self.dtype,
            reduce_dtype=jnp.dtype(memory.grad_reduce_dtype),
            gradients_on_host=self.has_offloaded_gradients,
            sums_replicas_early=self.sums_replicas_early,
        )

    @property
    def has_one_loop(self) -> bool:
        """True if all layers run in one loop: see `layer_stack.is_one_loop`."""
        return layer_stack.is_one_loop(self.model.segments, self.remat_policy)

    @property
    def sums_replicas_early(self) -> bool:
        """True if a layer's gradients are summed over replicas while the next layer computes.

        With several microbatches they would be summed once for each, and with several loops XLA
        does not move a sum into the next iteration.
        """
        has_one_microbatch = self.config.batch.rows_per_step == self.global_microbatch_rows
        return has_one_microbatch and self.has_one_loop and self.mesh.shape[axes.REPLICA] > 1

    @property
    def compile_options(self) -> CompileOptions:
        """Compile options of the step."""
        return compile_options.choose_options(
            self.config,
            mesh=self.mesh,
            is_tiled=self.mlp_tile < self.tokens_per_device,
            sums_replicas_early=self.sums_replicas_early,
        )

    @property
    def has_offloaded_state(self) -> bool:
        """True if weights and optimizer state are in host memory between their uses."""
        return self.config.memory.offload_optimizer != "none"

    @property
    def has_offloaded_gradients(self) -> bool:
        """True if gradients and frozen weights are also in host memory."""
        return self.config.memory.offload_optimizer == "state_and_gradients"

    def is_on_host(self, param: Parameter) -> bool:
        """True if a weight and its optimizer state are in host memory between their uses.

        Frozen weights have no float32 master, so `state` leaves them on the device.
        """
        if not host_offload.should_offload(param):
            return False
        return self.has_offloaded_state if param.is_trainable else self.has_offloaded_gradients

    @property
    def tokens_per_device(self) -> int:
        """Tokens of a device in a microbatch."""
        config = self.config
        tokens = config.data.row_tokens * config.batch.microbatch_rows
        return tokens // self.mesh.shape[axes.SEQ]

    @property
    def global_microbatch_rows(self) -> int:
        """Rows of a microbatch over the mesh."""
        return device_mesh.num_groups(self.mesh) * self.config.batch.microbatch_rows

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return batch.num_microbatches(
            rows_per_step=self.config.batch.rows_per_step,
            global_microbatch_rows=self.global_microbatch_rows,
        )

    @property
    def mlp_tiles(self) -> list[int]:
        """Possible tile sizes of a layer's projections and MLP.

        In tokens of a device, the largest first.
        """
        # About 1.5 times what the feed-forward's backward pass needs, and five float32 numbers for
        # each model dim
        width = max(
            registry.FEED_FORWARDS[kind.feed_forward].backward_width(self.model)
            for kind in self.model.kinds
        )
        per_token = 3 * width // 2 * self.dtype.itemsize + 20 * self.model.hidden_size
        requested = self.config.memory.mlp_tile_tokens
        return self._list_tiles(requested, per_token, tiling.MLP_TILE_BYTES)

    @property
    def loss_tiles(self) -> list[int]:
        """Possible tile sizes of the loss, in tokens of a device, the largest first."""
        requested = self.config.memory.loss_tile_tokens
        return self._list_tiles(requested, 4 * self.model.num_logits, loss.MAX_LOGIT_BYTES)

    def _list_tiles(
        self, requested: int | Literal["auto"], bytes_per_token: int, max_bytes: tuple[int, ...]
    ) -> list[int]:
        """The requested tile size, or for `auto` all tokens and then the smaller tiles."""
        num_tokens = self.tokens_per_device
        if requested != "auto":
            return [min(requested, num_tokens)]
        choose = functools.partial(tiling.choose_tile, num_tokens, bytes_per_token=bytes_per_token)
        tiles = (choose(max_bytes=limit) for limit in max_bytes)
        return [num_tokens, *(tile for tile in tiles if tile < num_tokens)]

    @property
    def mlp_tile(self) -> int:
        """Tile size of a layer's projections and MLP, in tokens of a device.

        If the config has `auto`, a size that is safe before memory is known.
        """
        return self.mlp_tiles[:2][-1]

    @property
    def loss_tile(self) -> int:
        """Tile size of the loss, in tokens of a device; a safe size if the config has `auto`."""
        return self.loss_tiles[-1]

    @property
    def remat_policy(self) -> RematPolicy:
        """Activations that are saved for the backward pass.

        `auto` counts as its first value that is possible here; `memory_fit` decides it.
        """
        memory = self.config.memory
        policy = RematPolicy(
            remat="full",
            kept_mlp_layers=None if memory.kept_mlp_layers == "auto" else memory.kept_mlp_layers,
            offload_activations=memory.offload_activations,
            offload_every=memory.offload_every,
            offloads_during_attention=memory.offload_during_attention == "always",
        )
        if memory.remat == "auto":
            remat = "full" if policy.has_own_backward_pass else "save_attention"
        else:
            remat = memory.remat
        return dataclasses.replace(policy, remat=remat).with_whole_periods(self.model)

    def describe_layers(self) -> str:
        """Describes the blocks of the layers; empty if all have attention and an MLP."""
        is_quantized = self.config.adapter.quantization != "none"
        is_gathered = device_mesh.num_shards(self.mesh) > 1 and not is_quantized
        tokens = self.tokens_per_device if is_gathered else None
        return decoder.describe_layers(self.model, tokens_per_device=tokens)

    def describe_batch(self) -> str:
        """Describes the rows of a step and its microbatches.

        Example: `8 rows of 512 tokens per step, in 2 microbatches of 1 row per group`.
        """
        rows = format_count(self.config.batch.rows_per_step, "row")
        count = self.num_microbatches
        microbatches = "1 microbatch" if count == 1 else f"{count:,} microbatches"
        per_group = format_count(self.config.batch.microbatch_rows, "row")
        owner = "device" if self.mesh.shape[axes.SEQ] == 1 else "group"
        return (
            f"{rows} of {self.config.data.row_tokens:,} tokens per step, in {microbatches} of "
            f"{per_group} per {owner}"
        )
