"""Attention of one layer, before it is divided among devices' kernels."""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxsp.attention.kernels.workload import KernelWorkload
from jaxsp.config.schema import Config


@runtime_checkable
class HasHeads(Protocol):
    """The fields of a model that attention depends on; `model.config.ModelConfig` has them."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWorkload:
    """A layer's attention in one microbatch of a sequence-parallel group."""

    num_rows: int
    """Rows that the group works on together."""
    tokens_per_device: int
    """Tokens of a row that one device holds."""
    row_tokens: int
    max_segments: int
    """Maximum number of segments of a row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """dtype of q, k, v, the output and their gradients."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    remat: str = "save_attention"
    """Value of memory.remat."""
    is_deterministic: bool = False

    @classmethod
    def from_config(
        cls, config: Config, model: HasHeads, *, remat: str | None = None
    ) -> "LayerWorkload":
        """The workload of a config's longest rows.

        Args: remat: replaces memory.remat of the config.
        """
        return cls(
            num_rows=config.batch.rows_per_microbatch,
            tokens_per_device=config.data.max_row_tokens // config.mesh.seq,
            row_tokens=config.data.max_row_tokens,
            max_segments=config.data.max_segments_per_row,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=config.model.compute_dtype,
            window=model.sliding_window,
            remat=config.memory.remat if remat is None else remat,
            is_deterministic=config.run.deterministic,
        )

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def has_window(self) -> bool:
        """True if the window hides any token of a row from another."""
        return self.window is not None and self.window < self.row_tokens

    @property
    def recomputes_attention(self) -> bool:
        """True if the backward pass computes attention again."""
        return self.remat == "full"

    @property
    def recomputes_projections(self) -> bool:
        """True if the backward pass computes q, k and v again."""
        return self.remat != "none"

    def to_kernel_workload(self) -> KernelWorkload:
        """The workload of a kernel that computes whole rows for all of these heads."""
        return KernelWorkload(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            row_tokens=self.row_tokens,
            num_rows=self.num_rows,
            max_segments=self.max_segments,
            window=self.window,
            dtype=self.dtype,
            whole_row_tokens=self.row_tokens,
            is_deterministic=self.is_deterministic,
        )
