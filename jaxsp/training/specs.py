"""Description of the compiled training step of a run."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsp.attention.attend import Attend, make_chosen_attend
from jaxsp.attention.selection import AttentionChoice, choose_attention
from jaxsp.blocks import float8, layers, registry
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError, at
from jaxsp.core.layout import Layout
from jaxsp.data.loader import RowPlacement
from jaxsp.delta_rule import kernels as delta_kernels
from jaxsp.experts import kernels as expert_kernels
from jaxsp.model import decoder, flops, layer_stack, tiling
from jaxsp.model.adapter_config import SAVED_MODULES, AdapterConfig
from jaxsp.model.remat import RematPolicy
from jaxsp.objectives.distill import Distill, find_teacher, has_teacher
from jaxsp.objectives.objective import Objective, Sft
from jaxsp.optimizers import param_groups
from jaxsp.sharding import host_offload, quantization
from jaxsp.sharding.sharding import Gather
from jaxsp.system import device_mesh
from jaxsp.training import compile_options, loss
from jaxsp.training.compile_options import CompileOptions
from jaxsp.training.loss import TokenLoss
from jaxsp.training.step_config import StepConfig

_TEACHER_MEMORY = {
    "remat": "full",
    "kept_mlp_layers": 0,
    "offload_activations": "none",
    "offload_every": 1,
    "offload_during_attention": "never",
}
"""Memory options of a teacher, which saves nothing for a backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything that determines a compiled step: config, model, mesh and attention."""

    config: StepConfig
    model: ModelConfig
    mesh: Mesh
    attention: AttentionChoice
    num_steps: int
    """Number of steps of the run."""
    device_bytes: int | None = None
    """Memory of a device that `attention` was chosen for; None: what the devices report."""
    loss: TokenLoss | None = None
    """Loss of each token, `logits_TV, labels_T -> losses_T`; None: cross entropy.

    It is computed in tiles of `memory.loss_tile_tokens`. The step's loss is the mean over its loss
    tokens.
    """
    has_weights: bool = False
    """True if the compiled step takes `weights_BL`, a weight of each token's loss."""
    has_split_pairs: bool = False
    """True if the data have pairs of documents that do not fit into one row."""
    teacher: "StepSpec | None" = None
    """Forward pass of the objective's teacher on the same rows; None without one."""
    common_vocab_size: int | None = None
    """Number of ids that the model and the objective's teacher have; None without a teacher."""

    @property
    def objective(self) -> Objective:
        """Objective of the step."""
        return self.config.objective

    @property
    def scores_pairs_first(self) -> bool:
        """True if a step computes all log-probabilities of documents before the first gradient.

        That is a forward pass more. It is needed if a microbatch does not hold all that the losses
        of its pairs depend on: the loader deals two rows of a pair to one microbatch only if
        microbatches have an even number of rows.
        """
        if not self.objective.has_pairs or self.num_microbatches == 1:
            return False
        is_pair_torn = self.has_split_pairs and self.global_microbatch_rows % 2 > 0
        return self.objective.needs_step or is_pair_torn

    @functools.cached_property
    def attend(self) -> Attend:
        """Attention as the model calls it."""
        return make_chosen_attend(self.attention)

    @property
    def placement(self) -> RowPlacement:
        """Devices for the rows, the order of their tokens, and the rows of a step."""
        strategy = self.attention.strategy
        return RowPlacement(
            mesh=self.mesh,
            layout=strategy.layout,
            rows_per_step=self.config.rows_per_step,
            rows_per_microbatch=self.config.microbatch_rows,
            has_ring_steps=strategy.tokens.has_ring_steps,
        )

    @functools.cached_property
    def table(self) -> layers.Weights:
        """Parameter table of the model, in which frozen weights have their format."""
        return build_table(self.model, self.config)

    @functools.cached_property
    def state_table(self) -> layers.Weights:
        """Parameter table of all weights of the state: `table`, and under `teacher` that of a
        teacher that is another model."""
        if self.teacher is None or find_teacher(self.objective) is None:
            return self.table
        rename = lambda param: dataclasses.replace(param, hf_name=f"teacher.{param.hf_name}")
        return self.table | {"teacher": jax.tree.map(rename, self.teacher.table)}

    def select_own(self, weights: layers.Weights) -> layers.Weights:
        """The model's own weights among those of `state_table`."""
        return {name: weights[name] for name in self.table}

    def select_teacher(self, weights: layers.Weights) -> layers.Weights:
        """The teacher's weights among those of `state_table`; without an own table, the teacher is
        the model without its adapter."""
        if "teacher" in self.state_table:
            return weights["teacher"]
        return select(self.table, weights, lambda param: not param.is_adapter)

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype."""
        return jnp.dtype(self.config.compute_dtype)

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
        has_one_microbatch = self.config.rows_per_step == self.global_microbatch_rows
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
        tokens = self.config.row_tokens * self.config.microbatch_rows
        return tokens // self.mesh.shape[axes.SEQ]

    @property
    def global_microbatch_rows(self) -> int:
        """Rows of a microbatch over the mesh."""
        return device_mesh.num_groups(self.mesh) * self.config.microbatch_rows

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return self.config.rows_per_step // self.global_microbatch_rows

    @property
    def mlp_tiles(self) -> list[int]:
        """Possible tile sizes of a layer's projections and MLP.

        In tokens of a device, the largest first.
        """
        # About 1.5 times what the feed-forward's backward pass needs, and five float32 numbers for
        # each model dim
        width = max(
            registry.FEED_FORWARDS[kind.feed_forward].tile_width(self.model.of_kind(kind))
            for kind in self.model.kinds
        )
        per_token = 3 * width // 2 * self.dtype.itemsize + 20 * self.model.hidden_size
        requested = self.config.memory.mlp_tile_tokens
        return self._list_tiles(requested, per_token, tiling.MLP_TILE_BYTES)

    @property
    def loss_tiles(self) -> list[int]:
        """Possible tile sizes of the loss, in tokens of a device, the largest first."""
        requested = self.config.memory.loss_tile_tokens
        num_logits = self.model.num_logits + (self.teacher.model.num_logits if self.teacher else 0)
        return self._list_tiles(requested, 4 * num_logits, loss.MAX_LOGIT_BYTES)

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

        `auto` counts as its first value that is possible here; `planning.fit` decides it.
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

    def count_flops(self, segment_lengths: np.ndarray) -> float:
        """Floating-point operations of a step over segments of these lengths."""
        total = flops.step_flops(self.model, segment_lengths, self.table)
        if self.teacher is not None:  # forward only
            total += flops.step_flops(self.teacher.model, segment_lengths) / 3
        return total

    def respec(self, **changes: Any) -> "StepSpec":
        """Returns the step with other values of its config: `respec(mesh={"seq": 4})`.

        Raises: UserError: see `make_spec`.
        """
        config = self.config.change(**changes)
        if changes.keys() <= {"memory", "rows_per_step", "objective"}:
            teacher = self.teacher
            if teacher is not None:
                memory = changes.get("memory", {})
                teacher = teacher.respec(memory=memory | _TEACHER_MEMORY)
            return dataclasses.replace(self, config=config, teacher=teacher)
        devices = list(self.mesh.devices.flat)
        made = make_spec(config, self.model, devices=devices, device_bytes=self.device_bytes)
        chosen = {name: getattr(made, name) for name in ("model", "mesh", "attention", "teacher")}
        return dataclasses.replace(self, config=config, **chosen)


def build_table(model: ModelConfig, config: StepConfig) -> layers.Weights:
    """Parameter table of a model, in which frozen weights have their format."""
    adapter = config.adapter
    has_adapter = adapter.type != "none"
    saved = {SAVED_MODULES[name] for name in adapter.modules_to_save}
    if model.tie_embeddings and saved:
        saved = set(SAVED_MODULES.values())
    if model.has_scores:  # a new head must learn
        saved.add(decoder.SCORE_NAME)

    def freeze(param: Parameter) -> Parameter:
        is_base = has_adapter and not param.is_adapter and param.hf_name not in saved
        if not is_base and not param_groups.is_frozen(config.optimizer, param):
            return param
        is_quantized = (
            is_base and adapter.quantization != "none" and quantization.can_quantize(param)
        )
        if is_quantized:
            return dataclasses.replace(param, frozen_as=adapter.quantization)
        frozen_as = param.compute_dtype or config.compute_dtype
        return dataclasses.replace(param, frozen_as=frozen_as)

    return jax.tree.map(freeze, decoder.param_table(model))


def select(table: layers.Weights, tree: Any, is_selected: Callable[[Parameter], bool]) -> Any:
    """Part of a tree, in the structure of `table`, that belongs to some of the weights.

    Subtrees without such a weight are left out.
    """
    selected = {}
    for name, part in table.items():
        if isinstance(part, Parameter):
            if is_selected(part):
                selected[name] = tree[name]
        elif inner := select(part, tree[name], is_selected):
            selected[name] = inner
    return selected


def make_spec(
    config: StepConfig,
    model: ModelConfig,
    *,
    devices: Sequence[Any],
    device_bytes: int | None = None,
) -> StepSpec:
    """Makes the step of a config whose mesh.seq and rows_per_microbatch are no longer `auto`.

    Args: device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError for attention, a mesh, or kernels that are not possible, also of a teacher.
    """
    make = functools.partial(_make_one, devices=devices, device_bytes=device_bytes)
    objective = config.objective
    if not has_teacher(objective):
        return make(config, model)
    teacher_model = _find_teacher(config, model)
    attempts = [config.attention]
    degree = math.gcd(config.mesh.degree, model.num_heads, teacher_model.num_heads)
    if config.attention.ulysses_degree is None and config.attention.strategy != "ulysses":
        # each model would share its heads among as many devices as it can
        ring = {"strategy": "ring"} if config.attention.strategy == "auto" else {}
        attempts.append(config.attention.model_copy(update=ring | {"ulysses_degree": degree}))
    for attention in attempts:
        spec = make(dataclasses.replace(config, attention=attention), model)
        teacher_config = _make_teacher_config(spec.config, teacher_model)
        with at("objective.teacher", objective.teacher):
            teacher = make(teacher_config, teacher_model)
        if spec.attention.strategy.layout == teacher.attention.strategy.layout:
            return dataclasses.replace(
                spec,
                config=config,
                teacher=teacher,
                common_vocab_size=min(model.vocab_size, teacher_model.vocab_size),
            )
    raise UserError(
        f"objective.teacher = {objective.teacher}: with attention.strategy = "
        f"{config.attention.strategy}, the model and its teacher need rows in different orders. "
        f"Use attention.strategy=ring and attention.ulysses_degree={degree}."
    )


def _find_teacher(config: StepConfig, model: ModelConfig) -> ModelConfig:
    """The objective's teacher. Raises: UserError if the model cannot be its own."""
    if model.teacher is not None:
        return model.teacher
    adapter = config.adapter
    if adapter.type == "none" or adapter.modules_to_save:
        reason = "adapter.type is none"
        if adapter.modules_to_save:
            reason = "adapter.modules_to_save change it too"
        raise UserError(
            "objective.teacher = null: the teacher is the model without its adapter, and "
            f"{reason}. Name a teacher: objective.teacher=FOLDER."
        )
    return dataclasses.replace(model, lora=None)


def _make_teacher_config(config: StepConfig, model: ModelConfig) -> StepConfig:
    """Config of the forward pass of a teacher."""
    objective = config.objective
    assert isinstance(objective, Distill)
    quantization = config.adapter.quantization
    linear_dtype = config.linear_dtype
    if objective.teacher is not None:
        quantization = objective.teacher_quantization
        linear_dtype = objective.teacher_linear_dtype
    return dataclasses.replace(
        config,
        objective=Sft(),
        memory=config.memory.model_copy(update=_TEACHER_MEMORY),
        # All weights except those of adapters are frozen, and a teacher has no adapters
        adapter=AdapterConfig(type="lora", quantization=quantization),
        linear_dtype=linear_dtype,
        delta_net_kernel=config.delta_net_kernel if model.delta_net else "auto",
        experts_kernel=config.experts_kernel if model.experts else "auto",
    )


def _make_one(
    config: StepConfig, model: ModelConfig, *, devices: Sequence[Any], device_bytes: int | None
) -> StepSpec:
    """Makes the step of a model, without a teacher."""
    choice = choose_attention(
        config.attention, config.rows, model, devices=devices, device_bytes=device_bytes
    )
    for name, part in (("delta_net", model.delta_net), ("experts", model.experts)):
        requested = getattr(config, f"{name}_kernel")
        if part is None and requested != "auto":
            words = name.replace("net", "nets").replace("_", " ")
            raise UserError(
                f"model.{name}_kernel = {requested}: the model has no {words}. Remove the field."
            )
    if (experts := model.experts) is not None:
        kernel = expert_kernels.choose(
            config.experts_kernel,
            dims=(model.hidden_size, experts.size),
            dtype=config.compute_dtype,
            devices=devices,
        )
        model = dataclasses.replace(model, experts=dataclasses.replace(experts, kernel=kernel))
    if (delta_net := model.delta_net) is not None:
        kernel = delta_kernels.choose(
            config.delta_net_kernel,
            sizes=(delta_net.key_size, delta_net.value_size),
            dtype=config.compute_dtype,
            devices=devices,
        )
        model = dataclasses.replace(model, delta_net=dataclasses.replace(delta_net, kernel=kernel))
    if (linear_dtype := config.linear_dtype) is not None:
        float8.check_devices(devices, linear_dtype)
        float8.check_model(model.hidden_size, linear_dtype)
        model = dataclasses.replace(model, linear_dtype=linear_dtype)
    sizes = device_mesh.resolve_axis_sizes(config.mesh, len(devices))
    return StepSpec(
        config=config,
        model=model,
        mesh=device_mesh.make_mesh(sizes, list(devices)),
        attention=choice,
        num_steps=1,
        device_bytes=device_bytes,
    )


def find_division_problems(
    config: StepConfig, sizes: dict[str, int], *, layout: Layout | None, with_training: bool = True
) -> list[str]:
    """Problems with dividing rows and their tokens among the devices.

    Args:
        sizes: axis sizes of the mesh.
        layout: order of the rows' tokens; None: unknown, so that suggested row lengths must suit 2
            chunks per device.
        with_training: False: leaves out batch.rows_per_step.
    Returns: one text per problem; empty if there is none.
    """
    problems = []
    seq = sizes[axes.SEQ]
    chunks_per_device = 1 if layout is None or layout.keeps_order else layout.chunks_per_device
    divisor = chunks_per_device * seq
    reason = "1 shard per device (mesh.seq)"
    if chunks_per_device > 1:
        reason = f"{chunks_per_device} chunks per device (mesh.seq)"
    row_tokens = config.row_tokens
    if row_tokens % divisor:
        multiples = _nearest_multiples(row_tokens, 2 * seq if layout is None else divisor)
        problems.append(
            f"data.row_tokens = {row_tokens}: must be a multiple of {divisor}, {reason}. "
            f"Use {errors.format_choices(multiples)}."
        )
    per_microbatch = config.microbatch_rows
    groups = sizes[axes.REPLICA] * sizes[axes.DATA]
    divisor = groups * per_microbatch
    rows_per_step = config.rows_per_step
    if with_training and rows_per_step % divisor:
        counts = f"{groups} sequence-parallel group{'s' if groups > 1 else ''} x {per_microbatch} "
        counts += f"row{'s' if per_microbatch > 1 else ''} per microbatch"
        problems.append(
            f"batch.rows_per_step = {rows_per_step}: must be a multiple of {divisor} ({counts}). "
            f"Use {errors.format_choices(_nearest_multiples(rows_per_step, divisor))}."
        )
    return problems


def _nearest_multiples(number: int, divisor: int) -> list[int]:
    """Positive multiples of a divisor just below and above a number that is not a multiple."""
    below = number // divisor * divisor
    return [below, below + divisor] if below else [divisor]
