"""The problem that a kernel has to solve on one device."""

import dataclasses
import math
from typing import NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Device(Protocol):
    """A jax.Device, present or absent. NVIDIA's have a `compute_capability`, for example `9.0`."""

    @property
    def device_kind(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWorkload:
    """Attention that one device computes at a time: whole rows or chunks, for its heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_tokens: int
    num_rows: int
    max_segments: int
    """Maximum number of segments of a row. With 1, rows are not packed."""
    window: int | None
    """Number of tokens that a token sees, including itself; None: all before it."""
    dtype: str
    chunks_per_row: int = 1
    """Number of chunks that a whole row is cut into. Each chunk counts as a row here."""
    num_earlier_keys: int = 0
    """Number of keys before a chunk that are processed at a time."""
    ulysses_degree: int = 1
    """Number of devices that hold the same chunks, each for other heads."""
    whole_row_tokens: int | None = None
    """Tokens of a whole row, if rows are cut into chunks."""
    is_deterministic: bool = False
    """True if gradients must be bitwise equal in every run: run.deterministic."""
    has_score_workspace: bool = False
    """True if the backward pass writes the gradients of all scores to memory: see
    `cudnn_memory.needs_score_workspace`."""

    @property
    def whole_row_shape(self) -> tuple[int, int]:
        """Number of whole rows, and tokens of each."""
        rows_per_whole_row = 2 if self.chunks_per_row > 1 else 1
        return self.num_rows // rows_per_whole_row, self.whole_row_tokens or self.row_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def is_packed(self) -> bool:
        return self.max_segments > 1

    @property
    def has_window(self) -> bool:
        """True if the window hides any token of a row from another."""
        return self.window is not None and self.window < self.row_tokens

    def num_q_elements(self, head_chunks: int) -> int:
        """Number of elements of the queries of one head chunk."""
        return self.num_tokens * (self.num_heads // head_chunks) * self.head_dim

    def row_multiple(self, chunk_multiple: int) -> int:
        """Number that the tokens of a whole row must be a multiple of.

        Args: chunk_multiple: number that the tokens of a chunk must be a multiple of.
        """
        return self.chunks_per_row * math.lcm(chunk_multiple, self.ulysses_degree)


class UnsupportedReason(NamedTuple):
    """Reason that a kernel cannot run a workload."""

    reason: str
    """The rest of a sentence that begins with the kernel's title."""
    suggestion: str
    """A sentence with a change that would work."""
