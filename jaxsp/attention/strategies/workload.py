"""Attention workload of a model's layers: the input of strategies and kernels."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxsp.attention.kernels.kernel import KernelWorkload, ScoreConfig


@runtime_checkable
class HasHeads(Protocol):
    """The fields of a model that attention depends on; `blocks.config.ModelConfig` has them."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def layer_scores(self) -> Sequence[ScoreConfig]:
        """Scores of each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRows:
    """Rows that a sequence-parallel group works on together, all of one length."""

    num_rows: int
    row_tokens: int
    max_segments: int
    """Maximum number of segments of a row."""
    seq: int
    """Number of devices of the group."""
    dtype: str
    """dtype of q, k, v, the output and their gradients."""
    is_deterministic: bool = False
    """True if sums must have a fixed order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWorkload:
    """Attention of layers of one kind, each in one microbatch of a sequence-parallel group."""

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
    softcap: float | None = None
    """Cap of the scores: see `ScoreConfig`."""
    remat: str = "save_attention"
    """Value of memory.remat."""
    is_deterministic: bool = False
    has_windowed_kinds: bool = False
    """True if layers of any kind have a sliding window."""
    has_other_kinds: bool = False
    """True if layers with the same heads are of other kinds. Then XLA merges no collectives of the
    recomputed forward pass with those of the backward pass, because each is in a branch of its
    own."""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def qkv_bytes(self) -> tuple[int, int]:
        """Bytes of a device's queries, and of its keys and values together."""
        head = self.num_rows * self.tokens_per_device * self.head_dim * self.itemsize
        return self.num_heads * head, 2 * self.num_kv_heads * head

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
            softcap=self.softcap,
            whole_row_tokens=self.row_tokens,
            is_deterministic=self.is_deterministic,
        )


def count_workloads(
    rows: GroupRows, model: HasHeads, *, remat: str = "save_attention"
) -> dict[LayerWorkload, int]:
    """Number of a model's layers with each workload, in the order in which they first occur.

    Args: remat: value of memory.remat.
    """
    counts: collections.Counter[LayerWorkload] = collections.Counter()
    kinds = collections.Counter(drop_long_windows(model.layer_scores, row_tokens=rows.row_tokens))
    for score, num_layers in kinds.items():
        num_kv_heads, head_dim = score.heads or (model.num_kv_heads, model.head_dim)
        workload = LayerWorkload(
            num_rows=rows.num_rows,
            # 0 would not reach the check that rows can be divided
            tokens_per_device=max(1, rows.row_tokens // rows.seq),
            row_tokens=rows.row_tokens,
            max_segments=rows.max_segments,
            num_heads=model.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=rows.dtype,
            window=score.window,
            softcap=score.softcap,
            remat=remat,
            is_deterministic=rows.is_deterministic,
            has_windowed_kinds=any(kind.window is not None for kind in kinds),
            has_other_kinds=any(kind != score and kind.heads == score.heads for kind in kinds),
        )
        counts[workload] += num_layers
    return dict(counts)


def drop_long_windows(scores: Sequence[ScoreConfig], *, row_tokens: int) -> tuple[ScoreConfig, ...]:
    """Removes windows that are at least as long as a row, because they mask nothing."""
    return tuple(
        dataclasses.replace(score, window=None)
        if score.window is not None and score.window >= row_tokens
        else score
        for score in scores
    )
