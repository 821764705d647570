"""Config of a step: the fields of a run's config that change the compiled step or its rows."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.config import fields
from jaxsp.config.fields import HERE, ConfigSection, CountOrAuto, PositiveCount, with_examples
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.objective import Objective
from jaxsp.optimizers.registry import Optimizer
from jaxsp.system.device_mesh import MeshConfig

if TYPE_CHECKING:
    from jaxsp.attention.workload import GroupRows


class MemoryConfig(ConfigSection):
    """Memory-saving options."""

    remat: Literal["auto", "none", "save_attention_and_mlp", "save_attention", "full"] = "auto"
    """Recomputation in the backward pass. none: only elementwise operations.
    save_attention_and_mlp: each layer from its input, except attention and the wide products of the
    MLP, whose results are kept. save_attention: each layer from its input, except attention. full:
    attention too, which is about a quarter more arithmetic for long rows. auto: the first of
    save_attention_and_mlp (if nothing is offloaded), save_attention and full that fits. Gathered
    weights are never kept; they are gathered again."""
    kept_mlp_layers: Annotated[Literal["auto"] | int, with_examples(16)] = "auto"
    """Number of layers, the last ones, in which remat: save_attention_and_mlp keeps the MLP's
    products. auto: all of them, or with remat: auto as many as fit. A number needs remat:
    save_attention_and_mlp."""
    offload_activations: Annotated[
        Literal["none", "layer_inputs", "layer_inputs_and_attention"], with_examples("layer_inputs")
    ] = "none"
    """Activations kept in host memory until the backward pass. layer_inputs: each layer's input.
    layer_inputs_and_attention: also the results of attention."""
    offload_every: Annotated[PositiveCount, with_examples(2)] = 1
    """With offload_activations: layer_inputs, only the input of every k-th layer is kept until the
    backward pass, which computes those between again: (k - 1) / k of the forward pass. Host memory
    for layer inputs is divided by almost k. Requires remat full or auto, and jax 0.11.1 or later.
    """
    offload_during_attention: Literal["auto", "always", "never"] = "auto"
    """With offload_activations: layer_inputs and remat: full, the backward pass keeps a layer's
    input and the gradient of its output in host memory while it computes attention, when device
    memory is fullest. auto: only if the step does not fit otherwise. Requires jax 0.11.1 or later.
    """
    offload_optimizer: Annotated[
        Literal["none", "state", "state_and_gradients"], with_examples("state")
    ] = "none"
    """Arrays kept in host memory between steps. state: float32 weights and the optimizer's moments;
    the update copies one layer at a time to its device, and weights in the compute dtype stay
    there. state_and_gradients: also finished gradients, and frozen weights. Requires jax 0.11.1 or
    later."""
    mlp_tile_tokens: Annotated[CountOrAuto, with_examples(4096)] = "auto"
    """Tokens per device that go through a layer's projections and MLP at a time; tiles are
    recomputed in the backward pass. auto: all tokens, or fewer if the step does not fit."""
    loss_tile_tokens: Annotated[CountOrAuto, with_examples(1024)] = "auto"
    """Tokens per device whose logits exist at a time. auto: all tokens, or fewer if the step does
    not fit."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of sharded weights are sent and summed. Gradients of small weights
    are always summed in float32."""

    def find_problems(self) -> Iterator[str]:
        offloaded = self.offload_activations
        if self.remat == "full" and offloaded == "layer_inputs_and_attention":
            yield (
                f"{self.show('offload_activations')}: memory.remat = full keeps no results of "
                f"attention. Use {HERE}.offload_activations=layer_inputs, or "
                f"{HERE}.remat=save_attention."
            )
        for name, off in (("offload_every", (1,)), ("offload_during_attention", ("auto", "never"))):
            if getattr(self, name) in off:
                continue
            if offloaded != "layer_inputs":
                yield (
                    f"{self.show(name)}: needs layer inputs in host memory. Use "
                    f"{HERE}.offload_activations=layer_inputs, or {HERE}.{name}={off[0]}."
                )
            if self.remat not in ("auto", "full"):
                yield (
                    f"{self.show(name)}: {HERE}.remat = {self.remat} keeps more than layer inputs. "
                    f"Use {HERE}.remat=full."
                )

    @pydantic.field_validator("kept_mlp_layers", mode="before")
    @classmethod
    def _check_kept_layers(cls, value: Any) -> Any:
        if value not in ("auto", 0) and not fields.is_count(value):
            raise ValueError("must be auto, or an integer of at least 0")
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The values of a config that determine its step. Processes compare its `repr`."""

    row_tokens: int
    max_segments: int
    """Maximum number of segments of a row."""
    rows_per_step: int
    rows_per_microbatch: int | Literal["auto"]
    """Rows per microbatch and sequence-parallel group."""
    compute_dtype: str
    linear_dtype: str | None
    delta_net_kernel: str
    experts_kernel: str
    mesh: MeshConfig
    attention: AttentionConfig
    memory: MemoryConfig
    optimizer: Optimizer
    objective: Objective
    adapter: AdapterConfig
    seed: int
    is_deterministic: bool
    xla_options: Mapping[str, bool | int | float | str]

    def change(self, **changes: Any) -> "StepConfig":
        """Returns a config with other values: `change(row_tokens=1024, mesh={"seq": 4})`."""
        values = {
            name: getattr(self, name).model_copy(update=value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(self, **values)

    def with_one_row_for_auto(self) -> "StepConfig":
        """Returns the config with 1 row per microbatch and group in place of `auto`."""
        return self.change(rows_per_microbatch=1) if self.rows_per_microbatch == "auto" else self

    @property
    def packing(self) -> dict[str, Any]:
        """Arguments of `dataset.pack_documents`."""
        return {
            "row_tokens": self.row_tokens,
            "max_segments": self.max_segments,
            "seed": self.seed,
        }

    @property
    def microbatch_rows(self) -> int:
        """Rows per microbatch and group, after `auto` is resolved."""
        assert isinstance(self.rows_per_microbatch, int), "planning/candidates.py resolves it"
        return self.rows_per_microbatch

    @property
    def rows(self) -> "GroupRows":
        """Rows that a group works on together."""
        from jaxsp.attention.workload import GroupRows

        return GroupRows(
            num_rows=self.microbatch_rows,
            row_tokens=self.row_tokens,
            max_segments=self.max_segments,
            seq=self.mesh.degree,
            dtype=self.compute_dtype,
            is_deterministic=self.is_deterministic,
        )

    @property
    def has_frozen_weights(self) -> bool:
        """True if some of the model's own weights are not trained."""
        has_frozen_group = any(group.frozen for group in self.optimizer.groups)
        return has_frozen_group or self.adapter.type != "none"
