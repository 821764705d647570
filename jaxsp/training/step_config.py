"""Config of a step: the fields of a run's config that change the compiled step or its rows."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.objective import Objective
from jaxsp.optimizers.registry import Optimizer
from jaxsp.system.mesh_config import MeshConfig
from jaxsp.training.memory_config import MemoryConfig

if TYPE_CHECKING:
    from jaxsp.attention.strategies.workload import GroupRows


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
        from jaxsp.attention.strategies.workload import GroupRows

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
